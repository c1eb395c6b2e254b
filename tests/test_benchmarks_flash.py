"""Parts of the flash benchmark that need no simulator."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import flash, results_file
from benchmarks.simulate import simulate_once
from flax_pallas_attn import SegmentIds
from flax_pallas_attn.kernels import unit_lists
from flax_pallas_attn.kernels.walk import Walk
from flax_pallas_attn.masking import Mask


@pytest.fixture
def results(tmp_path, monkeypatch):
    monkeypatch.setattr(results_file, "RESULTS", tmp_path)
    return flash.Results()


@pytest.mark.parametrize(("query_size", "key_size"), [(512, 512), (256, 128), (128, 256)])
@pytest.mark.parametrize("by_query", [True, False])
def test_static_counts_are_those_of_the_list(query_size, key_size, by_query):
    documents = np.repeat(np.arange(8), 128)
    ids = jnp.asarray(documents)[None]
    walk = Walk(
        mask=Mask(lower=0, segment_ids=SegmentIds(ids, ids)),
        by_query=by_query,
        unit=64,
        query_size=query_size,
        key_size=key_size,
        chunk=1024,
        queries=1024,
        keys=1024,
    )
    lists = unit_lists.listed(walk)
    with flash.static_counts(documents):
        for tile, of_tile in enumerate(lists[0, :, 0]):
            assert [int(n) for n in unit_lists.counts(walk, tile, None)] == [
                int(n) for n in of_tile[:2]
            ]


def test_static_counts_notice_that_nobody_asks():
    with pytest.raises(AssertionError, match="no longer ask"), flash.static_counts(np.zeros(8)):
        pass


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [
        (flash.Shape(length=4), 2 * 10),
        (flash.Shape(length=4, batch=3, heads=1), 3 * 10),
        (flash.Shape(length=4, heads=1, documents=2), 2 * 3),
        (flash.Shape(length=4, heads=1, window=2), 1 + 2 + 2 + 2),
    ],
)
def test_pairs_of_a_shape(shape, pairs):
    assert shape.pairs == pairs


@pytest.mark.parametrize(
    "shape",
    [
        flash.Shape(length=1000),
        flash.Shape(length=1024, documents=4, batch=3),
        flash.Shape(length=1536, documents=2, heads=1),
        flash.Shape(length=1200, documents=3),
        flash.Shape(length=2048, window=256),
        flash.Shape(length=2048, window=257),
        flash.Shape(length=2048, window=512),
    ],
)
def test_tiles_of_a_shape(shape):
    place = np.arange(shape.length)
    distance = place[:, None] - place
    size = shape.length // shape.documents
    visible = (distance >= 0) & (distance < (shape.window or shape.length))
    visible &= place[:, None] // size == place // size
    rest = -shape.length % flash.TILE
    blocks = np.pad(visible, ((0, rest), (0, rest))).reshape(
        (shape.length + rest) // flash.TILE, flash.TILE, -1, flash.TILE
    )
    assert shape.tiles == shape.batch * shape.heads * blocks.any((1, 3)).sum()


def test_a_shape_is_compared_by_rate_or_by_time(results):
    def add(shape, cycles):
        key = {"what": "shapes", "topology": "v6e", "shape": shape, "step": "forward"}
        of_shape = flash.SHAPES[shape]
        figures = {"pairs": of_shape.pairs, "tiles": of_shape.tiles}
        results.add(key, {"count": cycles, "error": None, **figures})

    def relative(shape):
        return flash.relative(results, "v6e", shape, "forward")

    add("S=4096", 1000)
    assert relative("batch 4") is None
    add("batch 4", 5000)
    assert relative("batch 4") == pytest.approx(4 / 5)
    add("8 documents in 4096", 250)  # 3 of 4 tiles of each document, 24 of 136
    assert relative("8 documents in 4096") == pytest.approx(250 / (1000 * 24 / 136))
    add("S=4092", None)
    assert relative("S=4092") is None
    assert "-" in flash.shape_line(results, "v6e", "S=4092")


def test_results_are_written_row_by_row_and_read_again(results, tmp_path):
    key = {"what": "main", "topology": "v6e", "head_size": 64, "mask": "full", "step": "forward"}
    results.add(key, {"count": None, "error": "fails", "share": None})
    results.add(key, {"count": 100, "error": None, "share": 0.5})
    results.add({**key, "topology": "v5e"}, {"count": 1, "share": 0.25})
    again = flash.Results()
    assert again.rows == results.rows
    assert [row["topology"] for row in again.rows] == ["v5e", "v6e"]
    assert flash.line(again, "v6e", 64, "full", "forward").split() == [
        "forward", "64", "full", "0.50", "-", "-",
    ]  # fmt: skip
    assert list(tmp_path.glob("*.part")) == []


def test_results_of_other_versions_are_not_taken(results, monkeypatch):
    results.add({"what": "main", "topology": "v6e"}, {})
    assert len(flash.Results().rows) == 1
    monkeypatch.setattr(results_file, "installed_versions", lambda: {"jax": "0"})
    assert flash.Results().rows == []


def test_a_picture_is_drawn_of_what_there_is(results, tmp_path, monkeypatch):
    monkeypatch.setattr(flash, "PICTURE", tmp_path / "picture.png")
    key = {"topology": "v6e", "head_size": 64, "mask": "full", "step": "forward"}
    results.add({"what": "main", **key}, {"share": 0.5})
    results.add({"what": "peers", "peer": "splash", **key}, {"share": None})
    flash.draw(results)
    assert flash.PICTURE.stat().st_size > 1000


def test_the_document_shows_the_result_file(results):
    committed = Path(flash.__file__).parent / "results" / "flash.json"
    results.rows = json.loads(committed.read_text())["rows"]
    shown = flash.document(results).splitlines()
    in_document = flash.DOCUMENT.read_text().splitlines()
    for lines in (shown, in_document):  # versions: those that are installed
        lines[:] = [line for line in lines if not line.startswith("Written by")]
    assert in_document == shown
    row = results.find(what="main", topology="v6e", head_size=128, mask="full", step="forward")
    assert row["share"] is not None
    (cells,) = (line.split(" | ") for line in shown if line.startswith("| forward | full | 128"))
    assert cells[5].startswith(format(row["share"], ".2f"))


@pytest.mark.tpu_compile
def test_what_the_compiler_refuses_is_no_failure_of_the_simulator(results):
    shape = flash.Shape(length=256)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory on HBM"):
        simulate_once(
            lambda x: x + 1, jax.ShapeDtypeStruct((5, 2**30), jnp.float32), topology="v5e"
        )
    cycles = flash.measure(shape, "forward", "v6e", 128, True, flop=1e12)
    assert cycles.count is None
    assert "less than the peak allows" in cycles.error
