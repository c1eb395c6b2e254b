"""The mask against brute force: loops over pairs, written from the public description."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.masking import Mask, Positions, SegmentIds, Span, Tokens, tile_spans

QUERIES, KEYS, BATCH = 23, 31, 2


def brute_force(mask: Mask, batch: int, queries: int, keys: int) -> np.ndarray:
    """bool `[B, T, S]`, a pair at a time."""
    allowed = np.zeros((batch, queries, keys), bool)
    for b, i, j in itertools.product(range(batch), range(queries), range(keys)):
        at, key_at = i + mask.query_offset, j
        if mask.positions is not None:
            at, key_at = int(mask.positions.query[b, i]), int(mask.positions.key[b, j])
        sees = mask.lower is None or key_at <= at - mask.lower
        sees &= mask.upper is None or key_at >= at - mask.upper
        sees &= mask.rule is None or bool(mask.rule(at, key_at))
        if mask.segment_ids is not None:
            mine, its = mask.segment_ids.query[b, i], mask.segment_ids.key[b, j]
            sees &= bool(mine >= 0 and its >= 0 and mine == its)
        allowed[b, i, j] = sees
    return allowed


def evaluated(mask: Mask, batch: int, queries: int, keys: int) -> np.ndarray:
    """The same by `Mask.visible`, which must not depend on the orientation."""
    rows = mask.visible(
        mask.query_tokens(jnp.arange(queries), axis=0), mask.key_tokens(jnp.arange(keys), axis=1)
    )
    columns = mask.visible(
        mask.query_tokens(jnp.arange(queries), axis=1), mask.key_tokens(jnp.arange(keys), axis=0)
    )
    if rows is None:
        assert columns is None
        rows = np.ones((1, queries, keys), bool)
    else:
        np.testing.assert_array_equal(rows, columns.mT)
    return np.broadcast_to(np.asarray(rows), (batch, queries, keys))


def random_mask(random: np.random.Generator, *, static: bool = False) -> Mask:
    def maybe(x):
        return x if random.random() < 0.6 else None

    def ids(n):
        return np.sort(random.integers(-1, 4, (BATCH, n)), axis=1).astype(np.int32)

    def places(n):
        return np.stack([random.permutation(40)[:n] for _ in range(BATCH)]).astype(np.int32)

    segment_ids = positions = None
    if not static:
        segment_ids = maybe(SegmentIds(ids(QUERIES), ids(KEYS)))
        positions = maybe(Positions(places(QUERIES), places(KEYS)))
    return Mask(
        lower=maybe(int(random.integers(-12, 6))),
        upper=maybe(int(random.integers(-6, 20))),
        rule=None if static or random.random() < 0.7 else lambda i, j: (i + j) % 3 != 0,
        query_offset=int(random.integers(-30, 30)),
        segment_ids=segment_ids,
        positions=positions,
    )


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        (Mask(lower=0), ["10000", "11000", "11100", "11110"]),
        (Mask(lower=0, query_offset=1), ["11000", "11100", "11110", "11111"]),
        (Mask(lower=-1, upper=1), ["11000", "11100", "01110", "00111"]),
        (Mask(lower=0, upper=1, query_offset=-1), ["00000", "10000", "11000", "01100"]),
        (Mask(rule=lambda i, j: (j <= i) | (j < 3)), ["11100", "11100", "11100", "11110"]),
        (
            Mask(segment_ids=SegmentIds(jnp.array([[0, 0, 1, -1]]), jnp.array([[0, 1, 1, 2, -1]]))),
            ["10000", "10000", "01100", "00000"],
        ),
        (
            Mask(
                lower=0,
                positions=Positions(jnp.array([[0, 5, 2, 3]]), jnp.array([[3, 2, 1, 0, 9]])),
            ),
            ["00010", "11110", "01110", "11110"],
        ),
    ],
    ids=["causal", "offset", "window", "causal window", "rule", "segments", "positions"],
)
def test_written_out(mask, expected):
    expected = np.array([[[c == "1" for c in row] for row in expected]])
    np.testing.assert_array_equal(evaluated(mask, 1, 4, 5), expected)
    np.testing.assert_array_equal(brute_force(mask, 1, 4, 5), expected)


@pytest.mark.parametrize("seed", range(25))
def test_visible(seed):
    mask = random_mask(np.random.default_rng(seed))
    expected = brute_force(mask, BATCH, QUERIES, KEYS)
    np.testing.assert_array_equal(evaluated(mask, BATCH, QUERIES, KEYS), expected)


def test_dense_and_stop():
    dense = jnp.array([[2.0, 0.0, -1.0], [0.0, 1.0, 1.0]])
    index = jnp.arange(3)
    query = Tokens(index[:2, None], index[:2, None], stop=2)
    key = Tokens(index[None], index[None], stop=2)
    np.testing.assert_array_equal(Mask().visible(query, key, dense), [[1, 0, 0], [0, 1, 0]])


@pytest.mark.parametrize(
    ("mask", "uses_positions", "is_static"),
    [
        (Mask(query_offset=3), False, True),
        (Mask(upper=0), True, True),
        (Mask(lower=0), True, True),
        (Mask(rule=lambda query, key: query == key), True, True),
        (Mask(dense=jnp.ones((1, 1, 1, 1))), False, True),
        (Mask(segment_ids=SegmentIds(jnp.zeros((1, 2)), jnp.zeros((1, 2)))), False, False),
        (Mask(positions=Positions(jnp.zeros((1, 2)), jnp.zeros((1, 2)))), False, False),
    ],
)
def test_what_is_known_while_tracing(mask, uses_positions, is_static):
    assert mask.uses_positions == uses_positions
    assert mask.is_static == is_static


def tile_flags(allowed: np.ndarray, query_size: int, key_size: int):
    """Which tiles of `[T, S]` hold anything, and which are full (and do not run over an end)."""
    queries, keys = allowed.shape
    shape = (-(-queries // query_size), -(-keys // key_size))
    some, full = np.zeros(shape, bool), np.zeros(shape, bool)
    for i, j in np.ndindex(*shape):
        tile = allowed[i * query_size : (i + 1) * query_size, j * key_size : (j + 1) * key_size]
        some[i, j] = tile.any()
        full[i, j] = tile.all() and tile.shape == (query_size, key_size)
    return some, full


def assert_span_covers(span: Span, some: np.ndarray, full: np.ndarray):
    """Everything is visited, and nothing that hides anything runs without a mask."""
    start, full_start, full_stop, stop = (int(bound) for bound in span)
    assert 0 <= start <= full_start <= full_stop <= stop <= len(some), span
    assert not some[:start].any(), span
    assert not some[stop:].any(), span
    assert full[full_start:full_stop].all(), span


@pytest.mark.parametrize("seed", range(40))
def test_static_spans(seed):
    random = np.random.default_rng(seed)
    mask = random_mask(random, static=True)
    query_size, key_size = (int(size) for size in random.integers(1, 12, 2))
    sizes = (query_size, key_size, QUERIES, KEYS)
    some, full = tile_flags(brute_force(mask, 1, QUERIES, KEYS)[0], query_size, key_size)
    # Arithmetic knows no end of the arrays: it visits what their padding would see.
    padded = (-(-QUERIES // query_size) * query_size, -(-KEYS // key_size) * key_size)
    met, _ = tile_flags(brute_force(mask, 1, *padded)[0], query_size, key_size)
    is_band = mask.lower is None or mask.upper is None or mask.lower <= mask.upper
    for span_of, own_some, own_met, own_full in (
        (mask.key_span, some, met, full),
        (mask.query_span, some.T, met.T, full.T),
    ):
        traced_span_of = jax.jit(lambda tile, span_of=span_of: span_of(tile, *sizes))
        for tile in range(len(own_some)):
            span = span_of(tile, *sizes)
            assert tuple(int(bound) for bound in traced_span_of(tile)) == span
            assert all(isinstance(bound, int) for bound in span)
            assert_span_covers(span, own_some[tile], own_full[tile])
            if is_band:
                assert span.stop - span.start == own_met[tile].sum()
                assert span.full_stop - span.full_start == own_full[tile].sum()


@pytest.mark.parametrize("seed", range(30))
def test_data_spans(seed):
    random = np.random.default_rng(seed)
    mask = random_mask(random)
    query_size, key_size = (int(size) for size in random.integers(1, 12, 2))
    allowed = brute_force(mask, BATCH, QUERIES, KEYS)
    of_query, of_key = tile_spans(mask, query_size, key_size, QUERIES, KEYS)
    rows = np.asarray(of_query.start).shape[0]  # 1 when nothing in the mask has a batch
    for b in range(BATCH):
        some, full = tile_flags(allowed[b], query_size, key_size)
        for spans, own_some, own_full in ((of_query, some, full), (of_key, some.T, full.T)):
            for tile in range(len(own_some)):
                span = Span(*(bound[b % rows, tile] for bound in spans))
                assert_span_covers(span, own_some[tile], own_full[tile])


def test_data_spans_skip_other_documents():
    """Of rows packed with causal documents no empty tile is visited, and no full one masked."""
    ids = np.repeat([[0, 1, 2, 3]], [40, 7, 60, 21], axis=1).astype(np.int32)
    mask = Mask(lower=0, segment_ids=SegmentIds(ids, ids))
    some, full = tile_flags(brute_force(mask, 1, 128, 128)[0], 8, 16)
    of_query, of_key = tile_spans(mask, 8, 16, 128, 128)
    for span, own_some, own_full in ((of_query, some, full), (of_key, some.T, full.T)):
        np.testing.assert_array_equal((span.stop - span.start)[0], own_some.sum(1))
        np.testing.assert_array_equal((span.full_stop - span.full_start)[0], own_full.sum(1))


@pytest.mark.parametrize(
    "mask", [Mask(rule=lambda i, j: i >= 0 * j), Mask(dense=jnp.ones((1,) * 4))]
)
def test_rule_and_dense_leave_no_tile_full(mask):
    span = mask.key_span(0, 8, 8, 32, 32)
    assert span.full_start == span.full_stop
    assert (span.start, span.stop) == (0, 4)
