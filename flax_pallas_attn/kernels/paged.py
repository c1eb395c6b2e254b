"""Paged attention: ragged queries of many sequences over the pages of one layer, in one kernel.

Grid: blocks of query tokens, cut without regard to sequences. For each KV head the query heads of
its group are rows beside each other, `row = token * group + head`. A grid step goes through the
sequences that its rows belong to, and for each through the blocks of pages that its rows may see;
the copies of the next blocks, of whichever sequence they are, run meanwhile. Every row belongs to
one sequence, so that one running softmax per row serves them all, and the step ends with one
division. Rows are taken in tiles: small ones for a few tokens, large ones for a prompt.

Source: Dao et al., 2022 (arXiv 2205.14135), algorithm 1; Kwon et al., 2023 (arXiv 2309.06180).
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.online_softmax import LOG2_E, dot, finite
from flax_pallas_attn.kernels.paged_tiles import (
    ALIGNMENT,
    BUFFERS,
    MOST_SMALL_TILES,
    SMALL_ROWS,
    PagedTiles,
    default_tiles,
)
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Tokens


class _Tables(NamedTuple):
    """In scalar memory, int32."""

    page_table: Any  # [sequences * M]
    kv_lengths: Any  # [sequences]
    query_starts: Any  # [sequences + 1]
    first_sequence: Any  # [grid]
    stop_sequence: Any  # [grid]
    layer: Any  # [1]


class _OfRows(NamedTuple):
    """What belongs to a row's head, the same in every grid step: `[K, rows, 1]` float32, or None.

    In base 2, as the scores are.
    """

    slopes: Any
    sinks: Any


class _Scratch(NamedTuple):
    blocks: Any  # [buffers, K, block tokens, lanes]
    maximum: Any  # [K, rows, 1]
    total: Any  # [K, rows, 1]
    output: Any  # [K, rows, value lanes], not yet divided by total
    arrived: Any  # [buffers] semaphores


class _Cursor(NamedTuple):
    sequence: jax.Array
    block: jax.Array


class _Part(NamedTuple):
    """The part of a sequence that a grid step holds."""

    token_start: jax.Array
    token_stop: jax.Array
    offset: jax.Array  # from a token's index to its position
    key_start: jax.Array | int
    key_stop: jax.Array


def attend(
    query: jax.Array,
    pages: jax.Array,
    *,
    value_start: int,
    value_dim: int,
    layer: int | jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
    mask: Mask,
    logits: Logits,
    scale: float | jax.Array,
    tiles: PagedTiles | None = None,
) -> jax.Array:
    """Attention over the pages of one layer.

    Args:
      query: `[tokens, N, H]`.
      pages: `[layers, P, K, L, lanes]`, as `PagedKVCache` holds them.
      value_start: Lane at which a value starts.
      value_dim: Hv.
      layer: Layer to read.
      page_table: `[sequences, M]` int32.
      kv_lengths: `[sequences]` int32.
      query_starts: `[sequences + 1]` int32.
      mask: Causal, perhaps with a window.
      logits: Soft cap, ALiBi and sinks.
      scale: Factor on the scores.
      tiles: Tile sizes; None for `default_tiles`.

    Returns:
      `[tokens, N, Hv]` in the query's dtype.
    """
    if tiles is None:
        tiles = default_tiles(query, pages, page_table, logits)
        assert tiles is not None, "reasons_against has been asked"
    tokens, heads, head_dim = query.shape
    num_pages, kv_heads, page_size, lanes = pages.shape[1:]
    table_pages = page_table.shape[1]
    group = heads // kv_heads
    key_lanes = tiles_lib.pad_to(head_dim, tiles_lib.LANES)
    value_lanes = lanes - _value_base(value_start)
    block_tokens = tiles.block_pages * page_size
    steps = pl.cdiv(tokens, tiles.query_tokens)
    rows = tiles.query_tokens * group

    # Rows of a KV head beside each other, in base 2; lanes past H meet the value's as zeros.
    factor = scale * LOG2_E if logits.soft_cap is None else scale / logits.soft_cap
    rows_of_head = (query.astype(jnp.float32) * factor).astype(query.dtype)
    rows_of_head = rows_of_head.reshape(tokens, kv_heads, group, head_dim).transpose(1, 0, 2, 3)
    rows_of_head = jnp.pad(
        rows_of_head,
        ((0, 0), (0, steps * tiles.query_tokens - tokens), (0, 0), (0, key_lanes - head_dim)),
    ).reshape(kv_heads, steps * rows, key_lanes)

    def of_rows(x):
        if x is None:
            return None
        x = x.astype(jnp.float32).reshape(kv_heads, group) * LOG2_E
        return jnp.tile(x, (1, tiles.query_tokens))[..., None]

    heads_of_rows = _OfRows(of_rows(logits.slopes), of_rows(logits.sinks))
    step = jnp.arange(steps, dtype=jnp.int32)[:, None] * tiles.query_tokens
    tables = _Tables(
        page_table=jnp.clip(page_table, 0, num_pages - 1).reshape(-1),
        kv_lengths=kv_lengths,
        query_starts=query_starts,
        first_sequence=jnp.sum(query_starts[1:] <= step, axis=1, dtype=jnp.int32),
        stop_sequence=jnp.sum(
            query_starts[:-1] < step + tiles.query_tokens, axis=1, dtype=jnp.int32
        ),
        layer=jnp.clip(jnp.reshape(layer, (1,)), 0, pages.shape[0] - 1).astype(jnp.int32),
    )
    output = pl.pallas_call(
        functools.partial(
            _kernel,
            mask=mask,
            soft_cap=logits.soft_cap,
            group=group,
            value_base=_value_base(value_start),
            tiles=tiles,
            table_pages=table_pages,
        ),
        out_shape=jax.ShapeDtypeStruct(
            (kv_heads, steps * rows, value_lanes),
            query.dtype,
            manual_axis_type=jax.typeof(query).manual_axis_type,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=(steps,),
            in_specs=[
                pl.BlockSpec((kv_heads, rows, key_lanes), lambda i, *_: (0, i, 0)),
                jax.tree.map(lambda x: pl.BlockSpec(x.shape, lambda *_: (0, 0, 0)), heads_of_rows),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=pl.BlockSpec((kv_heads, rows, value_lanes), lambda i, *_: (0, i, 0)),
            scratch_shapes=[
                _Scratch(
                    pltpu.VMEM((BUFFERS, kv_heads, block_tokens, lanes), pages.dtype),
                    pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                    pltpu.VMEM((kv_heads, rows, 1), jnp.float32),
                    pltpu.VMEM((kv_heads, rows, value_lanes), jnp.float32),
                    pltpu.SemaphoreType.DMA((BUFFERS,)),
                )
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",), vmem_limit_bytes=tiles_lib.vmem_limit_bytes()
        ),
        cost_estimate=cost(query, pages, page_table, mask, value_dim, steps),
        name="paged_attention",
    )(*tables, rows_of_head, heads_of_rows, pages)
    first = value_start - _value_base(value_start)
    output = output[..., first : first + value_dim]
    output = output.reshape(kv_heads, -1, group, value_dim).transpose(1, 0, 2, 3)
    return output[:tokens].reshape(tokens, heads, value_dim)


def _value_base(value_start: int) -> int:
    return value_start // tiles_lib.LANES * tiles_lib.LANES


def _div(x, y: int):
    """`x // y` for x >= 0, which costs no look at signs."""
    return jax.lax.div(x, jnp.int32(y))


def _kernel(
    *refs,
    mask: Mask,
    soft_cap: float | None,
    group: int,
    value_base: int,
    tiles: PagedTiles,
    table_pages: int,
):
    *table_refs, query_ref, of_rows, pages_ref, output_ref, scratch = refs
    tables = _Tables(*table_refs)
    kv_heads, _, key_lanes = query_ref.shape
    page_size = pages_ref.shape[3]
    block_tokens = tiles.block_pages * page_size
    step = pl.program_id(0)
    first_token = step * tiles.query_tokens
    stop_sequence = tables.stop_sequence[step]

    def part_of(sequence) -> _Part:
        sequence = jnp.minimum(sequence, tables.kv_lengths.shape[0] - 1)
        stop = tables.query_starts[sequence + 1]
        token_start = jnp.maximum(tables.query_starts[sequence], first_token)
        token_stop = jnp.minimum(stop, first_token + tiles.query_tokens)
        offset = tables.kv_lengths[sequence] - stop
        key_stop = jnp.minimum(token_stop + offset, table_pages * page_size)
        key_start = 0
        if mask.upper is not None:
            key_start = jnp.maximum(token_start + offset - mask.upper, 0)
        key_stop = jnp.where(token_start < token_stop, key_stop, key_start)
        return _Part(token_start, token_stop, offset, key_start, key_stop)

    def next_sequence(sequence) -> _Cursor:
        """The first block of the first sequence from `sequence` on that has one."""

        def has_none(sequence):
            part = part_of(sequence)
            return (sequence < stop_sequence) & (part.key_start >= part.key_stop)

        sequence = jax.lax.while_loop(has_none, lambda sequence: sequence + 1, sequence)
        return _Cursor(sequence, _div(part_of(sequence).key_start, block_tokens))

    def advance(cursor: _Cursor) -> _Cursor:
        more = (cursor.block + 1) * block_tokens < part_of(cursor.sequence).key_stop
        following = next_sequence(jnp.where(more, cursor.sequence, cursor.sequence + 1))
        block = jnp.where(more, cursor.block + 1, following.block)
        return _Cursor(following.sequence, block)

    def for_each_copy(cursor: _Cursor, buffer, action):
        """The pages of a block that its rows may see, each with all its heads."""
        part = part_of(cursor.sequence)
        first_page = cursor.block * tiles.block_pages
        start = jnp.maximum(_div(part.key_start, page_size) - first_page, 0)
        stop = jnp.minimum(
            _div(part.key_stop + page_size - 1, page_size) - first_page, tiles.block_pages
        )

        @pl.loop(start, stop)
        def _(i):
            page = tables.page_table[cursor.sequence * table_pages + first_page + i]
            place = pl.ds(pl.multiple_of(i * page_size, page_size), page_size)
            action(
                pltpu.make_async_copy(
                    pages_ref.at[tables.layer[0], page],
                    scratch.blocks.at[buffer, :, place],
                    scratch.arrived.at[buffer],
                )
            )

    def attend_rows(part: _Part, block, buffer, row_start, row_count: int):
        """Lets one tile of rows see one block."""
        row = row_start + jax.lax.broadcasted_iota(jnp.int32, (row_count, 1), 0)
        token = first_token + _div(row, group)
        is_own = (token >= part.token_start) & (token < part.token_stop)
        key_index = block * block_tokens
        first = jnp.maximum(first_token + _div(row_start, group), part.token_start) + part.offset
        last = first_token + _div(row_start + row_count - 1, group)
        last = jnp.minimum(last, part.token_stop - 1) + part.offset
        is_whole = first >= key_index + block_tokens - 1
        if mask.upper is not None:
            is_whole &= last - mask.upper <= key_index

        def attend_head(head, is_cut: bool):
            tile = (head, pl.ds(row_start, row_count))
            value = scratch.blocks[buffer, head, :, value_base:]
            scores = dot(query_ref[tile], scratch.blocks[buffer, head, :, :key_lanes], (1, 1), None)
            if soft_cap is not None:
                scores = soft_cap * LOG2_E * jnp.tanh(scores)
            position = token + part.offset
            key = key_index + jax.lax.broadcasted_iota(jnp.int32, (1, block_tokens), 1)
            tokens = Tokens(position, position), Tokens(key, key)
            if of_rows.slopes is not None:
                scores += logits_lib.alibi(of_rows.slopes[tile], *tokens)
            if is_cut:
                # Zeros times a value that is not finite are a NaN score, which the mask can hide.
                scores += dot(jnp.zeros((8, value.shape[1]), value.dtype), value, (1, 1), None)[:1]
                visible = mask.visible(*tokens)
                assert visible is not None, "the mask is causal"
                scores = jnp.where(visible, scores, -jnp.inf)
                value = finite(value)
            maximum, total = scratch.maximum[tile], scratch.total[tile]
            highest = jnp.maximum(maximum, jnp.max(scores, axis=1, keepdims=True))
            shift = jnp.where(highest == -jnp.inf, 0.0, highest)
            weights = jnp.exp2(scores - shift)
            shrink = jnp.exp2(maximum - shift)
            weighted = dot(weights.astype(value.dtype), value, (1, 0), None)
            output = scratch.output[tile]
            total_now = total * shrink + jnp.sum(weights, axis=1, keepdims=True)
            scratch.maximum[tile] = jnp.where(is_own, highest, maximum)
            scratch.total[tile] = jnp.where(is_own, total_now, total)
            scratch.output[tile] = jnp.where(is_own, output * shrink + weighted, output)

        for is_cut in (False, True):

            @pl.when(is_whole != is_cut)
            def _(is_cut=is_cut):
                pl.loop(0, kv_heads)(lambda head: attend_head(head, is_cut))

    def attend_block(cursor: _Cursor, buffer):
        part = part_of(cursor.sequence)
        row_start = (part.token_start - first_token) * group
        row_stop = (part.token_stop - first_token) * group
        large_rows = tiles.tile_tokens * group
        are_few = row_stop - row_start <= MOST_SMALL_TILES * SMALL_ROWS

        def attend_tiles(row_count: int):
            @pl.loop(_div(row_start, row_count), _div(row_stop + row_count - 1, row_count))
            def _(i):
                start = pl.multiple_of(i * row_count, ALIGNMENT)
                attend_rows(part, cursor.block, buffer, start, row_count)

        if large_rows <= SMALL_ROWS:
            attend_tiles(large_rows)
        else:
            pl.when(are_few)(lambda: attend_tiles(SMALL_ROWS))
            pl.when(jnp.logical_not(are_few))(lambda: attend_tiles(large_rows))

    # A sink is what a row has seen before any key, and adds nothing to its output.
    if of_rows.sinks is None:
        scratch.maximum[...] = jnp.full_like(scratch.maximum, -jnp.inf)
        scratch.total[...] = jnp.zeros_like(scratch.total)
    else:
        scratch.maximum[...] = of_rows.sinks[...]
        scratch.total[...] = jnp.ones_like(scratch.total)
    scratch.output[...] = jnp.zeros_like(scratch.output)

    def fetch(cursor: _Cursor, count):
        @pl.when(cursor.sequence < stop_sequence)
        def _():
            for_each_copy(cursor, count % BUFFERS, lambda copy: copy.start())

        return advance(cursor)

    def work(state):
        cursor, ahead, count = state
        ahead = fetch(ahead, count + BUFFERS - 1)
        buffer = count % BUFFERS
        for_each_copy(cursor, buffer, lambda copy: copy.wait())
        attend_block(cursor, buffer)
        return advance(cursor), ahead, count + 1

    cursor = ahead = next_sequence(tables.first_sequence[step])
    for count in range(BUFFERS - 1):
        ahead = fetch(ahead, count)
    jax.lax.while_loop(
        lambda state: state[0].sequence < stop_sequence, work, (cursor, ahead, jnp.int32(0))
    )
    total = scratch.total[...]
    inverse = jnp.where(total == 0, 0.0, 1.0 / total)
    output_ref[...] = (scratch.output[...] * inverse).astype(output_ref.dtype)


def cost(query, pages, page_table, mask: Mask, value_dim: int, steps: int = 1) -> pl.CostEstimate:
    """An upper bound: every sequence as long as its row of the page table."""
    tokens, heads, head_dim = query.shape
    sequences, table_pages = page_table.shape
    page_size = pages.shape[3]
    keys = table_pages * page_size
    read_pages = table_pages
    if mask.upper is not None:
        keys = min(keys, mask.upper + 1)
        queries = pl.cdiv(tokens, steps)
        read_pages = min(pl.cdiv(mask.upper + queries, page_size) + 1, table_pages)
    page_bytes = pages.dtype.itemsize * math.prod(pages.shape[2:])
    return pl.CostEstimate(
        flops=2 * tokens * heads * keys * (head_dim + value_dim),
        transcendentals=tokens * heads * keys,
        # A step reads the pages of its sequences; one sequence may go on from step to step.
        bytes_accessed=(sequences + steps - 1) * read_pages * page_bytes
        + tokens * heads * (head_dim + value_dim) * query.dtype.itemsize,
    )
