"""Attention over a paged cache in XLA: plain, as the definition of right, and block by block.

Both gather pages by their ids and take the mask from `masking.Mask`, on positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn import reference
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Positions, Tokens
from flax_pallas_attn.paged.cache import PagedKVCache, token_places
from flax_pallas_attn.sharding import vary_alike

BLOCK_TOKENS = 128  # keys of a sequence that are gathered at a time
TILE_TOKENS = 128  # most queries of a sequence that share a gathered block


def attend(
    query: jax.Array,
    cache: PagedKVCache,
    *,
    layer: int | jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
    mask: Mask,
    logits: Logits,
    scale: float | jax.Array,
) -> jax.Array:
    """Each token by itself, over all pages of its sequence; memory grows with tokens * M * L.

    Arguments as in `paged_attention`; returns its output.
    """
    sequence, position = token_places(query.shape[0], kv_lengths, query_starts)
    key, value = cache.read(layer, page_table[sequence])
    # Keys past a sequence's end stand after all its queries, so causality hides them; a padding
    # token stands at -1 and sees nothing.
    key_position = jnp.tile(jnp.arange(key.shape[2], dtype=jnp.int32), (query.shape[0], 1))
    mask = dataclasses.replace(mask, positions=Positions(position[:, None], key_position))
    output, _ = reference.attend(
        query[:, :, None], key, value, mask, logits, scale=scale, precision="highest"
    )
    return output[:, :, 0]


def attend_blockwise(
    query: jax.Array,
    cache: PagedKVCache,
    *,
    layer: int | jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
    mask: Mask,
    logits: Logits,
    scale: float | jax.Array,
) -> jax.Array:
    """Tiles of one sequence's queries, all tiles at once, over one block of pages after another.

    Memory grows with tokens + sequences, not with the length of the context. Arguments as in
    `paged_attention`; returns its output.
    """
    tokens, heads, _ = query.shape
    table_pages = page_table.shape[1]
    kv_heads, group = cache.num_kv_heads, heads // cache.num_kv_heads
    accumulator = jnp.promote_types(query.dtype, jnp.float32)

    sequence, token = _query_tiles(tokens, query_starts)
    tiles, tile_tokens = token.shape
    _, position = token_places(tokens, kv_lengths, query_starts)
    position = position.at[token].get(mode="fill", fill_value=-1)
    query_tokens = Tokens(index=position, position=position[:, None, None, :, None])
    query_tiles = query.at[token].get(mode="fill", fill_value=0)
    query_tiles = query_tiles.reshape(tiles, tile_tokens, kv_heads, group, -1)

    block_pages = min(max(1, BLOCK_TOKENS // cache.page_size), table_pages)
    block_tokens = block_pages * cache.page_size

    def attend_block(block, carry):
        greatest, total, output = carry
        column = block * block_pages + jnp.arange(block_pages)
        key, value = cache.read(
            layer, page_table[sequence][:, jnp.minimum(column, table_pages - 1)]
        )
        # A zero probability times NaN is NaN: what is not finite is taken out of the products and
        # put back as a NaN score, which the mask can hide.
        bad = ~(jnp.isfinite(key).all(-1) & jnp.isfinite(value).all(-1))[:, :, None, None]
        key, value = (jnp.where(jnp.isfinite(x), x, 0) for x in (key, value))
        key_position = block * block_tokens + jnp.arange(block_tokens, dtype=jnp.int32)
        key_tokens = Tokens(index=key_position, position=key_position)

        scores = _product("xtkgh,xksh->xkgts", query_tiles, key, accumulator) * scale
        if logits.soft_cap is not None:
            scores = logits_lib.cap(scores, logits.soft_cap)
        if logits.slopes is not None:
            slopes = logits.slopes.reshape(kv_heads, group, 1, 1)
            scores += logits_lib.alibi(slopes, query_tokens, key_tokens)
        scores = jnp.where(bad, jnp.nan, scores)
        # Keys past a sequence's end stand after all its queries, so causality hides them; padding
        # stands at -1 and sees nothing.
        visible = mask.visible(query_tokens, key_tokens)
        assert visible is not None, "the mask is causal"
        scores = jnp.where(visible, scores, -jnp.inf)

        new_greatest = jnp.maximum(greatest, scores.max(-1, keepdims=True))
        shift = jnp.where(new_greatest == -jnp.inf, 0, new_greatest)
        weights = jnp.exp(scores - shift)
        decay = jnp.exp(greatest - shift)
        total = total * decay + weights.sum(-1, keepdims=True)
        products = _product("xkgts,xksh->xkgth", weights.astype(value.dtype), value, accumulator)
        return new_greatest, total, output * decay + products

    # The blocks from the first that a query's window reaches to the last position of any query.
    last = position.max() // block_tokens
    first = 0
    if mask.upper is not None:
        lowest = jnp.where(position < 0, jnp.iinfo(jnp.int32).max, position).min()
        first = jnp.maximum(lowest - mask.upper, 0) // block_tokens
    rows = (tiles, kv_heads, group, tile_tokens)
    carry = (
        jnp.full((*rows, 1), -jnp.inf, accumulator),
        jnp.zeros((*rows, 1), accumulator),
        jnp.zeros((*rows, cache.value_head_dim), accumulator),
    )
    carry, _ = vary_alike((carry, query))
    greatest, total, output = jax.lax.fori_loop(first, last + 1, attend_block, carry)
    sees_nothing = total == 0  # XLA's maximum on CPU may pass over a NaN, the sum does not
    if logits.sinks is not None:
        total += jnp.exp(logits.sinks.reshape(kv_heads, group, 1, 1) - greatest)
    output = jnp.where(sees_nothing, 0, output / jnp.where(sees_nothing, 1, total))
    output = jnp.moveaxis(output, 3, 1).reshape(tiles, tile_tokens, heads, -1).astype(query.dtype)
    return jnp.zeros((tokens, *output.shape[2:]), query.dtype).at[token].set(output, mode="drop")


def _query_tiles(tokens: int, query_starts: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cuts each sequence's queries into tiles of a size that suits their mean number.

    Returns:
      The sequence of each tile, int32 `[tiles]`, and its tokens, int32 `[tiles, tile tokens]`;
      `tokens` (out of range) where the tile is not full. There are as many tiles as any
      `query_starts` can need.
    """
    sequences = query_starts.shape[0] - 1
    mean = -(-tokens // sequences)
    size = min(1 << (mean - 1).bit_length(), TILE_TOKENS)
    tiles = min(tokens, -(-tokens // size) + sequences)
    counts = -(-jnp.diff(query_starts) // size)
    stops = jnp.cumsum(counts)
    tile = jnp.arange(tiles, dtype=jnp.int32)
    sequence = jnp.sum(tile[:, None] >= stops, axis=1, dtype=jnp.int32)
    real = sequence < sequences
    sequence = jnp.minimum(sequence, sequences - 1)
    first = query_starts[sequence] + (tile - (stops - counts)[sequence]) * size
    token = first[:, None] + jnp.arange(size, dtype=jnp.int32)
    inside = real[:, None] & (token >= 0) & (token < query_starts[sequence + 1][:, None])
    return sequence, jnp.where(inside, token, tokens)


def _product(spec: str, a: jax.Array, b: jax.Array, accumulator) -> jax.Array:
    return jnp.einsum(spec, a, b, precision="highest", preferred_element_type=accumulator)
