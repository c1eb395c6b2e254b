"""Which calls the paged kernel can take, in tiles of which sizes, and the VMEM that they take."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.logits import Logits

ALIGNMENT = 16  # rows and tokens: what both bfloat16 and float32 tiles divide
BUFFERS = 2  # blocks of pages in VMEM: one is used while the next arrives
SMALL_ROWS = 16  # of the tile for a few rows
MOST_SMALL_TILES = 4  # a sequence of more rows goes through large tiles
LARGE_ROWS = 256  # of the tile for many rows
MOST_LARGE_TILES = 4  # in a grid step
MOST_TABLE_ENTRIES = 200_000  # of a page table; a TPU has 1 MiB of scalar memory
BLOCK_BYTES = 1 << 20  # of a block of pages: long enough a copy to hide its latency


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedTiles:
    """Sizes of the kernel's tiles.

    Attributes:
      query_tokens: Tokens of a grid step, a multiple of `tile_tokens`.
      tile_tokens: Tokens of a large tile of rows, a multiple of 16.
      block_pages: Pages of a block.
    """

    query_tokens: int
    tile_tokens: int
    block_pages: int


def reasons_against(query, pages, page_table, logits: Logits) -> list[str]:
    """Why the kernel cannot take a call; empty when it can."""
    reasons = []
    if pages.dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(
            f"dtype {pages.dtype} has no TPU kernel (Mosaic compiles bfloat16 and float32)"
        )
    if pages.shape[3] % 8:
        reasons.append(f"page_size={pages.shape[3]} is not a multiple of 8")
    if page_table.size > MOST_TABLE_ENTRIES:
        reasons.append(
            f"page_table has {page_table.size} entries, scalar memory holds {MOST_TABLE_ENTRIES}"
        )
    if default_tiles(query, pages, page_table, logits) is None:
        reasons.append(
            f"a page of {math.prod(pages.shape[2:])} numbers, and {query.shape[1]} query heads, do "
            f"not fit {tiles_lib.vmem_limit_bytes()} bytes of VMEM"
        )
    return reasons


def default_tiles(
    query: jax.Array, pages: jax.Array, page_table: jax.Array, logits: Logits
) -> PagedTiles | None:
    """The largest tiles that fit the VMEM of the generation compiled for; None where none do."""
    tokens, heads, _ = query.shape
    kv_heads, page_size, lanes = pages.shape[2:]
    block_tokens = BLOCK_BYTES // (kv_heads * lanes * pages.dtype.itemsize)
    block_pages = min(max(block_tokens, 128), 512) // page_size
    block_pages = min(max(block_pages, 1), page_table.shape[1])
    tile = LARGE_ROWS // (heads // kv_heads) // ALIGNMENT * ALIGNMENT
    tile = min(max(tile, ALIGNMENT), tiles_lib.pad_to(tokens, ALIGNMENT))
    most_tiles = min(pl.cdiv(tokens, tile), MOST_LARGE_TILES)
    sizes = [(count * tile, tile) for count in range(most_tiles, 0, -1)] + [(ALIGNMENT, ALIGNMENT)]
    for block in (block_pages, 1):
        for query_tokens, tile_tokens in sizes:
            tiles = PagedTiles(
                query_tokens=query_tokens, tile_tokens=tile_tokens, block_pages=block
            )
            if vmem_bytes(tiles, query, pages, logits) <= tiles_lib.vmem_limit_bytes():
                return tiles
    return None


def vmem_bytes(tiles: PagedTiles, query: jax.Array, pages: jax.Array, logits: Logits) -> int:
    """Estimate: blocks of pages, pipelined queries and outputs, running softmax, live tiles."""
    kv_heads, page_size, lanes = pages.shape[2:]
    group = query.shape[1] // kv_heads
    block_tokens = tiles.block_pages * page_size
    itemsize = pages.dtype.itemsize
    rows = kv_heads * tiles.query_tokens * group
    of_rows = (logits.slopes is not None) + (logits.sinks is not None)
    row_bytes = (
        2 * (lanes + tiles_lib.LANES) * itemsize + (lanes + (2 + 2 * of_rows) * tiles_lib.LANES) * 4
    )
    scores = max(tiles.tile_tokens * group, SMALL_ROWS) * tiles_lib.pad_to(block_tokens, 128)
    blocks = BUFFERS * kv_heads * block_tokens * lanes * itemsize
    return blocks + rows * row_bytes + 4 * (4 * scores + 2 * block_tokens * lanes)
