"""The units that each tile of the flash kernels visits, listed, where the mask is no band.

A list is made before the kernel, of each tile and what is at hand at once of the other axis: the
units that the mask leaves whole, then those that it cuts, then those that it hides. The kernel
reads it from scalar memory and takes some units at a time, so that what it costs follows what the
mask leaves, and its program not the size of the tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels.units import Unit
from flax_pallas_attn.kernels.walk import Walk
from flax_pallas_attn.masking import tile_flags

MOST_AT_A_TIME = 16
"""Units of a list that a kernel takes at a time, at most; of those of 256 tokens half as many."""
_MOST_COUNTED = 512
"""Units of a list up to which it is sorted by counting, for which XLA has the faster program."""


def listed(walk: Walk) -> jax.Array | None:
    """The lists of all tiles and chunks, for blocks in scalar memory; None where it is a band.

    Args:
      walk: Its mask with the arrays.

    Returns:
      `[B or 1, chunks * tiles, 1, 2 + units]` int32. Of a tile and a chunk: how many groups of
      units are whole, how many there are, and the units, each as the numbers of its queries and
      its keys, in units, in 16 bits.
    """
    if walk.is_band:
        return None
    sizes = (walk.unit_queries, walk.unit_keys)
    some, full = tile_flags(walk.mask, *sizes, walk.queries, walk.keys)
    if walk.all_cut:
        full = jnp.zeros_like(full)
    ranks = jnp.where(full, 0, jnp.where(some, 1, 2))
    if not walk.by_query:
        ranks, sizes = ranks.mT, sizes[::-1]
    own_units, other_units = walk.sizes[0] // sizes[0], walk.chunk // sizes[1]
    tiles, chunks = (
        pl.cdiv(count, size)
        for count, size in zip(walk.counts, (walk.sizes[0], walk.chunk), strict=True)
    )
    missing = (tiles * own_units - ranks.shape[1], chunks * other_units - ranks.shape[2])
    ranks = jnp.pad(ranks, ((0, 0), *((0, n) for n in missing)), constant_values=2)
    ranks = ranks.reshape(-1, tiles, own_units, chunks, other_units)
    ranks = ranks.transpose(0, 3, 1, 4, 2).reshape(len(ranks), chunks * tiles, 1, -1)
    other, own = jnp.divmod(_sorted_places(ranks), own_units)
    query, key = (own, other) if walk.by_query else (other, own)
    group = at_a_time(walk)
    whole = jnp.sum(ranks == 0, axis=3, keepdims=True) // group
    groups = -(jnp.sum(ranks < 2, axis=3, keepdims=True) // -group)
    return jnp.concatenate((whole, groups, query << 16 | key), axis=3).astype(jnp.int32)


def _sorted_places(ranks: jax.Array) -> jax.Array:
    """`argsort` along the last axis, stable."""
    count = ranks.shape[-1]
    if count > _MOST_COUNTED:
        return jnp.argsort(ranks, axis=-1, stable=True)
    place = jnp.arange(count)
    order = ranks * count + place
    place_of = jnp.sum(order[..., None, :] < order[..., :, None], axis=-1)
    return jnp.sum(jnp.where(place_of[..., None, :] == place[:, None], place, 0), axis=-1)


def at_a_time(walk: Walk) -> int:
    """Units of a group: as many as divide those of a tile and a chunk."""
    units = walk.sizes[0] * walk.chunk // (walk.unit_queries * walk.unit_keys)
    most = max(1, min(MOST_AT_A_TIME, 2048 // walk.unit) // walk.heads)
    return max(n for n in range(1, most + 1) if units % n == 0)


def list_spec(lists: jax.Array | None, place: Callable) -> pl.BlockSpec | None:
    """Block spec of `listed`, of which `place` maps grid indices to (batch, which block)."""
    if lists is None:
        return None

    def index(*grid):
        batch, block = place(*grid)
        return batch if len(lists) > 1 else 0, block, 0, 0

    return pl.BlockSpec((1, 1, *lists.shape[2:]), index, memory_space=pltpu.SMEM)


def counts(walk: Walk, tile, list_ref):
    """How many groups of a tile's units are whole, and how many there are."""
    del walk, tile  # the block is of these
    return list_ref[0, 0, 0, 0], list_ref[0, 0, 0, 1]


def visit(walk: Walk, tile, begin: Callable, body: Callable, list_ref) -> None:
    """As `Walk.visit`, of the units in `list_ref`, a block of `unit_lists.listed`."""
    group = at_a_time(walk)
    last = list_ref.shape[3] - group

    def units(i, is_cut):
        units = []
        for number in range(group):
            query_and_key = list_ref[0, 0, 0, jnp.minimum(2 + i * group, last) + number]
            query = pl.multiple_of((query_and_key >> 16) * walk.unit_queries, walk.unit_queries)
            key = pl.multiple_of((query_and_key & 0xFFFF) * walk.unit_keys, walk.unit_keys)
            units.append(Unit(number, 0, query, key, is_cut))
        return walk.of_all_heads(units)

    whole, groups = counts(walk, tile, list_ref)
    begin(units(0, False))
    for start, stop, is_cut in ((0, whole, False), (whole, groups, True)):

        @pl.loop(start, stop)
        def _(i, is_cut=is_cut):
            now = units(i, is_cut)
            body(now, now, units(i + 1, is_cut))
