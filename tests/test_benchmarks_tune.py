"""How the tuner chooses among simulated pairs, and the table that it writes."""

import subprocess
import sys

import pytest

from benchmarks import results_file, simulate, tune
from benchmarks.simulate import GENERATIONS
from flax_pallas_attn.kernels import tile_table
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
    known += rows({(256, 512): {"causal": None, "full": None}}, head_size=256)
    known += rows({(512, 512): {"causal": 1, "full": 1}}, head_size=256, topology="tpu7x")
    text = tune.table(known)
    names = {}
    exec(text, names)
    assert names["FORWARD"] == {
        ("v6e", "bfloat16", 128, 4096): (512, 1024),
        ("v6e", "bfloat16", 256, 4096): (512, 512),
        ("tpu7x", "bfloat16", 128, 4096): (512, 256),
        ("tpu7x", "bfloat16", 256, 4096): (512, 512),
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


def test_sizes_go_down_until_one_is_much_slower(monkeypatch):
    measured = []

    def measure(*, tiles, mask, **case):
        measured.append((*tiles, mask))
        # 1024 is the best, and 2048 by 1024 does not simulate.
        cycles = {(2048, 2048): 110, (1024, 1024): 100, (1024, 512): 101, (512, 512): 106}
        return tune.Cycles(count=cycles.get(tuple(tiles)))

    monkeypatch.setattr(tune, "measure", measure)
    found = tune.search(CASE)
    assert tune.best(found) == (1024, 1024)
    assert measured == [
        (*pair, mask)
        for pair in [(2048, 2048), (2048, 1024), (1024, 1024), (1024, 512), (512, 512)]
        for mask in tune.MASKS
    ]


def test_a_run_keeps_what_others_found(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    monkeypatch.setattr(tune, "TABLE", tmp_path / "tile_table.py")
    monkeypatch.setattr(tune, "measure", lambda **case: tune.Cycles(count=sum(case["tiles"])))
    for head_size in ("64", "128", "64"):
        arguments = f"--topology v6e --dtype bfloat16 --head-size {head_size} --length 1024"
        monkeypatch.setattr(sys, "argv", ["tune", *arguments.split()])
        tune.main()
    names = {}
    exec(tune.TABLE.read_text(), names)
    expected = {("v6e", "bfloat16", head_size, 1024): (256, 256) for head_size in (64, 128)}
    assert names["FORWARD"] == names["BACKWARD"] == expected


@pytest.mark.parametrize("step", tune.STEPS)
@pytest.mark.parametrize("dtype", tune.DTYPES)
@pytest.mark.parametrize("length", tune.LENGTHS)
def test_pairs_fit_the_sequence_and_are_tiles(length, dtype, step):
    pairs = tune.pairs(CASE | {"length": length, "dtype": dtype, "step": step})
    assert len(pairs) > 1
    for own, other in pairs:
        assert max(own, other) <= length
        Tiles(
            query=own,
            key=other,
            key_chunk=length,
            backward_key=own,
            backward_query=other,
            backward_query_chunk=length,
        )


def test_every_generation_and_dtype_is_in_the_table():
    for entries in (tile_table.FORWARD, tile_table.BACKWARD):
        assert {key[:2] for key in entries} == {
            (generation, dtype) for generation in GENERATIONS for dtype in tune.DTYPES
        }


@pytest.mark.tpu_compile
def test_a_pair_is_simulated_once(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    case = {"topology": "v6e", "dtype": "bfloat16", "head_size": 128, "length": 512}
    case |= {"step": "forward", "mask": "full", "tiles": (256, 256)}
    cycles = tune.measure(**case)
    assert cycles.count is not None
    assert cycles.count > 4 * tune.HEADS * 512**2 * 128 / 524_288
    monkeypatch.setattr(simulate, "estimate_cycles", None)
    assert tune.measure(**case) == cycles
