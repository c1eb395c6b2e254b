"""What stands between the product of query and key and the softmax, as the flash kernels meet it.

`masking` and `logits` decide, here as everywhere; this file brings their arguments into the kernels
and lays them out as `[keys, queries]`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn.kernels.online_softmax import LOG2_E
from flax_pallas_attn.kernels.tiles import LANES
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Positions, SegmentIds, Tokens


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "slopes", "sinks", "dropout_rows"],
    meta_fields=["soft_cap", "dropout_rate"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """`Logits` with every array as `[B, N, T, S]`, each axis whole or 1. None where not used.

    Attributes:
      bias: Any of these shapes.
      slopes: ALiBi's, float32, one key.
      sinks: float32, one key.
      dropout_rows: What the hash knows of a query, uint32, one key.
      soft_cap: As in `Logits`.
      dropout_rate: As in `Logits`.
    """

    bias: jax.Array | None
    slopes: jax.Array | None
    sinks: jax.Array | None
    dropout_rows: jax.Array | None
    soft_cap: float | None
    dropout_rate: float

    @classmethod
    def of(cls, logits: Logits, mask: Mask, batch: int, heads: int, queries: int):
        """From the options of a call."""
        dropout_rows = None
        if logits.dropout_seed is not None:
            rows, columns = logits.dropout_indices(batch, heads)
            position = mask.query_tokens(jnp.arange(queries), axis=0).position
            dropout_rows = logits_lib.dropout_rows(
                logits.dropout_seed,
                rows[:, None, None, None],
                columns[:, None, None],
                position[:, None] if position.ndim == 3 else position,
            )

        def per_head(x):
            return None if x is None else x.astype(jnp.float32)[None, :, None, None]

        return cls(
            bias=logits.bias,
            slopes=per_head(logits.slopes),
            sinks=per_head(logits.sinks),
            dropout_rows=dropout_rows,
            soft_cap=logits.soft_cap,
            dropout_rate=logits.dropout_rate,
        )


def fold_group(
    query: jax.Array, keys: int, kv_heads: int, mask: Mask, options: ScoreOptions
) -> tuple[jax.Array, Mask, ScoreOptions]:
    """The query heads that share a key head as more queries of one head: `[B, K, N / K * T, H]`.

    So a few queries of each of many heads fill a tile.
    """
    batch, heads, queries, head_dim = query.shape
    group = heads // kv_heads

    def fold(x):
        if x is None or x.shape[1:3] == (1, 1):
            return x
        x = jnp.broadcast_to(x, (x.shape[0], heads, queries, x.shape[3]))
        return x.reshape(x.shape[0], kv_heads, group * queries, x.shape[3])

    def repeat(x):
        return jnp.tile(x, (1, group))

    positions, segment_ids = mask.positions, mask.segment_ids
    if positions is None and (mask.uses_positions or options.slopes is not None):
        positions = Positions(
            jnp.broadcast_to(jnp.arange(queries) + mask.query_offset, (batch, queries)),
            jnp.broadcast_to(jnp.arange(keys), (batch, keys)),
        )
    if positions is not None:
        positions = Positions(repeat(positions.query), positions.key)
    if segment_ids is not None:
        segment_ids = SegmentIds(repeat(segment_ids.query), segment_ids.key)
    mask = dataclasses.replace(
        mask, positions=positions, segment_ids=segment_ids, dense=fold(mask.dense), query_offset=0
    )
    query = query.reshape(batch, kv_heads, group * queries, head_dim)
    return query, mask, jax.tree.map(fold, options)


class ScoreInputs(NamedTuple):
    """The arrays of mask and options as kernel inputs; or their block specs, or refs.

    None where there is none.

    Attributes:
      query_positions: Positions, then segment ids, whichever there are: `[B, R, T]` int32.
      key_positions: Likewise `[B, R, S, 128]`, the same in all lanes: to spread a key's over lanes
        in the kernel takes longer than the products.
      dense: `[B or 1, N or 1, T or 1, S or 1]` int8.
      bias: Likewise, in its own dtype.
      slopes: `[1, N, 1, T or 1]`: what belongs to a query lies along lanes.
      sinks: Likewise.
      dropout_rows: `[B or 1, N or 1, 1, T]`.
    """

    query_positions: Any = None
    key_positions: Any = None
    dense: Any = None
    bias: Any = None
    slopes: Any = None
    sinks: Any = None
    dropout_rows: Any = None


def score_inputs(mask: Mask, options: ScoreOptions) -> ScoreInputs:
    """The arrays of mask and options as inputs of a kernel."""
    segment_ids = None if mask.segment_ids is None else mask.segment_ids.with_padding_apart()
    pairs = [pair for pair in (mask.positions, segment_ids) if pair is not None]

    def along_lanes(x):
        return None if x is None else x.swapaxes(2, 3)

    def over_lanes(x):
        return jnp.broadcast_to(x[..., None], (*x.shape, LANES))

    return ScoreInputs(
        query_positions=jnp.stack([pair.query for pair in pairs], axis=1) if pairs else None,
        key_positions=over_lanes(jnp.stack([pair.key for pair in pairs], axis=1))
        if pairs
        else None,
        dense=None if mask.dense is None else (mask.dense != 0).astype(jnp.int8),
        bias=options.bias,
        slopes=along_lanes(options.slopes),
        sinks=along_lanes(options.sinks),
        dropout_rows=along_lanes(options.dropout_rows),
    )


def score_specs(
    inputs: ScoreInputs,
    heads: int,
    query_block: int,
    key_block: int,
    index: Callable[..., tuple],
) -> ScoreInputs:
    """Block specs for `inputs`.

    Args:
      inputs: Of `score_inputs`.
      heads: Query heads of a block.
      query_block: Queries of a block.
      key_block: Keys of a block.
      index: Maps grid indices to (batch, block of query heads, query block, key block).
    """

    def spec(x, sizes, axes):
        """A block of `sizes`, at what `index` returns for `axes`; an axis of 1 at 0."""
        if x is None:
            return None
        whole = [size == 1 for size in x.shape]
        block = tuple(1 if one else size for one, size in zip(whole, sizes, strict=True))

        def place(*grid):
            at = index(*grid)
            return tuple(
                0 if one or axis is None else at[axis]
                for one, axis in zip(whole, axes, strict=True)
            )

        return pl.BlockSpec(block, place)

    def positions_spec(x, block, axis):
        if x is None:
            return None
        sizes, axes = (1, x.shape[1], block, LANES), (0, None, axis, None)
        return spec(x, sizes[: x.ndim], axes[: x.ndim])

    pair = functools.partial(spec, sizes=(1, heads, query_block, key_block), axes=(0, 1, 2, 3))
    row = functools.partial(spec, sizes=(1, heads, 1, query_block), axes=(0, 1, None, 2))
    return ScoreInputs(
        query_positions=positions_spec(inputs.query_positions, query_block, 2),
        key_positions=positions_spec(inputs.key_positions, key_block, 3),
        dense=pair(inputs.dense),
        bias=pair(inputs.bias),
        slopes=row(inputs.slopes),
        sinks=row(inputs.sinks),
        dropout_rows=row(inputs.dropout_rows),
    )


class TileAxis(NamedTuple):
    """Where a unit lies along one axis.

    Attributes:
      first: Index of its first token in the array.
      offset: Of that token in the block that the kernel holds.
      size: Tokens of the unit.
      stop: Tokens of the array, if a tile runs over its end, or None.
    """

    first: int | jax.Array
    offset: int | jax.Array
    size: int
    stop: int | None


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """A unit of scores, `[keys, queries]`, with all that belongs to it.

    Attributes:
      mask: Who may attend to whom; its arrays are in `refs`.
      options: Likewise.
      refs: Of `score_inputs`.
      head: Which of the query heads in `refs`.
      query: Where the unit lies among the queries.
      key: Where it lies among the keys.
    """

    mask: Mask
    options: ScoreOptions
    refs: ScoreInputs
    head: int
    query: TileAxis
    key: TileAxis

    def row(self, ref) -> jax.Array:
        """The unit's part of what belongs to queries: `[1, queries or 1]`."""
        return ref[0, self._head(ref), :, _part(self.query, ref.shape[3])]

    def pairs(self, ref) -> jax.Array:
        """The unit's part of what belongs to pairs, broadcasts to `[keys, queries]`."""
        rows, columns = _part(self.query, ref.shape[2]), _part(self.key, ref.shape[3])
        part = ref[0, self._head(ref), rows, columns]
        return part.astype(jnp.int32 if part.dtype == jnp.int8 else jnp.float32).T

    def _head(self, ref) -> int:
        return 0 if ref.shape[1] == 1 else self.head

    @functools.cached_property
    def query_tokens(self) -> Tokens:
        rows = self.refs.query_positions
        rows = None if rows is None else rows[0, :, _part(self.query, rows.shape[2])]
        return self._tokens(self.query, 1, rows, self.mask.query_offset)

    @functools.cached_property
    def key_tokens(self) -> Tokens:
        rows = self.refs.key_positions
        if rows is not None:
            rows = rows[0, :, _part(self.key, rows.shape[2]), :]
            rows = jnp.concatenate([rows] * (self.query.size // LANES), axis=2)
        return self._tokens(self.key, 0, rows, 0)

    def _tokens(self, axis: TileAxis, along: int, rows, offset: int) -> Tokens:
        shape = (1, axis.size) if along == 1 else (axis.size, self.query.size)
        index = axis.first + jax.lax.broadcasted_iota(jnp.int32, shape, along)

        def row(i):
            return rows[i : i + 1, :] if along == 1 else rows[i]

        has_positions = self.mask.positions is not None
        return Tokens(
            index=index,
            position=row(0) if has_positions else index + offset,
            segment=None if self.mask.segment_ids is None else row(int(has_positions)),
            stop=axis.stop,
        )

    @functools.cached_property
    def bias(self) -> jax.Array:
        return self.pairs(self.refs.bias)

    @functools.cached_property
    def visible(self) -> jax.Array | None:
        """Who may attend to whom, in a unit of which a part may be hidden; None where none is."""
        dense = None if self.refs.dense is None else self.pairs(self.refs.dense)
        visible = self.mask.visible(self.query_tokens, self.key_tokens, dense)
        if self.refs.bias is not None:
            is_allowed = self.bias != -jnp.inf
            visible = is_allowed if visible is None else visible & is_allowed
        return visible

    def where_visible(self, x: jax.Array, otherwise: float) -> jax.Array:
        """`x` where the mask lets query and key meet."""
        return x if self.visible is None else jnp.where(self.visible, x, otherwise)

    def scores(self, products: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Scores in base 2, and the same before a bias, from the scaled products."""
        capped = products
        if self.options.soft_cap is not None:
            capped = logits_lib.cap(products, self.options.soft_cap * LOG2_E)
        scores = capped
        if self.refs.bias is not None:
            scores += self.bias * LOG2_E
        if self.refs.slopes is not None:
            slopes = self.row(self.refs.slopes) * LOG2_E
            scores += logits_lib.alibi(slopes, self.query_tokens, self.key_tokens)
        return scores, capped

    def dropped(self, *tiles: jax.Array) -> list[jax.Array]:
        """Each of `tiles` with zeros where dropout says so; not rescaled."""
        if self.refs.dropout_rows is None:
            return list(tiles)
        keep = logits_lib.dropout_keep(
            self.row(self.refs.dropout_rows), self.options.dropout_rate, self.key_tokens.position
        )
        return [jnp.where(keep, x, 0.0) for x in tiles]

    def gradients(
        self, products, change, logsumexp, delta, *, is_cut: bool
    ) -> tuple[jax.Array, ...]:
        """Of one unit, each `[keys, queries]` float32.

        Args:
          products: Of key and scaled query, base 2: `[keys, queries]`.
          change: Gradient of the probabilities: product of value and output gradient, likewise.
          logsumexp: `[1, queries]`, base 2.
          delta: `[1, queries]`.
          is_cut: Whether a part is hidden.

        Returns:
          Probabilities after dropout, gradient of the scores, gradient of the scaled products.
        """
        scores, capped = self.scores(products)
        # Hidden pairs are put out before the last operation, whatever stands in them: the compiler
        # takes a select just before a product into it, and its simulator fails on that.
        hide = self.where_visible if is_cut else lambda x, _: x
        probabilities = jnp.exp2(hide(scores - logsumexp, -jnp.inf))
        kept, change = self.dropped(probabilities, change)
        if self.refs.dropout_rows is not None:
            rescale = 1 / (1 - self.options.dropout_rate)
            kept, change = kept * rescale, change * rescale
        score_gradient = probabilities * hide(change - delta, 0.0)
        product_gradient = score_gradient
        if self.options.soft_cap is not None:
            slope = 1 - jnp.square(capped / (self.options.soft_cap * LOG2_E))
            product_gradient *= hide(slope, 0.0)
        return kept, score_gradient, product_gradient


def _part(axis: TileAxis, size: int):
    """The unit along an axis of `size`; an axis of 1 broadcasts."""
    return pl.ds(0, 1) if size == 1 else pl.ds(axis.offset, axis.size)
