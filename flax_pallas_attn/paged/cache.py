"""The paged key/value cache: the pages of all layers in one array, and writing to them.

Letters: P pages, L tokens per page, M pages per sequence, K key/value heads, H head size.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flax_pallas_attn.input_checks import as_array, as_integers

LANES = 128  # of a TPU vector register: the last dimension of an array is stored in units of this


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages"],
    meta_fields=["head_dim", "value_head_dim"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKVCache:
    """Keys and values of all layers, in pages that any sequence may own.

    The layout is the one that a TPU kernel can fetch without rearranging anything:

    - A page of one layer, all its heads, is contiguous: one copy fetches it.
    - The two tiled dimensions are tokens and lanes, so that a head of a page is a matrix that the
      matrix unit takes as it is, for any number of heads and any multiple of 8 tokens per page.
    - Keys and values lie side by side in the lanes: `[key, value]` where both fit in 128 lanes
      (head size 64 wastes nothing, where separate arrays would be padded to twice their size), else
      the value starts at the next multiple of 128, which costs no more than separate arrays.

    Attributes:
      pages: `[layers, P, K, L, lanes]`.
      head_dim: H, size of a key.
      value_head_dim: Hv, size of a value.
    """

    pages: jax.Array
    head_dim: int
    value_head_dim: int

    @classmethod
    def create(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        value_head_dim: int | None = None,
        dtype: jax.typing.DTypeLike = jnp.bfloat16,
    ) -> "PagedKVCache":
        """Allocates a cache of zeros.

        Args:
          num_layers: Layers that share the cache's page tables.
          num_pages: P, pages of each layer.
          page_size: L, tokens per page; the TPU kernel takes multiples of 8.
          num_kv_heads: K.
          head_dim: H, size of a key.
          value_head_dim: Hv, size of a value; None for `head_dim`.
          dtype: A floating-point type, the same as the queries'.

        Raises:
          ValueError: A size below 1, or a dtype that is not floating point.

        >>> cache = PagedKVCache.create(
        ...     num_layers=2, num_pages=16, page_size=8, num_kv_heads=4, head_dim=64
        ... )
        >>> cache.pages.shape, cache.capacity_tokens
        ((2, 16, 4, 8, 128), 128)
        """
        value_head_dim = head_dim if value_head_dim is None else value_head_dim
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "value_head_dim": value_head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}={size} must be at least 1.")
        if not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                f"dtype={jnp.dtype(dtype).name} must be a floating-point type, such as bfloat16."
            )
        lanes = _round_up(_value_start(head_dim, value_head_dim) + value_head_dim, LANES)
        pages = jnp.zeros((num_layers, num_pages, num_kv_heads, page_size, lanes), dtype)
        return cls(pages=pages, head_dim=head_dim, value_head_dim=value_head_dim)

    @property
    def num_layers(self) -> int:
        return self.pages.shape[0]

    @property
    def num_pages(self) -> int:
        return self.pages.shape[1]

    @property
    def num_kv_heads(self) -> int:
        return self.pages.shape[2]

    @property
    def page_size(self) -> int:
        return self.pages.shape[3]

    @property
    def dtype(self) -> jnp.dtype:
        return self.pages.dtype

    @property
    def capacity_tokens(self) -> int:
        """Tokens that fit in all pages together."""
        return self.num_pages * self.page_size

    @property
    def value_start(self) -> int:
        """The lane at which a value starts."""
        return _value_start(self.head_dim, self.value_head_dim)

    def write(
        self,
        key: jax.Array,
        value: jax.Array,
        *,
        layer: int | jax.Array = 0,
        page_table: jax.Array,
        kv_lengths: jax.Array,
        query_starts: jax.Array,
    ) -> "PagedKVCache":
        """Writes this call's tokens of one layer to their pages.

        In place when the cache is donated to the jitted function around it. Tokens that belong to
        no sequence, and tokens beyond a sequence's page table, or of a page or layer that does not
        exist, write nothing.

        Args:
          key: `[tokens, K, H]` in the cache's dtype.
          value: `[tokens, K, Hv]`.
          layer: Which layer.
          page_table: `[sequences, M]` int32, the pages of each sequence in order.
          kv_lengths: `[sequences]` int32, tokens of each sequence, these included.
          query_starts: `[sequences + 1]` int32: tokens `query_starts[s]` up to
            `query_starts[s + 1]` are the last ones of sequence s.

        Returns:
          The cache with the tokens written.

        Raises:
          ValueError: A shape or dtype that does not fit the cache.
        """
        key, value = as_array(key, "key"), as_array(value, "value")
        page_table = as_integers(page_table, "page_table")
        tokens = key.shape[0]
        for name, array, size in (
            ("key", key, self.head_dim),
            ("value", value, self.value_head_dim),
        ):
            expected = (tokens, self.num_kv_heads, size)
            if array.shape != expected:
                raise ValueError(
                    f"{name} has shape {array.shape}; expected [tokens, K, head size] = "
                    f"{expected}, as the cache was created."
                )
            if array.dtype != self.dtype:
                raise ValueError(
                    f"{name} has dtype {array.dtype} and the cache {self.dtype}; cast {name}, or "
                    f"create the cache with dtype={array.dtype}."
                )
        sequence, position = token_places(tokens, kv_lengths, query_starts)
        index = position // self.page_size
        page = page_table[sequence, jnp.clip(index, 0, page_table.shape[1] - 1)]
        writes = (position >= 0) & (index < page_table.shape[1])
        writes &= (page >= 0) & (page < self.num_pages) & (layer >= 0) & (layer < self.num_layers)
        # Rows that write nothing get pages that do not exist, each its own: no index occurs twice.
        page = jnp.where(writes, page, self.num_pages + jnp.arange(tokens))
        lanes = self.pages.shape[-1]
        rows = jnp.concatenate(
            [
                _pad_lanes(key, self.value_start),
                _pad_lanes(value, lanes - self.value_start),
            ],
            axis=-1,
        )
        # An index for each head too: of larger pieces XLA copies the whole cache to lay them out.
        head = jnp.arange(self.num_kv_heads)
        place = (layer, page[:, None], head, position[:, None] % self.page_size)
        pages = self.pages.at[place].set(rows, mode="drop", unique_indices=True)
        return dataclasses.replace(self, pages=pages)

    def copy_pages(self, sources: jax.Array, targets: jax.Array) -> "PagedKVCache":
        """Copies whole pages, of all layers: what `PageAllocator.make_writable` asks for.

        In place when the cache is donated to the jitted function around it.

        Args:
          sources: `[n]` int32, pages to copy.
          targets: `[n]` int32, pages to copy them to, none of them in `sources`. Where either does
            not exist nothing is copied: with -1 a call is filled up to a size compiled before.

        Returns:
          The cache with the pages copied.

        Raises:
          ValueError: Shapes that differ, or are not of rank 1.
        """
        sources, targets = as_integers(sources, "sources"), as_integers(targets, "targets")
        if sources.ndim != 1 or sources.shape != targets.shape:
            raise ValueError(
                f"sources has shape {sources.shape} and targets {targets.shape}; expected one page "
                "each, [n] and [n]."
            )
        if not sources.size:
            return self
        exist = (sources >= 0) & (sources < self.num_pages)
        exist &= (targets >= 0) & (targets < self.num_pages)
        targets = jnp.clip(targets, 0, self.num_pages - 1)
        # A page that is not to be copied is put where it stands.
        sources = jnp.where(exist, sources, targets)

        def copy(i, pages):
            page = jax.lax.dynamic_index_in_dim(pages, sources[i], axis=1)
            return jax.lax.dynamic_update_index_in_dim(pages, page, targets[i], axis=1)

        pages = jax.lax.fori_loop(0, len(sources), copy, self.pages)
        return dataclasses.replace(self, pages=pages)

    def read(self, layer: int | jax.Array, page_ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Gathers pages of one layer.

        Args:
          layer: Which layer.
          page_ids: `[..., n]` int32; one that does not exist reads the nearest that does.

        Returns:
          Keys `[..., K, n * L, H]` and values `[..., K, n * L, Hv]`.
        """
        page_ids = jnp.clip(page_ids, 0, self.num_pages - 1)
        rows = jnp.moveaxis(self.pages[layer, page_ids], -4, -3)  # [..., K, n, L, lanes]
        rows = rows.reshape(*rows.shape[:-3], -1, rows.shape[-1])
        start = self.value_start
        return rows[..., : self.head_dim], rows[..., start : start + self.value_head_dim]

    def overflows(self, page_table: jax.Array, kv_lengths: jax.Array) -> jax.Array:
        """Which sequences have outgrown their row of the page table.

        Outside `jit`, `paged_attention` raises for them. Inside, where it cannot, tokens beyond
        the table are not written, the output of the sequence's tokens is NaN, and this says so.

        Args:
          page_table: `[sequences, M]`.
          kv_lengths: `[sequences]`.

        Returns:
          bool `[sequences]`.
        """
        kv_lengths = as_integers(kv_lengths, "kv_lengths")
        return kv_lengths > as_integers(page_table, "page_table").shape[1] * self.page_size


