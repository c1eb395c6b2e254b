"""How the tuner chooses among simulated pairs, and the table that it writes."""

import subprocess
import sys

import pytest

from benchmarks import results_file, tune
from flax_pallas_attn.kernels.tiles import Tiles

CASE = {"topology": "v6e", "dtype": "bfloat16", "head_size": 128, "length": 4096, "step": "forward"}


def rows(counts, **case):
    return [
        {**CASE, **case, "mask": mask, "tiles": list(pair), "count": count, "error": None}
        for pair, by_mask in counts.items()
        for mask, count in by_mask.items()
    ]


def test_the_best_pair_is_good_under_both_masks():
    counts = {
        (256, 256): {"causal": 10, "full": 40},
        (512, 256): {"causal": 15, "full": 20},
        (1024, 256): {"causal": 5, "full": None},  # the simulator failed
        (2048, 256): {"full": 1},
    }
    assert tune.best(rows(counts)) == (512, 256)
    assert tune.best(rows({(256, 256): {"causal": None, "full": 3}})) is None


def test_table_is_a_module_with_the_best_pairs():
    known = rows({(512, 256): {"causal": 1, "full": 1}}, topology="tpu7x")
    known += rows({(512, 1024): {"causal": 2, "full": 2}, (256, 256): {"causal": 9, "full": 9}})
    known += rows({(256, 512): {"causal": 1, "full": 1}}, step="backward")
    known += rows({(256, 512): {"causal": None, "full": None}}, head_size=64)
    text = tune.table(known)
    names = {}
    exec(text, names)
    assert names["FORWARD"] == {
        ("v6e", "bfloat16", 128, 4096): (512, 1024),
        ("tpu7x", "bfloat16", 128, 4096): (512, 256),
    }
    assert names["BACKWARD"] == {("v6e", "bfloat16", 128, 4096): (256, 512)}
    formatted = subprocess.run(
        [sys.executable, "-m", "ruff", "format", "-"],
        input=text,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert formatted == text


def test_a_run_goes_on_where_it_was_and_its_table_does_not_make_rows_old(tmp_path, monkeypatch):
    measured = []

    def measure(**case):
        measured.append(case)
        if len(measured) == 3:
            raise KeyboardInterrupt
        return tune.Cycles(count=100 * sum(case["tiles"]))

    for name in ("RESULTS", "KERNELS"):
        monkeypatch.setattr(results_file, name, tmp_path)
    (tmp_path / "kernel.py").write_text("1")
    monkeypatch.setattr(tune, "TABLE", tmp_path / "tile_table.py")
    monkeypatch.setattr(tune, "measure", measure)
    arguments = "--topology v6e --dtype bfloat16 --head-size 64 --length 1024 --step forward"
    monkeypatch.setattr(sys, "argv", ["tune", *arguments.split()])
    with pytest.raises(KeyboardInterrupt):
        tune.main()
    tune.main()
    pairs = len(tune.pairs(1024)) * len(tune.MASKS)
    assert len(measured) == pairs + 1
    assert '("v6e", "bfloat16", 64, 1024): (256, 256)' in tune.TABLE.read_text()
    tune.main()
    assert len(measured) == pairs + 1
    (tmp_path / "kernel.py").write_text("2")
    tune.main()
    assert len(measured) == 2 * pairs + 1


@pytest.mark.parametrize("length", tune.LENGTHS)
def test_pairs_fit_the_sequence_and_are_tiles(length):
    assert all(size <= length for pair in tune.pairs(length) for size in pair)
    for own, other in tune.pairs(length):
        Tiles(
            query=own,
            key=other,
            key_chunk=length,
            backward_key=own,
            backward_query=other,
            backward_query_chunk=length,
        )


@pytest.mark.tpu_compile
def test_a_simulated_pair():
    case = {"topology": "v6e", "dtype": "bfloat16", "head_size": 128, "length": 1024}
    cycles = tune.measure(**case, step="forward", mask="full", tiles=(256, 256))
    assert cycles.count is not None
    assert cycles.count > 4 * tune.HEADS * 1024**2 * 128 / 524_288
