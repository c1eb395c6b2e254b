"""Flash attention, forward: output and logsumexp.

Grid: batch, query heads (one, or some where they are short), query tile, key chunk. A chunk of keys
and values stands in VMEM (a whole head's, at usual lengths: consecutive query tiles and the query
heads of a group then share one copy); within it the query tile walks along the units that the mask
leaves. They are written out one after another, and the product of query and key of a unit comes
some units before the softmax that uses it, across tiles too, so that the matrix unit does not wait
for it. The sums of a softmax row are rows of the product with the value: the vector unit has enough
to do.

Source: Dao et al., 2022 (arXiv 2205.14135), algorithm 1; Dao, 2023 (arXiv 2307.08691), section 3.1.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels import unit_lists
from flax_pallas_attn.kernels.online_softmax import (
    LN_2,
    LOG2_E,
    SUBLANES,
    dot,
    finite_columns,
    softmax_step,
)
from flax_pallas_attn.kernels.score_tiles import (
    ScoreInputs,
    ScoreOptions,
    ScoreTile,
    TileAxis,
    score_inputs,
    score_specs,
)
from flax_pallas_attn.kernels.tiles import LANES, Tiles, pad_to
from flax_pallas_attn.kernels.units import Unit, traced_once
from flax_pallas_attn.kernels.walk import Walk, most_written
from flax_pallas_attn.masking import Mask


def _look_ahead(head_dim: int) -> int:
    """Units between the product of query and key of a unit and its softmax.

    The best by simulation (benchmarks/LOG.md): large heads take longer, so fewer of them suffice.
    """
    return 5 if head_dim <= LANES else 3


SUM_ROWS = 16
"""Rows before those of the output: 8 sum up to the row's sum, 8 to what is not finite in it."""


class _Inputs(NamedTuple):
    query: Any  # [1, query heads, query tile, H]
    key: Any  # [1, key heads, key chunk, H]
    value: Any  # [1, key heads, key chunk, Hv]
    scores: ScoreInputs
    units: Any  # block of `unit_lists.listed`, in scalar memory; None of a band


class _Scratch(NamedTuple):
    query: Any  # [query heads * query tile, H], scaled
    maximum: Any  # [1, query heads * query tile]
    sums: Any  # [SUM_ROWS + Hv, query heads * query tile], not yet divided by the row's sum
    products: Any  # [keys of a unit, queries of some units]: of the tile to come


