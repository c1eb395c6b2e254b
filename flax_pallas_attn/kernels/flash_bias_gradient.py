"""Flash attention, backward: the gradient of a dense bias.

A pass of its own, so that nothing larger than the bias is ever written: where the bias broadcasts
over batch, heads, queries or keys, its gradient sums over them in VMEM, in the innermost grid axes.
XLA leaves the pass out where nobody asks for this gradient.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.online_softmax import LOG2_E, dot
from flax_pallas_attn.kernels.score_tiles import (
    ScoreInputs,
    ScoreOptions,
    ScoreTile,
    TileAxis,
    score_inputs,
    score_specs,
)
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.kernels.walk import Walk
from flax_pallas_attn.masking import Mask


class _Inputs(NamedTuple):
    query: Any  # [1, 1, query tile, H]
    key: Any  # [1, 1, key tile, H]
    value: Any  # [1, 1, key tile, Hv]
    output_gradient: Any  # [1, 1, query tile, Hv]
    logsumexp: Any  # [1, 1, 1, query tile]
    delta: Any  # [1, 1, 1, query tile]
    scores: ScoreInputs


def flash_bias_gradient(
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
) -> jax.Array:
    """Gradient of `options.bias`, in its shape and dtype; arguments as `flash_backward`."""
    bias = options.bias
    assert bias is not None, "asked for where there is a bias"
    batch, heads, queries, head_dim = query.shape
    kv_heads, keys, value_dim = value.shape[1:]
    group = heads // kv_heads
    size = min(tiles.backward_query, tiles_lib.BACKWARD_UNIT)
    key_size = min(tiles.backward_key, tiles_lib.BACKWARD_UNIT)
    walk = Walk(
        mask=jax.tree.map(jax.typeof, mask),
        by_query=True,
        unit=max(size, key_size),
        query_size=size,
        key_size=key_size,
        chunk=key_size,
        queries=queries,
        keys=keys,
        all_cut=True,
    )
    spans = dataclasses.replace(walk, mask=mask).spans()
    prefetched = () if spans is None else (spans,)

    # What the bias has a value for comes first, what its gradient sums over last.
    counts = (batch, heads, pl.cdiv(queries, size), pl.cdiv(keys, key_size))
    summed = [axis for axis in range(4) if bias.shape[axis] == 1]
    order = [axis for axis in range(4) if axis not in summed] + summed
    grid = tuple(counts[axis] for axis in order)

    def index(*at):
        """Batch, query head, query tile, key tile."""
        return tuple(at[order.index(axis)] for axis in range(4))

    def query_index(*at):
        b, n, i, _ = index(*at)
        return b, n, i, 0

    def row_index(*at):
        b, n, i, _ = index(*at)
        return b, n, 0, i

    def key_index(*at):
        b, n, _, j = index(*at)
        return b, n // group, j, 0

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
        pl.BlockSpec((1, 1, size, head_dim), query_index),
        pl.BlockSpec((1, 1, key_size, head_dim), key_index),
        pl.BlockSpec((1, 1, key_size, value_dim), key_index),
        pl.BlockSpec((1, 1, size, value_dim), query_index),
        pl.BlockSpec((1, 1, 1, size), row_index),
        pl.BlockSpec((1, 1, 1, size), row_index),
        score_specs(inputs.scores, 1, size, key_size, index),
    )
    scores = batch * heads * walk.scores
    gradient = pl.pallas_call(
        functools.partial(
            _kernel,
            walk=walk,
            options=jax.tree.map(jax.typeof, options),
            scale=scale,
            precision=precision,
            index=index,
            steps=math.prod(counts[axis] for axis in summed),
        ),
        out_shape=jax.ShapeDtypeStruct(
            bias.shape, jnp.float32, manual_axis_type=jax.typeof(query).manual_axis_type
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(prefetched),
            grid=grid,
            in_specs=[in_specs],
            out_specs=in_specs.scores.bias,
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",) * (4 - len(summed)) + ("arbitrary",) * len(summed),
            vmem_limit_bytes=tiles_lib.vmem_limit_bytes(),
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * scores * (head_dim + value_dim),
            transcendentals=scores,
            bytes_accessed=2 * bias.nbytes + math.prod(grid) * size * 2 * (head_dim + value_dim),
        ),
        name="flash_bias_gradient",
    )(*prefetched, inputs)
    return gradient.astype(bias.dtype)


def _kernel(*refs, walk: Walk, options: ScoreOptions, scale, precision, index, steps: int):
    *spans_refs, inputs, gradient_ref = refs
    batch_index, _, query_tile, key_tile = index(*(pl.program_id(axis) for axis in range(4)))

    # The innermost axes are summed over: the block stays in VMEM while they run.
    step = 0
    for axis in range(4):
        step = step * pl.num_programs(axis) + pl.program_id(axis)

    @pl.when(jax.lax.rem(step, steps) == 0)
    def _():
        gradient_ref[...] = jnp.zeros_like(gradient_ref)

    span = walk.span(batch_index, query_tile, *spans_refs)

    @pl.when((span.start <= key_tile) & (key_tile < span.stop))
    def _():
        query = inputs.query[0, 0]
        query = (query.astype(jnp.float32) * (scale * LOG2_E)).astype(query.dtype)
        size, key_size = walk.query_size, walk.key_size
        tile = ScoreTile(
            walk.mask,
            options,
            inputs.scores,
            0,
            TileAxis(query_tile * size, 0, size, walk.query_stop),
            TileAxis(key_tile * key_size, 0, key_size, walk.key_stop),
        )
        delta = inputs.delta[0, 0]
        _, score_gradient, _ = tile.gradients(
            dot(inputs.key[0, 0], query, (1, 1), precision),
            dot(inputs.value[0, 0], inputs.output_gradient[0, 0], (1, 1), precision),
            inputs.logsumexp[0, 0] * LOG2_E + delta * 0.0,
            delta,
            is_cut=True,
        )
        block = gradient_ref.shape[2:]
        if block[1] == 1:
            score_gradient = score_gradient.sum(axis=0, keepdims=True)
        if block[0] == 1:
            score_gradient = score_gradient.sum(axis=1, keepdims=True)
        gradient_ref[0, 0] += score_gradient.T
