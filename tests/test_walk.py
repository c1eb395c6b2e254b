"""The work of a flash kernel's walk, against masks written out."""

import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.kernels.walk import Walk
from flax_pallas_attn.masking import Mask


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
        chunk=64,
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
    sizes = {
        "unit": 256,
        "query_size": 1024,
        "key_size": 1024,
        "chunk": 4096,
        "queries": 4096,
        "keys": 4096,
    }
    causal = Walk(mask=Mask(lower=0), by_query=True, **sizes)
    assert causal.scores == 4096**2 * (16 + 1) // (2 * 16)


@pytest.mark.parametrize("by_query", [True, False])
def test_walks_that_are_written_out(by_query):
    """Every unit that holds anything once, and of each row the first and the last marked."""
    sizes = {
        "unit": 64,
        "query_size": 256,
        "key_size": 256,
        "chunk": 512,
        "queries": 500,
        "keys": 512,
    }
    walk = Walk(mask=Mask(lower=0), by_query=by_query, heads=3, most_written=512**2, **sizes)
    assert walk.is_known
    assert walk.has_known_end
    for tile in range(2):
        calls = []
        walk.visit(tile, 0, calls.append, lambda *lists, calls=calls: calls.append(lists))
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


@pytest.mark.parametrize("lower", [0, None])
@pytest.mark.parametrize("by_query", [True, False])
def test_ends_of_the_other_axis_in_walks_that_are_written_out(by_query, lower):
    """Of all tiles together, the first and the last unit of each part of the other axis."""
    sizes = {
        "unit": 64,
        "query_size": 256,
        "key_size": 256,
        "chunk": 512,
        "queries": 512,
        "keys": 512,
    }
    walk = Walk(mask=Mask(lower=lower), by_query=by_query, heads=2, most_written=512**2, **sizes)
    visited = []
    for tile in range(2):
        walk.visit(tile, 0, None, lambda units, *_: visited.extend(units))
    # Without a mask all tiles meet the same units, which are written out once for all.
    assert walk.is_known_across == (lower == 0)
    for head, other in np.ndindex(2, 8):
        flags = [
            (unit.is_first_across, unit.is_last_across)
            for unit in visited
            if (unit.head, unit.key if by_query else unit.query) == (head, other * 64)
        ]
        places = range(len(flags))
        known = walk.is_known_across
        assert flags == [(known and n == 0, known and n == places[-1]) for n in places]


@pytest.mark.parametrize("by_query", [True, False])
@pytest.mark.parametrize(
    "mask", [Mask(lower=0), Mask(lower=0, upper=150), Mask(lower=-90, upper=170, query_offset=20)]
)
def test_edges_that_do_not_cut_a_unit_are_left_out_there(mask, by_query):
    sizes = {"unit": 64, "query_size": 256, "key_size": 256, "chunk": 512}
    walk = Walk(mask=mask, by_query=by_query, queries=512, keys=512, most_written=512**2, **sizes)
    assert walk.is_known
    expected = np.asarray(mask.visible(*tokens(mask, 0, 0, 512)))
    visible = np.zeros_like(expected)
    for tile in range(2):

        def body(units, *_, tile=tile):
            for unit in units:
                query, key = unit.query, unit.key
                if by_query:
                    query += tile * 256
                else:
                    key += tile * 256
                left = walk.mask_of(unit)
                assert unit.is_cut == ((left.lower, left.upper) != (None, None))
                part = left.visible(*tokens(mask, query, key, 64))
                visible[query : query + 64, key : key + 64] = True if part is None else part

        walk.visit(tile, 0, None, body)
    np.testing.assert_array_equal(visible, expected)


def tokens(mask, query, key, count):
    return (
        mask.query_tokens(query + jnp.arange(count), axis=0),
        mask.key_tokens(key + jnp.arange(count), axis=1),
    )


def test_walks_that_are_not_written_out():
    sizes = {"by_query": True, "unit": 64, "query_size": 256, "key_size": 256, "chunk": 512}
    causal = Walk(mask=Mask(lower=0), queries=512, keys=512, most_written=26 * 64**2, **sizes)
    assert causal.is_known
    # One unit less than the second tile meets; and first queries that see nothing.
    few = Walk(mask=Mask(lower=0), queries=512, keys=512, most_written=25 * 64**2, **sizes)
    assert not few.is_known
    ahead = Mask(lower=0, query_offset=-100)
    assert not Walk(mask=ahead, queries=512, keys=512, most_written=512**2, **sizes).is_known
