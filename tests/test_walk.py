"""The work of a flash kernel's walk, against masks written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.kernels.walk import MOST_LISTED, Walk
from flax_pallas_attn.masking import Mask, Positions, SegmentIds


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize(
    ("lower", "upper", "offset"),
    [(None, None, 0), (0, None, 0), (0, 40, 0), (-30, 25, 7), (0, None, 64), (5, 200, -40)],
)
@pytest.mark.parametrize(("queries", "keys"), [(256, 256), (250, 300), (64, 512), (130, 90)])
def test_scores_are_those_of_the_units_that_hold_anything(
    by_query, lower, upper, offset, queries, keys
):
    unit, query_size, key_size = 16, 64, 64
    walk = Walk(
        mask=Mask(lower=lower, upper=upper, query_offset=offset),
        by_query=by_query,
        unit=unit,
        query_size=query_size,
        key_size=key_size,
        queries=queries,
        keys=keys,
    )
    # Units run over the ends of the arrays, so the mask is written out to whole ones.
    rows, columns = -(-queries // unit) * unit, -(-keys // unit) * unit
    distance = np.arange(rows)[:, None] + offset - np.arange(columns)
    visible = np.ones_like(distance, bool)
    if lower is not None:
        visible &= distance >= lower
    if upper is not None:
        visible &= distance <= upper
    units = visible.reshape(rows // unit, unit, columns // unit, unit).any(axis=(1, 3))
    assert walk.scores == units.sum() * unit**2


def test_scores_of_a_causal_mask_are_near_half():
    sizes = {"unit": 256, "query_size": 1024, "key_size": 1024, "queries": 4096, "keys": 4096}
    causal = Walk(mask=Mask(lower=0), by_query=True, **sizes)
    assert causal.scores == 4096**2 * (16 + 1) // (2 * 16)


def random_mask(random: np.random.Generator, queries: int, keys: int) -> Mask:
    def ids(n):
        return np.sort(random.integers(-1, 4, (2, n)), axis=1).astype(np.int32)

    def places(n):
        return random.integers(0, 60, (2, n)).astype(np.int32)

    positions = Positions(places(queries), places(keys)) if random.random() < 0.5 else None
    segment_ids = SegmentIds(ids(queries), ids(keys)) if random.random() < 0.7 else None
    return Mask(lower=0, upper=40, positions=positions, segment_ids=segment_ids)


def written_out(mask: Mask, queries: int, keys: int, rows: int, columns: int) -> np.ndarray:
    """bool `[B or 1, rows, columns]`: what is visible, with padding that nobody sees."""
    tokens = (
        mask.query_tokens(jnp.arange(queries), axis=0),
        mask.key_tokens(jnp.arange(keys), axis=1),
    )
    visible = np.asarray(mask.visible(*tokens)).reshape(-1, queries, keys)
    return np.pad(visible, ((0, 0), (0, rows - queries), (0, columns - keys)))


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize("all_cut", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_work_of_a_mask_that_is_data(seed, all_cut, by_query):
    """Each unit stands in the list once: whole ones, then cut ones, then those that are hidden."""
    random = np.random.default_rng(seed)
    queries, keys = (int(n) for n in random.integers(1, 200, 2))
    unit, query_size, key_size, chunk = 8, 64, 32, 64
    mask = random_mask(random, queries, keys)
    if mask.positions is None and mask.segment_ids is None:
        mask = Mask(rule=lambda i, j: i >= j)
    walk = Walk(
        mask=mask,
        by_query=by_query,
        unit=unit,
        query_size=query_size,
        key_size=key_size,
        queries=queries,
        keys=keys,
        all_cut=all_cut,
    )
    work = np.asarray(walk.work(chunk))
    block = (query_size, chunk) if by_query else (chunk, key_size)
    rows, columns = -(-queries // block[0]), -(-keys // block[1])
    visible = written_out(mask, queries, keys, rows * block[0], columns * block[1])
    tiles = visible.reshape(-1, rows, block[0], columns, block[1]).swapaxes(2, 3)
    group = walk.listed(chunk)
    assert 1 <= group <= MOST_LISTED
    for b, row, column in np.ndindex(len(work), rows, columns):
        place = column * rows + row if by_query else row * columns + column
        whole, groups, *units = work[b, place, 0].tolist()
        places = [(n >> 16, n & 0xFFFF) for n in units]
        assert len(set(places)) == len(places) == block[0] * block[1] // unit**2
        holds = []
        for query, key in places:
            tile = tiles[b, row, column]
            part = tile[query * unit : (query + 1) * unit, key * unit : (key + 1) * unit]
            holds.append((part.any(), part.all()))
        assert all(is_full for _, is_full in holds[: whole * group])
        assert not any(is_met for is_met, _ in holds[groups * group :])
        assert whole <= groups
        assert not (all_cut and whole)


def test_work_leaves_out_other_documents():
    ids = np.repeat(np.arange(8), 128)[None]
    walk = Walk(
        mask=Mask(lower=0, segment_ids=SegmentIds(ids, ids)),
        by_query=True,
        unit=64,
        query_size=512,
        key_size=512,
        queries=1024,
        keys=1024,
    )
    work = np.asarray(walk.work(1024))
    # Three units of each of four documents: 12 of 128, 4 of them whole, in groups of 8.
    assert work[0, :, 0, :2].tolist() == [[0, 2], [0, 2]]


@pytest.mark.parametrize("by_query", [True, False])
def test_walks_that_are_written_out(by_query):
    """Every unit that holds anything once, and of each row the first and the last marked."""
    sizes = {"unit": 64, "query_size": 256, "key_size": 256, "queries": 500, "keys": 512}
    walk = Walk(mask=Mask(lower=0), by_query=by_query, heads=3, most_written=512**2, **sizes)
    assert walk.is_known
    assert walk.has_known_end
    for tile in range(2):
        calls = []
        walk.visit(tile, 0, 512, calls.append, lambda *lists, calls=calls: calls.append(lists))
        ((units, expected, following),) = calls
        assert expected == following == []
        assert len({unit.number for unit in units}) == len(units)
        for head, own in np.ndindex(3, 4):
            met = [
                (unit.key, unit.is_first, unit.is_last)
                if by_query
                else (unit.query, unit.is_first, unit.is_last)
                for unit in units
                if (unit.head, unit.query if by_query else unit.key) == (head, own * 64)
            ]
            row = tile * 4 + own
            others = range(row + 1) if by_query else range(row, 8)
            assert met == [(64 * n, n == others[0], n == others[-1]) for n in others]


def test_walks_that_are_not_written_out():
    sizes = {"by_query": True, "unit": 64, "query_size": 256, "key_size": 256}
    causal = Walk(mask=Mask(lower=0), queries=512, keys=512, most_written=26 * 64**2, **sizes)
    assert causal.is_known
    # One unit less than the second tile meets; and first queries that see nothing.
    few = Walk(mask=Mask(lower=0), queries=512, keys=512, most_written=25 * 64**2, **sizes)
    assert not few.is_known
    ahead = Mask(lower=0, query_offset=-100)
    assert not Walk(mask=ahead, queries=512, keys=512, most_written=512**2, **sizes).is_known