@functools.partial(
    jax.jit, static_argnames=("scale", "precision", "tiles", "reuse_query"), inline=True
)
def flash_forward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    options: ScoreOptions,
    *,
    scale: float,
    precision: jax.lax.PrecisionLike,
    tiles: Tiles,
    reuse_query: bool,
) -> tuple[jax.Array, jax.Array]:
    """Attention of heads-first arrays.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      options: What else changes the scores.
      scale: Factor on the scores.
      precision: Of both products, for float32; None is full precision.
      tiles: Tile sizes.
      reuse_query: Put the output into the query's memory. Where the query is needed later XLA
        copies it.

    Returns:
      Output `[B, N, T, Hv]` and logsumexp `[B, N, T]` float32.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    group = heads // kv_heads
    query_tiles = pl.cdiv(queries, tiles.query)
    chunks = pl.cdiv(keys, tiles.key_chunk)
    chunk_tiles = tiles.key_chunk // tiles.key
    shape = tiles_lib.shape_of(query, key, value, mask, options.bias)
    step_heads = tiles_lib.forward_heads(tiles, shape, heads, group)
    step_kv_heads = max(1, step_heads // group)
    walk = Walk(
        mask=jax.tree.map(jax.typeof, mask),
        by_query=True,
        unit=tiles_lib.unit(),
        query_size=tiles.query,
        key_size=tiles.key,
        chunk=tiles.key_chunk,
        **_lengths(mask, queries, keys, tiles),
        all_cut=options.bias is not None,
        heads=step_heads,
        most_written=most_written(head_dim + value_dim, shape.itemsize) if chunks == 1 else 0,
    )
    data_walk = dataclasses.replace(walk, mask=mask)
    spans = data_walk.spans() if chunks > 1 else None
    prefetched = () if spans is None else (spans,)

    def index(b, n, i, c, *spans_refs):
        """Batch, query heads, query tile, and the nearest key chunk that this tile needs."""
        if chunks > 1:
            span = walk.span(b, i, *spans_refs)
            last = jnp.maximum(span.stop - 1, span.start) // chunk_tiles
            c = jnp.clip(c, jnp.minimum(span.start // chunk_tiles, chunks - 1), last)
        return b, n, i, c

    def query_index(b, n, i, c, *spans_refs):
        return b, n, i, 0

    def key_index(*grid):
        b, n, _, c = index(*grid)
        return b, n * step_heads // group // step_kv_heads, c, 0

    def list_place(b, n, i, c, *spans_refs):
        return b, c * query_tiles + i

    lists = unit_lists.listed(data_walk)
    inputs = _Inputs(query, key, value, score_inputs(mask, options), lists)
    in_specs = _Inputs(
        pl.BlockSpec((1, step_heads, tiles.query, head_dim), query_index),
        pl.BlockSpec((1, step_kv_heads, tiles.key_chunk, head_dim), key_index),
        pl.BlockSpec((1, step_kv_heads, tiles.key_chunk, value_dim), key_index),
        score_specs(inputs.scores, step_heads, tiles.query, tiles.key_chunk, index),
        unit_lists.list_spec(lists, list_place),
    )
    kernel = functools.partial(
        _kernel,
        walk=walk,
        options=jax.tree.map(jax.typeof, options),
        scale=scale,
        precision=precision,
        tiles=tiles,
    )
    like = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(query).manual_axis_type
    )
    output, logsumexp = pl.pallas_call(
        kernel,
        out_shape=(
            like((batch, heads, queries, value_dim), query.dtype),
            like((batch, heads, 1, queries), jnp.float32),
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, heads // step_heads, query_tiles, chunks),
            in_specs=[in_specs],
            out_specs=(
                pl.BlockSpec((1, step_heads, tiles.query, value_dim), query_index),
                pl.BlockSpec((1, step_heads, 1, tiles.query), lambda b, n, i, c, *_: (b, n, 0, i)),
            ),
            scratch_shapes=[
                _Scratch(
                    pltpu.VMEM((step_heads * tiles.query, head_dim), query.dtype),
                    pltpu.VMEM((1, step_heads * tiles.query), jnp.float32),
                    pltpu.VMEM((SUM_ROWS + value_dim, step_heads * tiles.query), jnp.float32),
                    pltpu.VMEM(
                        (walk.unit_keys, _look_ahead(head_dim) * walk.unit_queries), jnp.float32
                    ),
                )
            ],
        ),
        input_output_aliases={len(prefetched): 0} if reuse_query else {},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=tiles_lib.vmem_limit_bytes(
                tiles_lib.forward_vmem_bytes(tiles, shape, step_heads)
            ),
        ),
        cost_estimate=_cost(query, key, value, walk, tiles),
        name="flash_forward",
    )(*prefetched, inputs)
    return output, logsumexp[:, :, 0]


def _lengths(mask: Mask, queries: int, keys: int, tiles: Tiles) -> dict[str, int]:
    """Lengths to walk along: up to the end of the last tile, where that changes nothing.

    What is beyond the queries is not written. What is beyond the keys is not seen if the last query
    does not see it. Without an end within a tile there is one kind of tile less to write out.
    """
    padded_queries, padded_keys = pad_to(queries, tiles.query), pad_to(keys, tiles.key_chunk)
    is_hidden = mask.lower is not None and mask.query_offset + queries - mask.lower <= keys
    if mask.is_band and padded_queries == pad_to(queries, tiles_lib.unit()):
        queries = padded_queries
        if is_hidden and padded_keys == pad_to(keys, tiles_lib.unit()):
            keys = padded_keys
    return {"queries": queries, "keys": keys}


def _kernel(*refs, walk: Walk, options: ScoreOptions, scale: float, precision, tiles: Tiles):
    inputs, output_ref, logsumexp_ref, scratch = refs[-4:]
    query_tile = pl.program_id(2) if walk.queries > tiles.query else 0
    chunks = pl.cdiv(walk.keys, tiles.key_chunk)
    chunk = pl.program_id(3) if chunks > 1 else 0

    @pl.when((chunk == 0) & (not walk.is_known))
    def _():
        scratch.maximum[...] = jnp.full_like(scratch.maximum, -jnp.inf)
        scratch.sums[...] = jnp.zeros_like(scratch.sums)

    dtype = inputs.query.dtype
    width, step = walk.unit_queries, walk.unit_keys
    look_ahead = _look_ahead(inputs.query.shape[3])
    ends_in_visit = chunks == 1 and walk.has_known_end

    kv_heads = inputs.key.shape[1]

    def kv_head(unit: Unit) -> int:
        return unit.head * kv_heads // walk.heads

    def own(unit: Unit):
        """Where the unit's queries are in scratch memory."""
        return pl.ds(unit.head * tiles.query + unit.query, width)

    def put_query(head, part, own):
        scaled = inputs.query[0, head, part, :].astype(jnp.float32) * (scale * LOG2_E)
        scratch.query[own, :] = scaled.astype(dtype)

    if not walk.is_known:
        for head in range(walk.heads):
            put_query(head, slice(None), pl.ds(head * tiles.query, tiles.query))

    def product(unit: Unit):
        if unit.is_first:
            put_query(unit.head, pl.ds(unit.query, width), own(unit))
        return of_scaled(unit)

    @traced_once
    def of_scaled(unit: Unit):
        keys = inputs.key[0, kv_head(unit), pl.ds(unit.key, step), :]
        return dot(keys, scratch.query[own(unit), :], (1, 1), precision)

    # The products that a tile begins with wait in scratch memory, put there by the one before.
    def put_leading(units: list[Unit]):
        def put(i, unit):
            scratch.products[:, pl.ds(i * width, width)] = product(unit)

        return [functools.partial(put, i, unit) for i, unit in enumerate(units[:look_ahead])]

    def begin(units: list[Unit]):
        for put in put_leading(units):
            put()

    def visit(units: list[Unit], expected: list[Unit], following: list[Unit]):
        products = {
            unit.number: scratch.products[:, pl.ds(i * width, width)]
            for i, unit in enumerate(expected[:look_ahead])
        }

        def put(unit):
            products[unit.number] = product(unit)

        ahead = [functools.partial(put, unit) for unit in units if unit.number not in products]
        if not expected:
            for put_first in ahead[:look_ahead]:
                put_first()
            ahead = ahead[look_ahead:]
        ahead += put_leading(following)
        maximums = {}  # of queries whose place is known, so that they stay in registers
        for unit in units:
            if ahead:
                ahead.pop(0)()
            while unit.number not in products:
                ahead.pop(0)()
            place, is_known = (unit.head, unit.query), isinstance(unit.query, int)
            if unit.is_first:
                maximum = jnp.full((1, width), -jnp.inf)
            elif is_known and place in maximums:
                maximum = maximums.pop(place)
            else:
                maximum = scratch.maximum[:, own(unit)]
            maximum = visit_unit(unit, products.pop(unit.number), maximum)
            if ends_in_visit and unit.is_last:
                finish(unit, maximum)
            elif is_known:
                maximums[place] = maximum
            else:
                scratch.maximum[:, own(unit)] = maximum
        for put_later in ahead:
            put_later()
        for (head, first), maximum in maximums.items():
            scratch.maximum[:, pl.ds(head * tiles.query + first, width)] = maximum

    def score_tile(unit: Unit) -> ScoreTile:
        return ScoreTile(
            walk.mask_of(unit),
            options,
            inputs.scores,
            unit.head,
            TileAxis(query_tile * tiles.query + unit.query, unit.query, width, walk.query_stop),
            TileAxis(chunk * tiles.key_chunk + unit.key, unit.key, step, walk.key_stop),
        )

    @traced_once
    def visit_unit(unit: Unit, products, maximum):
        part = score_tile(unit)
        scores, _ = part.scores(products)
        value = inputs.value[0, kv_head(unit), pl.ds(unit.key, step), :].T
        is_bad = None
        if unit.is_cut:
            scores = part.where_visible(scores, -jnp.inf)
            # What is not finite must not meet the zeros of hidden keys: its share is summed apart.
            value, is_bad = finite_columns(value)
        probabilities, shrink, maximum = softmax_step(scores, maximum)
        (kept,) = part.dropped(probabilities)
        if unit.is_cut or tiles_lib.unit() > LANES:
            of_sums = _rows_of_sums(dtype, step, is_bad)
            if inputs.scores.dropout_rows is None:
                operands = [(jnp.concatenate([of_sums, value]), kept)]
            else:
                operands = [(of_sums, probabilities), (value, kept)]
            sums = [dot(x, y.astype(dtype), (1, 0), precision) for x, y in operands]
        else:
            of_rows = jnp.sum(probabilities.reshape(-1, SUBLANES, width), axis=0)
            of_values = dot(value, kept.astype(dtype), (1, 0), precision)
            sums = [of_rows, jnp.zeros_like(of_rows), of_values]
        sums, lanes = jnp.concatenate(sums), own(unit)
        scratch.sums[:, lanes] = sums if unit.is_first else scratch.sums[:, lanes] * shrink + sums
        return maximum

    @traced_once
    def finish(unit: Unit, maximum):
        lanes = own(unit)
        of_rows, of_bad = scratch.sums[:SUBLANES, lanes], scratch.sums[SUBLANES:SUM_ROWS, lanes]
        total, bad = (jnp.sum(x, axis=0, keepdims=True) for x in (of_rows, of_bad))
        is_empty = total == 0
        factor = 1 / (1 - options.dropout_rate)
        if inputs.scores.sinks is not None:
            sinks = score_tile(unit).row(inputs.scores.sinks) * LOG2_E
            of_sink, shrink, maximum = softmax_step(sinks, maximum)
            total = total * shrink + of_sink
            factor *= shrink
        total = jnp.where(bad > 0, jnp.nan, total)
        factor = jnp.where(is_empty, 0.0, factor / total)
        output = (scratch.sums[SUM_ROWS:, lanes] * factor).astype(dtype)
        queries = pl.ds(unit.query, width)
        output_ref[0, unit.head, queries, :] = output.T
        logsumexp = jnp.where(is_empty, -jnp.inf, (maximum + jnp.log2(total)) * LN_2)
        logsumexp_ref[0, unit.head, :, queries] = logsumexp

    if inputs.units is None:
        first_tile = chunk * (tiles.key_chunk // tiles.key)
        walk.visit(query_tile, first_tile, begin, visit)
    else:
        unit_lists.visit(walk, query_tile, begin, visit, inputs.units)

    if not ends_in_visit:

        @pl.when(chunk == chunks - 1)
        def _():
            for unit in walk.of_all_heads(walk.all_units()):
                if unit.key == 0:
                    finish(unit, scratch.maximum[:, own(unit)])


def _rows_of_sums(dtype, keys: int, is_bad) -> jax.Array:
    """What the first rows of a product with probabilities multiply them by.

    `[SUM_ROWS, keys]`: ones in row 0, and in rows beyond the first 8 ones where `is_bad`. Put
    together from bits, so that the compiler has it where a product takes it.
    """
    rows = SUM_ROWS * dtype.itemsize // 4
    one = 0x3F80 if dtype == jnp.bfloat16 else 0x3F800000
    row = jax.lax.broadcasted_iota(jnp.int32, (rows, keys), 0)
    bits = jnp.where(row == 0, one, 0)
    if is_bad is not None:
        bits = jnp.where((row >= rows // 2) & is_bad, one, bits)
    return pltpu.bitcast(bits, dtype)


def _cost(query, key, value, walk: Walk, tiles: Tiles) -> pl.CostEstimate:
    """Work of what is visited: exact for a static mask, an upper bound for others."""
    batch, heads, queries, head_dim = query.shape
    value_dim = value.shape[3]
    scores = batch * heads * walk.scores
    chunks = pl.cdiv(walk.keys, tiles.key_chunk)
    copies = 1 if chunks == 1 else (heads // key.shape[1]) * pl.cdiv(queries, tiles.query)
    return pl.CostEstimate(
        flops=2 * scores * (head_dim + value_dim),
        transcendentals=scores,
        bytes_accessed=query.nbytes
        + (query.size // head_dim) * (value_dim * query.dtype.itemsize + 4)
        + copies * (key.nbytes + value.nbytes),
    )
