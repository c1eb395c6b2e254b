"""Flash attention, backward: the gradients of query, key and value in one pass over the scores.

Grid: batch, key head, query head of its group, query chunk, key tile. A chunk of queries (a whole
head's, at usual lengths) stands in VMEM with its output gradient and its own gradient, which sums
up there over all key tiles. Key and value gradients sum up over query chunks and the heads of the
group: in VMEM where a head's fit, else in HBM.

Source: Dao, 2023 (arXiv 2307.08691), algorithm 2, with one loop's sums held in VMEM.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.online_softmax import LN_2, LOG2_E, dot, finite_columns
from flax_pallas_attn.kernels.score_tiles import (
    ScoreInputs,
    ScoreOptions,
    ScoreTile,
    TileAxis,
    score_inputs,
    score_specs,
)
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.kernels.walk import Unit, Walk
from flax_pallas_attn.masking import Mask

LOOK_AHEAD = 2
"""Units between the first two products of a unit and what is made of them."""


class _Inputs(NamedTuple):
    query: Any  # [1, 1, query chunk, H]
    key: Any  # [1, 1, key tile, H]
    value: Any  # [1, 1, key tile, Hv]
    output_gradient: Any  # [1, 1, query chunk, Hv]
    logsumexp: Any  # [1, 1, 1, query chunk]
    delta: Any  # [1, 1, 1, query chunk]
    scores: ScoreInputs


class _Gradients(NamedTuple):
    query: Any  # [1, 1, query chunk, H]
    key: Any  # [1, 1, key tile, H], or all of HBM: [B, K, keys, H] float32
    value: Any


class _Scratch(NamedTuple):
    query: Any  # [H, query chunk], scaled
    output_gradient: Any  # [Hv, query chunk]
    query_gradient: Any  # [H, query chunk]
    key_gradient: Any  # [slots, H, key tile]
    value_gradient: Any  # [slots, Hv, key tile]


def flash_backward(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    output_gradient: jax.Array,
    logsumexp: jax.Array,
    delta: jax.Array,
    mask: Mask,
    options: ScoreOptions,
    *,
    scale: float,
    precision: jax.lax.PrecisionLike,
    tiles: Tiles,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients of attention of heads-first arrays.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      output_gradient: `[B, N, T, Hv]`.
      logsumexp: `[B, N, T]` float32, of the forward pass.
      delta: `[B, N, T]` float32: sum over Hv of output times its gradient, less the gradient of
        the logsumexp.
      mask: Who may attend to whom.
      options: What else changes the scores.
      scale: Factor on the scores.
      precision: Of all products, for float32; None is full precision.
      tiles: Tile sizes.

    Returns:
      Gradients of query, key and value, in their shapes and dtypes.
    """
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    group = heads // kv_heads
    size, key_size = tiles.backward_query, tiles.backward_key
    chunk = tiles.backward_query_chunk
    chunks, key_tiles = pl.cdiv(queries, chunk), pl.cdiv(keys, key_size)
    shape = tiles_lib.shape_of(query, key, value, mask, options.bias)
    sums_in_hbm = group * chunks > 1 and not tiles_lib.key_gradients_fit(tiles, shape)
    keys_in_vmem = tiles_lib.backward_keys_in_vmem(tiles, shape, group)
    vmem_bytes = tiles_lib.backward_vmem_bytes(tiles, shape, keys_in_vmem)
    walk = Walk(
        mask=jax.tree.map(jax.typeof, mask),
        by_query=False,
        unit=tiles_lib.unit(),
        query_size=size,
        key_size=key_size,
        queries=queries,
        keys=keys,
        all_cut=options.bias is not None,
    )
    spans = dataclasses.replace(walk, mask=mask).spans()
    prefetched = () if spans is None else (spans,)

    def index(b, n, g, c, j, *_):
        return b, n * group + g, c, j

    def query_index(b, n, g, c, j, *_):
        return b, n * group + g, c, 0

    def row_index(b, n, g, c, j, *_):
        return b, n * group + g, 0, c

    def key_index(b, n, g, c, j, *_):
        return b, n, j, 0

    def key_gradient_index(b, n, g, c, j, *_):
        """Stays at the first tile until the sums are complete, so that each is written once."""
        return b, n, jnp.where((g == group - 1) & (c == chunks - 1), j, 0), 0

    inputs = _Inputs(
        query,
        key,
        value,
        output_gradient,
        logsumexp[:, :, None],
        delta[:, :, None],
        score_inputs(mask, options),
    )
    in_specs = _Inputs(
        pl.BlockSpec((1, 1, chunk, head_dim), query_index),
        pl.BlockSpec((1, 1, key_size, head_dim), key_index),
        pl.BlockSpec((1, 1, key_size, value_dim), key_index),
        pl.BlockSpec((1, 1, chunk, value_dim), query_index),
        pl.BlockSpec((1, 1, 1, chunk), row_index),
        pl.BlockSpec((1, 1, 1, chunk), row_index),
        score_specs(inputs.scores, chunk, key_size, index),
    )
    like = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(query).manual_axis_type
    )
    if sums_in_hbm:
        key_specs = [pl.BlockSpec(memory_space=pl.ANY)] * 2
        key_shapes = [
            like((batch, kv_heads, dim, key_tiles * key_size), jnp.float32)
            for dim in (head_dim, value_dim)
        ]
    else:
        key_specs = [
            pl.BlockSpec((1, 1, key_size, dim), key_gradient_index) for dim in (head_dim, value_dim)
        ]
        key_shapes = [like(x.shape, x.dtype) for x in (key, value)]
    slots = keys_in_vmem // key_size
    gradients = pl.pallas_call(
        functools.partial(
            _kernel,
            walk=walk,
            options=jax.tree.map(jax.typeof, options),
            scale=scale,
            precision=precision,
            tiles=tiles,
            sums_in_hbm=sums_in_hbm,
        ),
        out_shape=_Gradients(like(query.shape, query.dtype), *key_shapes),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=(batch, kv_heads, group, chunks, key_tiles),
            in_specs=[in_specs],
            out_specs=_Gradients(in_specs.query, *key_specs),
            scratch_shapes=[
                _Scratch(
                    pltpu.VMEM((head_dim, chunk), query.dtype),
                    pltpu.VMEM((value_dim, chunk), query.dtype),
                    pltpu.VMEM((head_dim, chunk), jnp.float32),
                    pltpu.VMEM((slots, head_dim, key_size), jnp.float32),
                    pltpu.VMEM((slots, value_dim, key_size), jnp.float32),
                )
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tiles_lib.vmem_limit_bytes(vmem_bytes),
        ),
        cost_estimate=_cost(query, key, value, walk, tiles, sums_in_hbm),
        name="flash_backward",
    )(*prefetched, inputs)
    if sums_in_hbm:
        gradients = gradients._replace(
            key=gradients.key[..., :keys].mT.astype(key.dtype),
            value=gradients.value[..., :keys].mT.astype(value.dtype),
        )
    return tuple(gradients)