def token_places(
    tokens: int, kv_lengths: jax.Array, query_starts: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Where each token of a call stands.

    Args:
      tokens: How many there are, padding included.
      kv_lengths: `[sequences]`.
      query_starts: `[sequences + 1]`.

    Returns:
      Its sequence, int32 `[tokens]`, in range for padding too, and its position in the sequence,
      int32 `[tokens]`, -1 for padding.
    """
    kv_lengths = as_integers(kv_lengths, "kv_lengths")
    query_starts = as_integers(query_starts, "query_starts")
    token = jnp.arange(tokens, dtype=jnp.int32)
    sequence = jnp.sum(token[:, None] >= query_starts, axis=1, dtype=jnp.int32) - 1
    real = (sequence >= 0) & (sequence < kv_lengths.shape[0])
    sequence = jnp.clip(sequence, 0, kv_lengths.shape[0] - 1)
    position = kv_lengths[sequence] - query_starts[sequence + 1] + token
    return sequence, jnp.where(real, jnp.maximum(position, -1), -1)


def _value_start(head_dim: int, value_head_dim: int) -> int:
    return head_dim if head_dim + value_head_dim <= LANES else _round_up(head_dim, LANES)


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def _pad_lanes(x: jax.Array, size: int) -> jax.Array:
    return jnp.pad(x, ((0, 0), (0, 0), (0, size - x.shape[-1])))
