"""Flash attention, backward: the gradients of query, key and value in one pass over the scores.

Grid: batch, key heads, query heads of their group (one each, or some where they are short), query
chunk, key tile. A chunk of queries (a whole head's, at usual lengths) stands in VMEM with its
output gradient and its own gradient, which sums up there over all key tiles. Key and value
gradients sum up over query chunks and the heads of the group: in VMEM where a head's fit, else in
HBM.

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
from flax_pallas_attn.kernels import unit_lists
from flax_pallas_attn.kernels.online_softmax import (
    LN_2,
    LOG2_E,
    Stand,
    dot,
    finite_columns,
)
from flax_pallas_attn.kernels.score_tiles import (
    ScoreInputs,
    ScoreOptions,
    ScoreTile,
    TileAxis,
    score_inputs,
    score_specs,
)
from flax_pallas_attn.kernels.tiles import LANES, Tiles
from flax_pallas_attn.kernels.units import Unit, traced_once
from flax_pallas_attn.kernels.walk import Walk, most_written
from flax_pallas_attn.masking import Mask

KEY_FACTORS = (LN_2, 1.0)
"""On sums of key and value: the query carries scale * log2(e), the key's gradient wants scale."""


def _look_ahead(head_dim: int) -> int:
    """Units between the first two products of a unit and what is made of them.

    The best by simulation (benchmarks/LOG.md).
    """
    return 2 if head_dim <= LANES else 3


class _Inputs(NamedTuple):
    query: Any  # [1, query heads, query chunk, H]
    key: Any  # [1, key heads, key tile, H]
    value: Any  # [1, key heads, key tile, Hv]
    output_gradient: Any  # [1, query heads, query chunk, Hv]
    logsumexp: Any  # [1, query heads, 1, query chunk]
    delta: Any  # [1, query heads, 1, query chunk]
    scores: ScoreInputs
    units: Any  # block of `unit_lists.listed`, in scalar memory; None of a band


class _Gradients(NamedTuple):
    query: Any  # [1, query heads, query chunk, H]
    key: Any  # [1, key heads, key tile, H], or all of HBM: [B, K, keys, H] float32
    value: Any


class _Scratch(NamedTuple):
    query: Any  # [query heads * query chunk, H], scaled
    output_gradient: Any  # [query heads * query chunk, Hv]
    query_gradient: Any  # [H, query heads * query chunk]
    key: Any  # [H, key heads * key tile]
    key_gradient: Any  # [slots, key heads * key tile, H]
    value_gradient: Any  # [slots, key heads * key tile, Hv]


