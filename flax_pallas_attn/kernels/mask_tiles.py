"""The mask as the flash kernels meet it: what they are passed, and one tile of it.

`Mask.visible` decides, here as everywhere; this file lays its arguments out as `[keys, queries]`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_pallas_attn.masking import Mask, Span, Tokens


class MaskInputs(NamedTuple):
    """A mask's arrays as kernel inputs; or their block specs, or refs. None where there is none.

    Attributes:
      query_rows: `[B, R, T]` int32: positions, then segment ids, whichever there are.
      key_rows: `[B, R, S]` int32.
      dense: `[B or 1, N or 1, T or 1, S or 1]` int8.
    """

    query_rows: Any = None
    key_rows: Any = None
    dense: Any = None


def mask_inputs(mask: Mask) -> MaskInputs:
    """The arrays of `mask` as inputs of a kernel."""
    pairs = [pair for pair in (mask.positions, mask.segment_ids) if pair is not None]
    return MaskInputs(
        query_rows=jnp.stack([pair.query for pair in pairs], axis=1) if pairs else None,
        key_rows=jnp.stack([pair.key for pair in pairs], axis=1) if pairs else None,
        dense=None if mask.dense is None else (mask.dense != 0).astype(jnp.int8),
    )


def mask_specs(
    inputs: MaskInputs,
    query_block: int,
    key_block: int,
    index: Callable[..., tuple],
) -> MaskInputs:
    """Block specs for `inputs`.

    Args:
      inputs: Of `mask_inputs`.
      query_block: Queries of a block.
      key_block: Keys of a block.
      index: Maps grid indices to (batch, query head, query block, key block).
    """

    def rows_spec(rows, block, part):
        if rows is None:
            return None
        return pl.BlockSpec(
            (1, rows.shape[1], block), lambda *grid: (index(*grid)[0], 0, index(*grid)[part])
        )

    def dense_spec(dense):
        if dense is None:
            return None
        broadcast = [size == 1 for size in dense.shape]
        block = (1, 1, 1 if broadcast[2] else query_block, 1 if broadcast[3] else key_block)
        return pl.BlockSpec(
            block,
            lambda *grid: tuple(
                0 if one else i for one, i in zip(broadcast, index(*grid), strict=True)
            ),
        )

    return MaskInputs(
        query_rows=rows_spec(inputs.query_rows, query_block, 2),
        key_rows=rows_spec(inputs.key_rows, key_block, 3),
        dense=dense_spec(inputs.dense),
    )


class TileAxis(NamedTuple):
    """Where a tile lies along one axis.

    Attributes:
      first: Index of its first token in the array.
      offset: Of that token in the block that the kernel holds.
      size: Tokens of the tile.
      count: Tokens of the array.
    """

    first: int | jax.Array
    offset: int | jax.Array
    size: int
    count: int

    @property
    def slice(self):
        return pl.ds(self.offset, self.size)


def visible_tile(mask: Mask, refs: MaskInputs, query: TileAxis, key: TileAxis) -> jax.Array:
    """Evaluates `mask` on a tile: bool, broadcasts to `[keys, queries]`."""

    def tokens(axis, along, rows, offset):
        shape = (1, axis.size) if along == 1 else (axis.size, 1)
        index = axis.first + jax.lax.broadcasted_iota(jnp.int32, shape, along)

        def row(i):
            return rows[i : i + 1, :] if along == 1 else rows[:, i : i + 1]

        return Tokens(
            index=index,
            position=index + offset if mask.positions is None else row(0),
            segment=None if mask.segment_ids is None else row(int(mask.positions is not None)),
            stop=axis.count if axis.count % axis.size else None,
        )

    query_rows = key_rows = dense = None
    if refs.query_rows is not None:
        query_rows = refs.query_rows[0, :, query.slice]
        key_rows = refs.key_rows[0, :, key.slice].T
    if refs.dense is not None:
        parts = [
            pl.ds(0, 1) if size == 1 else axis.slice
            for size, axis in zip(mask.dense.shape[2:], (query, key), strict=True)
        ]
        dense = refs.dense[0, 0, parts[0], parts[1]].astype(jnp.int32).T
    visible = mask.visible(
        tokens(query, 1, query_rows, mask.query_offset), tokens(key, 0, key_rows, 0), dense
    )
    assert visible is not None, "a mask that hides nothing leaves no tile to mask"
    return visible


def pack_spans(span: Span) -> jax.Array:
    """A span of arrays `[B, tiles]` as one flat int32 array for scalar memory."""
    return jnp.stack(span, axis=-1).astype(jnp.int32).reshape(-1)


def read_span(spans_ref, batch_index, tile, tiles: int) -> Span:
    """The span that `pack_spans` put for one batch row and tile."""
    base = (batch_index * tiles + tile) * 4
    return Span(*(spans_ref[base + i] for i in range(4)))


def for_each_tile(span: Span, first: int | jax.Array, tiles: int, body: Callable) -> None:
    """Calls `body(tile, is_cut)` for the span's tiles among `first .. first + tiles`.

    `tile` counts from `first`; `is_cut` is static: whether the mask must be looked at.
    """
    for start, stop, is_cut in zip(span[:-1], span[1:], (True, False, True), strict=True):
        if isinstance(start, int) and isinstance(stop, int) and start >= stop:
            continue

        @pl.loop(_clip(start - first, tiles), _clip(stop - first, tiles))
        def _(tile, is_cut=is_cut):
            body(tile, is_cut)


def _clip(x, stop: int):
    return min(max(x, 0), stop) if isinstance(x, int) else jnp.clip(x, 0, stop)