def _kernel(
    *refs,
    walk: Walk,
    options: ScoreOptions,
    scale: float,
    precision,
    tiles: Tiles,
    sums_in_hbm: bool,
):
    *spans_refs, inputs, query_ref, key_ref, value_ref, scratch = refs
    gradients = _Gradients(query_ref, key_ref, value_ref)
    batch_index, kv_head, member, chunk, key_tile = (pl.program_id(i) for i in range(5))
    members, chunks, key_tiles = (pl.num_programs(i) for i in range(2, 5))
    size, key_size = tiles.backward_query, tiles.backward_key
    chunk_tiles = tiles.backward_query_chunk // size
    is_first = (member == 0) & (chunk == 0)
    is_last = (member == members - 1) & (chunk == chunks - 1)
    slot = key_tile if scratch.key_gradient.shape[0] > 1 else 0
    sums = (
        (scratch.key_gradient.at[slot], gradients.key),
        (scratch.value_gradient.at[slot], gradients.value),
    )

    def hbm_tile(ref):
        return ref.at[batch_index, kv_head, :, pl.ds(key_tile * key_size, key_size)]

    @pl.when(key_tile == 0)
    def _():
        @pl.loop(0, chunk_tiles)
        def _(tile):
            part = pl.ds(tile * size, size)
            scaled = inputs.query[0, 0, part, :].astype(jnp.float32) * (scale * LOG2_E)
            scratch.query[:, part] = scaled.astype(scratch.query.dtype).T
            scratch.output_gradient[:, part] = inputs.output_gradient[0, 0, part, :].T

        scratch.query_gradient[...] = jnp.zeros_like(scratch.query_gradient)

    @pl.when(is_first)
    def _():
        for sum_ref, _ in sums:
            sum_ref[...] = jnp.zeros_like(sum_ref)

    if sums_in_hbm:

        @pl.when(~is_first)
        def _():
            for sum_ref, hbm_ref in sums:
                pltpu.sync_copy(hbm_tile(hbm_ref), sum_ref)

    key_transposed = finite_columns(inputs.key[0, 0].T)[0]
    width, step = walk.unit_queries, walk.unit_keys

    def operands(tile, unit: Unit):
        """Keys, values, queries and output gradients of a unit."""
        keys, part = pl.ds(unit.key, step), pl.ds(tile * size + unit.query, width)
        return (
            inputs.key[0, 0, keys, :],
            inputs.value[0, 0, keys, :],
            scratch.query[:, part],
            scratch.output_gradient[:, part],
        )

    def products(tile, unit: Unit):
        key, value, query, output_gradient = operands(tile, unit)
        return dot(key, query, (1, 0), precision), dot(value, output_gradient, (1, 0), precision)

    def visit(tile, units: list[Unit], *_):
        ahead = [products(tile, unit) for unit in units[:LOOK_AHEAD]]
        for i, unit in enumerate(units):
            if i + LOOK_AHEAD < len(units):
                ahead.append(products(tile, units[i + LOOK_AHEAD]))
            visit_unit(tile, unit, *ahead.pop(0))

    def visit_unit(tile, unit: Unit, unit_products, change):
        offset = tile * size + unit.query
        part, keys = pl.ds(offset, width), pl.ds(unit.key, step)
        key, value, query, output_gradient = operands(tile, unit)
        # Zero times delta: what is not finite in a row's output or its gradient reaches the sums.
        delta = inputs.delta[0, 0, :, part]
        logsumexp = inputs.logsumexp[0, 0, :, part] * LOG2_E + delta * 0.0
        first = chunk * tiles.backward_query_chunk + offset
        score_tile = ScoreTile(
            walk.mask,
            options,
            inputs.scores,
            TileAxis(first, offset, width, walk.query_stop),
            TileAxis(key_tile * key_size + unit.key, unit.key, step, walk.key_stop),
        )
        probabilities, _, score_gradient = score_tile.gradients(
            unit_products, change, logsumexp, delta, is_cut=unit.is_cut
        )
        if unit.is_cut:
            query, output_gradient = (finite_columns(x)[0] for x in (query, output_gradient))
        probabilities = probabilities.astype(value.dtype)
        score_gradient = score_gradient.astype(key.dtype)
        (key_sum, _), (value_sum, _) = sums
        value_sum[:, keys] += dot(output_gradient, probabilities, (1, 1), precision)
        key_sum[:, keys] += dot(query, score_gradient, (1, 1), precision)
        scratch.query_gradient[:, part] += dot(
            key_transposed[:, unit.key : unit.key + step], score_gradient, (1, 0), precision
        )

    key_tile_index = key_tile if walk.keys > key_size else 0
    span = walk.span(batch_index, key_tile_index, *spans_refs)
    first = chunk * chunk_tiles if walk.queries > tiles.backward_query_chunk else 0
    walk.visit(key_tile_index, span, first, chunk_tiles, visit)

    @pl.when(key_tile == key_tiles - 1)
    def _():
        @pl.loop(0, chunk_tiles)
        def _(tile):
            part = pl.ds(tile * size, size)
            gradient = scratch.query_gradient[:, part] * scale
            gradients.query[0, 0, part, :] = gradient.astype(gradients.query.dtype).T

    # The query in the sum carried scale * log2(e): the key's gradient wants scale alone.
    for (sum_ref, out_ref), factor in zip(sums, (LN_2, 1.0), strict=True):

        @pl.when(is_last)
        def _(sum_ref=sum_ref, out_ref=out_ref, factor=factor):
            if sums_in_hbm:
                sum_ref[...] *= factor
            else:
                out_ref[0, 0] = (sum_ref[...] * factor).astype(out_ref.dtype).T

        if sums_in_hbm:
            pltpu.sync_copy(sum_ref, hbm_tile(out_ref))


def _cost(query, key, value, walk: Walk, tiles: Tiles, sums_in_hbm: bool) -> pl.CostEstimate:
    """Work of what is visited: exact for a static mask, an upper bound for others."""
    batch, heads, queries, head_dim = query.shape
    kv_heads, _, value_dim = value.shape[1:]
    scores = batch * heads * walk.scores
    rounds = (heads // kv_heads) * pl.cdiv(queries, tiles.backward_query_chunk)
    row_bytes = (2 * head_dim + value_dim) * query.dtype.itemsize + 8
    key_bytes = key.nbytes + value.nbytes
    sums_bytes = (2 * rounds - 1) * 4 * (key.size + value.size) if sums_in_hbm else key_bytes
    return pl.CostEstimate(
        flops=2 * scores * (3 * head_dim + 2 * value_dim),
        transcendentals=scores,
        bytes_accessed=(query.size // head_dim) * row_bytes + rounds * key_bytes + sums_bytes,
    )