@functools.partial(jax.jit, static_argnames=("scale", "precision", "tiles"), inline=True)
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
    step_heads = tiles_lib.backward_heads(tiles, shape, heads, group)
    step_kv_heads = max(1, step_heads // group)
    members = group // step_heads if step_heads < group else 1
    # Heads that share a grid step are short: what their keys' gradients take always fits.
    sums_in_hbm = (
        step_kv_heads == 1 and group * chunks > 1 and not tiles_lib.key_gradients_fit(tiles, shape)
    )
    keys_in_vmem = tiles_lib.backward_keys_in_vmem(tiles, shape, group)
    vmem_bytes = tiles_lib.backward_vmem_bytes(tiles, shape, keys_in_vmem, step_heads)
    walk = Walk(
        mask=jax.tree.map(jax.typeof, mask),
        by_query=False,
        unit=tiles_lib.BACKWARD_UNIT,
        query_size=size,
        key_size=key_size,
        chunk=chunk,
        queries=queries,
        keys=keys,
        all_cut=options.bias is not None,
        heads=step_heads,
        # The sums of larger heads do not stand in registers anyway.
        most_written=most_written(min(head_dim + value_dim, 2 * LANES), shape.itemsize)
        if chunks == 1
        else 0,
    )
    stand = Stand(is_turned=head_dim % tiles_lib.unit() > 0 or value_dim % tiles_lib.unit() > 0)
    lists = unit_lists.listed(dataclasses.replace(walk, mask=mask))

    def index(b, n, g, c, j):
        return b, n * members + g, c, j

    def query_index(b, n, g, c, j):
        return b, n * members + g, c, 0

    def row_index(b, n, g, c, j):
        return b, n * members + g, 0, c

    def key_index(b, n, g, c, j):
        return b, n, j, 0

    def key_gradient_index(b, n, g, c, j):
        """Stays at the first tile until the sums are complete, so that each is written once."""
        return b, n, jnp.where((g == members - 1) & (c == chunks - 1), j, 0), 0

    def list_place(b, n, g, c, j):
        return b, c * key_tiles + j

    inputs = _Inputs(
        query,
        key,
        value,
        output_gradient,
        logsumexp[:, :, None],
        delta[:, :, None],
        score_inputs(mask, options),
        lists,
    )
    in_specs = _Inputs(
        pl.BlockSpec((1, step_heads, chunk, head_dim), query_index),
        pl.BlockSpec((1, step_kv_heads, key_size, head_dim), key_index),
        pl.BlockSpec((1, step_kv_heads, key_size, value_dim), key_index),
        pl.BlockSpec((1, step_heads, chunk, value_dim), query_index),
        pl.BlockSpec((1, step_heads, 1, chunk), row_index),
        pl.BlockSpec((1, step_heads, 1, chunk), row_index),
        score_specs(inputs.scores, step_heads, chunk, key_size, index),
        unit_lists.list_spec(lists, list_place),
    )
    like = functools.partial(
        jax.ShapeDtypeStruct, manual_axis_type=jax.typeof(query).manual_axis_type
    )
    if sums_in_hbm:
        key_specs = [pl.BlockSpec(memory_space=pl.ANY)] * 2
        key_shapes = [
            like((batch, kv_heads, *stand(key_tiles * key_size, dim)), jnp.float32)
            for dim in (head_dim, value_dim)
        ]
    else:
        key_specs = [
            pl.BlockSpec((1, step_kv_heads, key_size, dim), key_gradient_index)
            for dim in (head_dim, value_dim)
        ]
        key_shapes = [like(x.shape, x.dtype) for x in (key, value)]
    slots = keys_in_vmem // key_size
    gradients = pl.pallas_call(
        functools.partial(
            _kernel,
            walk=walk,
            stand=stand,
            options=jax.tree.map(jax.typeof, options),
            scale=scale,
            precision=precision,
            tiles=tiles,
            sums_in_hbm=sums_in_hbm,
            is_alone=group * chunks == 1,
        ),
        out_shape=_Gradients(like(query.shape, query.dtype), *key_shapes),
        grid_spec=pl.GridSpec(
            grid=(batch, kv_heads // step_kv_heads, members, chunks, key_tiles),
            in_specs=[in_specs],
            out_specs=_Gradients(in_specs.query, *key_specs),
            scratch_shapes=[
                _Scratch(
                    pltpu.VMEM(stand(step_heads * chunk, head_dim), query.dtype),
                    pltpu.VMEM(stand(step_heads * chunk, value_dim), query.dtype),
                    pltpu.VMEM((head_dim, step_heads * chunk), jnp.float32),
                    pltpu.VMEM((head_dim, step_kv_heads * key_size), key.dtype),
                    *(
                        pltpu.VMEM((slots, *stand(step_kv_heads * key_size, dim)), jnp.float32)
                        for dim in (head_dim, value_dim)
                    ),
                )
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary", "arbitrary"),
            vmem_limit_bytes=tiles_lib.vmem_limit_bytes(vmem_bytes),
        ),
        cost_estimate=_cost(query, key, value, walk, tiles, sums_in_hbm),
        name="flash_backward",
    )(inputs)
    if sums_in_hbm:
        sums = [x.mT if stand.is_turned else x for x in (gradients.key, gradients.value)]
        gradients = gradients._replace(
            key=sums[0][..., :keys, :].astype(key.dtype),
            value=sums[1][..., :keys, :].astype(value.dtype),
        )
    return tuple(gradients)


def _kernel(
    *refs,
    walk: Walk,
    stand: Stand,
    options: ScoreOptions,
    scale: float,
    precision,
    tiles: Tiles,
    sums_in_hbm: bool,
    is_alone: bool,
):
    inputs, query_ref, key_ref, value_ref, scratch = refs
    gradients = _Gradients(query_ref, key_ref, value_ref)
    batch_index, kv_index, member, chunk, key_tile = (pl.program_id(i) for i in range(5))
    members, chunks, key_tiles = (pl.num_programs(i) for i in range(2, 5))
    size, key_size = tiles.backward_query, tiles.backward_key
    chunk_size = tiles.backward_query_chunk
    chunk_tiles = chunk_size // size
    kv_heads = inputs.key.shape[1]
    # Whether a grid step is all that its keys' gradients sum up over, from a known unit on.
    keys_are_known = walk.is_known and not sums_in_hbm and is_alone
    is_first = (member == 0) & (chunk == 0)
    is_last = (member == members - 1) & (chunk == chunks - 1)
    slot = key_tile if scratch.key_gradient.shape[0] > 1 else 0
    sums = (
        (scratch.key_gradient.at[slot], gradients.key),
        (scratch.value_gradient.at[slot], gradients.value),
    )

    def hbm_tile(ref):
        tokens = pl.ds(key_tile * key_size, key_size)
        return ref.at[batch_index, kv_index, *stand(tokens, slice(None))]

    def put(ref, tokens, x):
        """What is not finite must not meet the zeros of hidden pairs."""
        x = stand.turn(x)
        ref[stand(tokens, slice(None))] = stand.finite(x) if walk.may_cut else x

    def begin_queries(head, part, own):
        scaled = inputs.query[0, head, part, :].astype(jnp.float32) * (scale * LOG2_E)
        put(scratch.query, own, scaled.astype(scratch.query.dtype))
        put(scratch.output_gradient, own, inputs.output_gradient[0, head, part, :])

    def end_queries(head, part, own):
        gradient = scratch.query_gradient[:, own] * scale
        gradients.query[0, head, part, :] = gradient.astype(gradients.query.dtype).T

    def begin_keys(head, part, own):
        scratch.key[:, own] = finite_columns(inputs.key[0, head, part, :].T)[0]

    def end_keys(head, part, own):
        for (sum_ref, out_ref), factor in zip(sums, KEY_FACTORS, strict=True):
            gradient = sum_ref[stand(own, slice(None))] * factor
            out_ref[0, head, part, :] = stand.turn(gradient.astype(out_ref.dtype))

    def of_all_queries(function):
        for head in range(walk.heads):

            @pl.loop(0, chunk_tiles)
            def _(tile, head=head):
                function(head, _tile(tile, size), pl.ds(head * chunk_size + tile * size, size))

    if not walk.is_known_across:

        @pl.when(key_tile == 0)
        def _():
            of_all_queries(begin_queries)
            scratch.query_gradient[...] = jnp.zeros_like(scratch.query_gradient)

    if not walk.is_known:
        for head in range(kv_heads):
            begin_keys(head, _tile(0, key_size), _tile(head, key_size))

    if not keys_are_known:

        @pl.when(is_first)
        def _():
            for sum_ref, _ in sums:
                sum_ref[...] = jnp.zeros_like(sum_ref)

    if sums_in_hbm:

        @pl.when(~is_first)
        def _():
            for sum_ref, hbm_ref in sums:
                pltpu.sync_copy(hbm_tile(hbm_ref), sum_ref)

    width, step = walk.unit_queries, walk.unit_keys
    ahead_by = _look_ahead(inputs.query.shape[3])

    def kv_head(unit: Unit) -> int:
        return unit.head * kv_heads // walk.heads

    def places(unit: Unit):
        """Where a unit's queries and keys are in scratch memory."""
        return (
            pl.ds(unit.head * chunk_size + unit.query, width),
            pl.ds(kv_head(unit) * key_size + unit.key, step),
        )

    def operands(unit: Unit):
        """Keys, values, queries and output gradients of a unit."""
        keys = pl.ds(unit.key, step)
        queries, _ = places(unit)
        return (
            inputs.key[0, kv_head(unit), keys, :],
            inputs.value[0, kv_head(unit), keys, :],
            scratch.query[stand(queries, slice(None))],
            scratch.output_gradient[stand(queries, slice(None))],
        )

    @traced_once
    def products(unit: Unit):
        key, value, query, output_gradient = operands(unit)
        return (
            stand.with_queries(key, query, precision),
            stand.with_queries(value, output_gradient, precision),
        )

    def visit(units: list[Unit], *_):
        ahead = []

        def look_ahead(unit):
            queries, keys = places(unit)
            if unit.is_first_across:
                begin_queries(unit.head, pl.ds(unit.query, width), queries)
            if unit.is_first:
                begin_keys(kv_head(unit), pl.ds(unit.key, step), keys)
            ahead.append(products(unit))

        for unit in units[:ahead_by]:
            look_ahead(unit)
        for i, unit in enumerate(units):
            if i + ahead_by < len(units):
                look_ahead(units[i + ahead_by])
            visit_unit(unit, *ahead.pop(0))
            queries, keys = places(unit)
            if unit.is_last and keys_are_known:
                end_keys(kv_head(unit), pl.ds(unit.key, step), keys)
            if unit.is_last_across:
                end_queries(unit.head, pl.ds(unit.query, width), queries)

    @traced_once
    def visit_unit(unit: Unit, unit_products, change):
        part = pl.ds(unit.query, width)
        queries, keys = places(unit)
        key, value, query, output_gradient = operands(unit)
        # Zero times delta: what is not finite in a row's output or its gradient reaches the sums.
        delta = inputs.delta[0, unit.head, :, part]
        logsumexp = inputs.logsumexp[0, unit.head, :, part] * LOG2_E + delta * 0.0
        first = chunk * chunk_size + unit.query
        score_tile = ScoreTile(
            walk.mask_of(unit),
            options,
            inputs.scores,
            unit.head,
            TileAxis(first, unit.query, width, walk.query_stop),
            TileAxis(key_tile * key_size + unit.key, unit.key, step, walk.key_stop),
        )
        probabilities, _, score_gradient = score_tile.gradients(
            unit_products, change, logsumexp, delta, is_cut=unit.is_cut
        )
        probabilities = probabilities.astype(value.dtype)
        score_gradient = score_gradient.astype(key.dtype)
        (key_sum, _), (value_sum, _) = sums
        of_keys, of_queries = stand(keys, slice(None)), (slice(None), queries)
        is_first = unit.is_first and keys_are_known

        def add(ref, place, is_first, x):
            ref[place] = x if is_first else ref[place] + x

        of_value = stand.sum_of_keys(probabilities, output_gradient, precision)
        add(value_sum, of_keys, is_first, of_value)
        add(key_sum, of_keys, is_first, stand.sum_of_keys(score_gradient, query, precision))
        of_query = dot(scratch.key[:, keys], score_gradient, (1, 0), precision)
        add(scratch.query_gradient, of_queries, unit.is_first_across, of_query)

    key_tile_index = key_tile if walk.keys > key_size else 0
    if inputs.units is None:
        first = chunk * chunk_tiles if walk.queries > chunk_size else 0
        walk.visit(key_tile_index, first, lambda units: None, visit)
    else:
        unit_lists.visit(walk, key_tile_index, lambda units: None, visit, inputs.units)

    if not walk.is_known_across:
        pl.when(key_tile == key_tiles - 1)(lambda: of_all_queries(end_queries))

    if sums_in_hbm:
        for (sum_ref, hbm_ref), factor in zip(sums, KEY_FACTORS, strict=True):

            @pl.when(is_last)
            def _(sum_ref=sum_ref, factor=factor):
                sum_ref[...] *= factor

            pltpu.sync_copy(sum_ref, hbm_tile(hbm_ref))
    elif not keys_are_known:

        @pl.when(is_last)
        def _():
            for head in range(kv_heads):
                end_keys(head, _tile(0, key_size), _tile(head, key_size))


def _tile(number, size: int) -> pl.Slice:
    """A tile, or a head's part of scratch memory in which heads stand side by side."""
    return pl.ds(number * size, size)


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
