"""Who may attend to whom.

`Mask` says it once, for every implementation: `Mask.visible` is evaluated on whole rows by the
reference, on tiles by the blockwise form and by the kernels. Nothing here builds a T by S array
unless it is asked for one.

Which tiles hold anything is answered twice, by the same rule: `Mask.key_span` and
`Mask.query_span` by arithmetic, for masks that are known while tracing, and `tile_spans` from the
minimum and maximum of each tile's positions and segment ids, for masks that are data.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

MaskRule = Callable[[jax.Array, jax.Array], jax.Array]


@functools.partial(jax.tree_util.register_dataclass, data_fields=["query", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class SegmentIds:
    """Documents packed into one row: a query sees only keys of its own segment.

    A negative id is padding: it attends to nothing and nothing attends to it.

    Attributes:
      query: `[B, T]` integers; `[T]` or `[1, T]` where all rows share them.
      key: `[B, S]` integers; likewise.
    """

    query: jax.Array
    key: jax.Array

    def with_padding_apart(self) -> "SegmentIds":
        """The same with padding that is equal to nothing: -1 of queries, -2 of keys."""
        return SegmentIds(
            jnp.where(self.query < 0, -1, self.query), jnp.where(self.key < 0, -2, self.key)
        )


@functools.partial(jax.tree_util.register_dataclass, data_fields=["query", "key"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Positions:
    """Where each token stands, for causality, window, ALiBi, dropout and a mask rule.

    Attributes:
      query: `[B, T]` integers; `[T]` or `[1, T]` where all rows share them.
      key: `[B, S]` integers; likewise.
    """

    query: jax.Array
    key: jax.Array


@dataclasses.dataclass(frozen=True)
class Tokens:
    """One axis of a tile as the mask sees it; fields broadcast against the other axis.

    Attributes:
      index: Place in the array, int32, e.g. `[T, 1]`.
      position: Place in the document, int32; `index` (plus the query offset) unless given.
      segment: Segment id, int32, of `SegmentIds.with_padding_apart`, or None where all tokens
        share one.
      stop: Number of tokens that exist: an index at or beyond it is padding of a tile. None where
        no tile runs over the end.
    """

    index: jax.Array
    position: jax.Array
    segment: jax.Array | None = None
    stop: int | None = None

    def map(self, function: Callable[[jax.Array], jax.Array]) -> "Tokens":
        """Applies `function` to the arrays, as for another broadcast shape."""
        return dataclasses.replace(
            self,
            index=function(self.index),
            position=function(self.position),
            segment=None if self.segment is None else function(self.segment),
        )


class Span(NamedTuple):
    """The tiles that a tile of the other axis meets, as indices of tiles.

    `[start, stop)` is visited, `[full_start, full_stop)` inside it needs no mask. The bounds are
    ordered: `start <= full_start <= full_stop <= stop`.
    """

    start: Any  # each an int, or int32 where it is traced
    full_start: Any
    full_stop: Any
    stop: Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["segment_ids", "positions", "dense"],
    meta_fields=["lower", "upper", "rule", "query_offset"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Mask:
    """Everything that decides whether query i may attend to key j.

    Causality and window are one band: `lower <= query position - key position <= upper`.

    Attributes:
      lower: 0 when causal, `-right` for a window, None for no bound.
      upper: `left` of a window, None for no bound.
      rule: Static elementwise `f(query_position, key_position) -> bool`, or None.
      query_offset: Position of query 0 when `positions` is None; key 0 is at 0.
      segment_ids: `SegmentIds` of `[B, T]` and `[B, S]` int32, or None.
      positions: `Positions` of `[B, T]` and `[B, S]` int32, or None.
      dense: `[B or 1, N or 1, T or 1, S or 1]`, nonzero where attention is allowed, or None.
    """

    lower: int | None = None
    upper: int | None = None
    rule: MaskRule | None = None
    query_offset: int = 0
    segment_ids: SegmentIds | None = None
    positions: Positions | None = None
    dense: jax.Array | None = None

    @property
    def is_static(self) -> bool:
        """Whether the visited tiles follow from shapes alone."""
        return self.segment_ids is None and self.positions is None

    @property
    def is_band(self) -> bool:
        """Whether a distance between positions that are known while tracing decides alone."""
        return self.is_static and self.rule is None and self.dense is None

    @property
    def uses_positions(self) -> bool:
        """Whether where tokens stand decides anything."""
        return not (self.lower is None and self.upper is None and self.rule is None)

    def visible(
        self, query: Tokens, key: Tokens, dense: jax.Array | None = None
    ) -> jax.Array | None:
        """Evaluates the mask where `query` and `key` meet.

        Args:
          query: Fields of shape that broadcasts against those of `key`, e.g. `[T, 1]`.
          key: For example `[1, S]`.
          dense: The part of `self.dense` that belongs there, in the orientation of the result.

        Returns:
          bool of the broadcast shape, or None where nothing is hidden.
        """
        conditions = []
        # A bound is taken from the query's side, before the two sides meet in T by S pairs.
        if self.lower is not None:
            conditions.append(key.position <= query.position - self.lower)
        if self.upper is not None:
            conditions.append(key.position >= query.position - self.upper)
        if self.rule is not None:
            conditions.append(self.rule(query.position, key.position))
        if self.segment_ids is not None:
            assert key.segment is not None, "tokens of a mask with segments have them"
            conditions.append(query.segment == key.segment)
        if query.stop is not None:
            conditions.append(query.index < query.stop)
        if key.stop is not None:
            conditions.append(key.index < key.stop)
        if dense is not None:
            conditions.append(dense != 0)
        return functools.reduce(jnp.logical_and, conditions) if conditions else None

    def query_tokens(self, index: jax.Array, axis: int) -> Tokens:
        """The queries at `index` (`[n]`), each field with its tokens along `axis` of two.

        Segment ids and positions come out as `[B, n, 1]` (axis 0) or `[B, 1, n]` (axis 1).
        """
        return _tokens(index, axis, self.query_offset, self.positions, self.segment_ids, "query")

    def key_tokens(self, index: jax.Array, axis: int) -> Tokens:
        """The keys at `index`; as `query_tokens`."""
        return _tokens(index, axis, 0, self.positions, self.segment_ids, "key")

    def key_span(self, tile, query_size: int, key_size: int, queries: int, keys: int) -> Span:
        """Tiles of `key_size` keys that the `tile`-th tile of `query_size` queries meets.

        For masks that are `is_static`; `tile` may be traced (a grid position).

        Args:
          tile: Which query tile.
          query_size: Queries in a tile.
          key_size: Keys in a tile.
          queries: T.
          keys: S.
        """
        low = None if self.upper is None else -self.upper
        high = None if self.lower is None else -self.lower
        return self._span(tile, query_size, key_size, queries, keys, low, high, self.query_offset)

    def query_span(self, tile, query_size: int, key_size: int, queries: int, keys: int) -> Span:
        """Tiles of `query_size` queries that the `tile`-th tile of `key_size` keys meets."""
        low, high = self.lower, self.upper
        return self._span(tile, key_size, query_size, keys, queries, low, high, -self.query_offset)

    def _span(self, tile, size, other_size, count, other_count, low, high, offset) -> Span:
        """Others at `first + low .. last + high` are met, at `last + low .. first + high` by all.

        `low` and `high` bound the distance from own position to the other's; None is no bound.
        """
        tiles = -(-other_count // other_size)

        def other_tile(distance):  # floor((first + distance) / other_size)
            if size % other_size:
                return (tile * size + offset + distance) // other_size
            return tile * (size // other_size) + (offset + distance) // other_size

        start, full_start, full_stop, stop = 0, 0, tiles, tiles
        if low is not None:
            start = _clip(other_tile(low), tiles)
            full_start = _clip(other_tile(size - 1 + low + other_size - 1), tiles)
        if high is not None:
            full_stop = _clip(other_tile(high + 1), tiles)
            stop = _clip(other_tile(size - 1 + high) + 1, tiles)
        if other_count % other_size:
            full_stop = _minimum(full_stop, tiles - 1)
        if self.rule is not None or self.dense is not None:
            full_stop = 0
        if count % size:  # the last tile runs over the end
            full_stop = _select(tile == count // size, 0, full_stop)
        # Tiles that meet nothing, or nothing in full, leave bounds that cross: order them.
        stop = _maximum(start, stop)
        full_start = _minimum(_maximum(full_start, start), stop)
        full_stop = _minimum(_maximum(full_stop, full_start), stop)
        return Span(start, full_start, full_stop, stop)


def _minimum(a, b):
    return min(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.minimum(a, b)


def _maximum(a, b):
    return max(a, b) if isinstance(a, int) and isinstance(b, int) else jnp.maximum(a, b)


def _select(condition, a, b):
    return (a if condition else b) if isinstance(condition, bool) else jnp.where(condition, a, b)


def _clip(x, stop: int):
    return _minimum(_maximum(x, 0), stop)


def _tokens(index, axis, offset, positions, segment_ids, side) -> Tokens:
    def along(x):
        return x[..., :, None] if axis == 0 else x[..., None, :]

    if segment_ids is not None:
        segment_ids = segment_ids.with_padding_apart()

    def gathered(pair):
        return along(jnp.take(getattr(pair, side), index, axis=1, mode="clip"))

    return Tokens(
        index=along(index),
        position=along(index + offset) if positions is None else gathered(positions),
        segment=None if segment_ids is None else gathered(segment_ids),
    )


def tile_spans(
    mask: Mask, query_size: int, key_size: int, queries: int, keys: int
) -> tuple[Span, Span]:
    """Spans of a mask that is data, by `tile_flags`.

    Returns:
      For each query tile the span of key tiles, `[B, query tiles]` int32 each, and for each key
      tile the span of query tiles, `[B, key tiles]`.
    """
    some, full = tile_flags(mask, query_size, key_size, queries, keys)
    return _flags_to_span(some, full), _flags_to_span(some.mT, full.mT)


def tile_flags(
    mask: Mask, query_size: int, key_size: int, queries: int, keys: int
) -> tuple[jax.Array, jax.Array]:
    """Which tiles may hold anything, and which are full for sure.

    From each tile's least and greatest position and segment: O(T + S) reads, and a table of a flag
    per pair of tiles. A tile that may hold something may turn out empty; one that is said to hold
    nothing never does.

    Args:
      mask: Of any kind. Its dense part and its rule are not looked at: no tile is full with one.
      query_size: Queries in a tile.
      key_size: Keys in a tile.
      queries: T.
      keys: S.

    Returns:
      `[B or 1, query tiles, key tiles]` bool each.
    """
    position, segment = mask.positions, mask.segment_ids
    query_position = position.query if position else jnp.arange(queries)[None] + mask.query_offset
    key_position = position.key if position else jnp.arange(keys)[None]
    query_low, query_high = _tile_extremes(query_position, query_size)
    key_low, key_high = _tile_extremes(key_position, key_size)
    least = query_low[:, :, None] - key_high[:, None, :]
    greatest = query_high[:, :, None] - key_low[:, None, :]
    some = jnp.ones_like(least, dtype=bool)
    full = jnp.full_like(some, mask.rule is None and mask.dense is None)
    if mask.lower is not None:
        some &= greatest >= mask.lower
        full &= least >= mask.lower
    if mask.upper is not None:
        some &= least <= mask.upper
        full &= greatest <= mask.upper
    if segment is not None:
        # Padding is left out of a tile's range, and keeps the tile from being full.
        query_low, query_high = _tile_extremes(segment.query, query_size, padding=True)
        key_low, key_high = _tile_extremes(segment.key, key_size, padding=True)
        query_low, query_high = query_low[:, :, None], query_high[:, :, None]
        key_low, key_high = key_low[:, None, :], key_high[:, None, :]
        some = some & (query_low <= key_high) & (key_low <= query_high)
        alike = (query_low == query_high) & (key_low == key_high) & (query_low == key_low)
        full = full & alike & _tile_all(segment.query >= 0, query_size)[:, :, None]
        full = full & _tile_all(segment.key >= 0, key_size)[:, None, :]
    if queries % query_size:
        full &= (jnp.arange(full.shape[1]) < full.shape[1] - 1)[None, :, None]
    if keys % key_size:
        full &= (jnp.arange(full.shape[2]) < full.shape[2] - 1)[None, None, :]
    return some, full & some


def _tile_extremes(x: jax.Array, size: int, padding: bool = False):
    """Least and greatest of each tile of `x` `[B, n]`; with `padding`, of the entries >= 0."""
    info = jnp.iinfo(jnp.int32)
    real = x >= 0 if padding else jnp.ones_like(x, dtype=bool)
    low = _tiled(jnp.where(real, x, info.max), size, info.max).min(-1)
    high = _tiled(jnp.where(real, x, info.min), size, info.min).max(-1)
    return low, high


def _tile_all(x: jax.Array, size: int) -> jax.Array:
    return _tiled(x, size, True).all(-1)


def _tiled(x: jax.Array, size: int, fill) -> jax.Array:
    padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % size)), constant_values=fill)
    return padded.reshape(x.shape[0], -1, size)


def _flags_to_span(some: jax.Array, full: jax.Array) -> Span:
    """First and last tile with anything, and the first run of full ones between them."""
    count = some.shape[-1]
    index = jnp.arange(count, dtype=jnp.int32)
    start = jnp.where(some, index, count).min(-1)
    stop = jnp.where(some, index + 1, 0).max(-1)
    start = jnp.minimum(start, stop)
    full_start = jnp.minimum(jnp.where(full, index, count).min(-1), stop)
    full_stop = jnp.where(~full & (index >= full_start[..., None]), index, count).min(-1)
    return Span(start, full_start, jnp.maximum(full_start, jnp.minimum(full_stop, stop)), stop)
