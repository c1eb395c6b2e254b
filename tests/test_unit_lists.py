"""The lists of units of a mask that is data, against masks written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.kernels import unit_lists
from flax_pallas_attn.kernels.walk import Walk
from flax_pallas_attn.masking import Mask, Positions, SegmentIds


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
def test_lists_of_a_mask_that_is_data(seed, all_cut, by_query):
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
        chunk=chunk,
        queries=queries,
        keys=keys,
        all_cut=all_cut,
    )
    lists = np.asarray(unit_lists.listed(walk))
    block = (query_size, chunk) if by_query else (chunk, key_size)
    rows, columns = -(-queries // block[0]), -(-keys // block[1])
    visible = written_out(mask, queries, keys, rows * block[0], columns * block[1])
    tiles = visible.reshape(-1, rows, block[0], columns, block[1]).swapaxes(2, 3)
    group = unit_lists.at_a_time(walk)
    assert 1 <= group <= unit_lists.MOST_AT_A_TIME
    for b, row, column in np.ndindex(len(lists), rows, columns):
        place = column * rows + row if by_query else row * columns + column
        whole, groups, *units = lists[b, place, 0].tolist()
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


def test_lists_leave_out_other_documents():
    ids = np.repeat(np.arange(8), 128)[None]
    walk = Walk(
        mask=Mask(lower=0, segment_ids=SegmentIds(ids, ids)),
        by_query=True,
        unit=64,
        query_size=512,
        key_size=512,
        chunk=1024,
        queries=1024,
        keys=1024,
    )
    lists = np.asarray(unit_lists.listed(walk))
    # Three units of each of four documents: 12 of 128, 4 of them whole, in groups of 16.
    assert lists[0, :, 0, :2].tolist() == [[0, 1], [0, 1]]


@pytest.mark.parametrize("count", [1, 7, 512, 513])
def test_places_are_sorted_by_rank(count):
    ranks = np.random.default_rng(count).integers(0, 3, (2, 3, 1, count))
    places = np.asarray(unit_lists._sorted_places(jnp.asarray(ranks)))
    np.testing.assert_array_equal(places, np.argsort(ranks, axis=-1, kind="stable"))
