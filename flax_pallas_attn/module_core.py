"""What the NNX and the Linen module do between their projections.

Both project to heads, call `attend` or `decode_step` (or `paged_step`), and project back.
"""

import dataclasses
import functools
import math
import numbers
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax.nnx.nn.dtypes import promote_dtype
from jax.core import Tracer

from flax_pallas_attn.attention import dot_product_attention, one_batch_axis
from flax_pallas_attn.choice import IMPLEMENTATIONS
from flax_pallas_attn.input_checks import as_array, as_integers, check_band, check_soft_cap
from flax_pallas_attn.logits import Dropout
from flax_pallas_attn.masking import Positions, SegmentIds
from flax_pallas_attn.paged.attention import Implementation, paged_attention
from flax_pallas_attn.paged.cache import PagedKVCache
from flax_pallas_attn.rotary import Rotary
from flax_pallas_attn.sharding import AttentionSharding, check_sharding

DEFAULT_PAGE_SIZE = 128

# Why an argument is refused.
DECODING = (
    "cannot be used while decoding, which attends to all that the module's cache holds, with this "
    "package's paged attention; for rows of different lengths see MultiHeadAttention.paged."
)
SOWING = (
    "needs the attention weights, which this package's attention never forms; build the module "
    "with flax's own dot_product_attention as attention_fn to look at them."
)
FOREIGN_ATTENTION = (
    "is not known to the attention_fn that the module was built with; leave it out, or leave "
    "attention_fn at its default."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionOptions:
    """What a module adds to flax's attention, as its constructor got it.

    Attributes:
      rotary: Turns queries and keys by their positions.
      local_window_size: As in `dot_product_attention`.
      logits_soft_cap: As in `dot_product_attention`.
      implementation: As in `dot_product_attention`.
      sharding: As in `dot_product_attention`.
      dtype: Of queries, keys and values; None promotes them to a common one.
      precision: As in `dot_product_attention`.

    Raises:
      ValueError: An option is none of those.
    """

    rotary: Rotary | None
    local_window_size: int | tuple[int, int] | None
    logits_soft_cap: float | None
    implementation: Implementation | None
    sharding: AttentionSharding | None
    dtype: Any
    precision: Any

    def __post_init__(self):
        if not isinstance(self.rotary, Rotary | None):
            raise ValueError(
                f"rotary={self.rotary!r} must be Rotary(), with a base or scaling as the model "
                "has it, or None."
            )
        check_band(False, self.local_window_size)
        check_soft_cap(self.logits_soft_cap)
        check_sharding(self.sharding)
        if self.implementation not in (None, *IMPLEMENTATIONS):
            raise ValueError(
                f"implementation={self.implementation!r} is not known; use None or one of "
                f"{IMPLEMENTATIONS}."
            )

    @property
    def used(self) -> dict[str, bool]:
        """Which options an `attention_fn` of flax's contract knows nothing of, and are set."""
        return {
            name: getattr(self, name) is not None
            for name in ("local_window_size", "logits_soft_cap", "implementation", "sharding")
        }


def refuse(arguments: dict[str, bool], reason: str) -> None:
    """Raises `NotImplementedError` naming the arguments that are in use."""
    used = [name for name, is_used in arguments.items() if is_used]
    if used:
        raise NotImplementedError(f"{', '.join(used)} {reason}")


def check_sizes(**sizes: int | None) -> None:
    """Raises `ValueError` for what is no whole number above 0; None stands for a default."""
    for name, size in sizes.items():
        if size is not None and not (isinstance(size, numbers.Integral) and size >= 1):
            raise ValueError(f"{name}={size!r} must be an int of at least 1.")


def check_normalize_qk(normalize_qk) -> None:
    """Raises `ValueError` for what no module has."""
    if normalize_qk not in (False, True, "rms"):
        raise ValueError(f"normalize_qk={normalize_qk!r} must be False, True or 'rms'.")


def pair_positions(positions) -> Positions | None:
    """One array stands for the positions of queries and keys alike."""
    return _pair(Positions, positions, "positions")


def pair_segments(segment_ids) -> SegmentIds | None:
    """One array stands for the segments of queries and keys alike."""
    return _pair(SegmentIds, segment_ids, "segment_ids")


def _pair(kind, x, name: str):
    if x is None:
        return None
    if not isinstance(x, kind):
        x = kind(query=x, key=x)
    return kind(
        query=as_integers(x.query, f"{name} (of queries)"),
        key=as_integers(x.key, f"{name} (of keys)"),
    )


def turn(
    rotary: Rotary | None, query: jax.Array, key: jax.Array, positions: Positions | None
) -> tuple[jax.Array, jax.Array]:
    """Rotary positions of query and key; without positions both count from 0."""
    if rotary is None:
        return query, key
    if positions is None:
        positions = Positions(
            query=jnp.arange(query.shape[-3], dtype=jnp.int32),
            key=jnp.arange(key.shape[-3], dtype=jnp.int32),
        )
    return rotary.apply(query, positions.query), rotary.apply(key, positions.key)


def attend(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None,
    segment_ids: SegmentIds | None,
    positions: Positions | None,
    is_causal: bool,
    dropout: Dropout | None,
) -> jax.Array:
    """`dot_product_attention` under any number of batch dimensions.

    Args:
      options: Of the module.
      query: `[..., T, N, H]`, turned.
      key: `[..., S, K, H]`, turned.
      value: `[..., S, K, Hv]`.
      mask: Broadcasts to `[..., N, T, S]`, any dtype, nonzero where attention is allowed.
      segment_ids: Of `[..., T]` and `[..., S]`.
      positions: Of `[..., T]` and `[..., S]`.
      is_causal: As in `dot_product_attention`.
      dropout: As in `dot_product_attention`.

    Returns:
      `[..., T, N, Hv]`.
    """
    query, key, value = promote_dtype((query, key, value), dtype=options.dtype)
    batch_shape = query.shape[:-3]

    def flat(x, rank, name):
        return one_batch_axis(x, batch_shape, rank, name)

    output = dot_product_attention(
        flat(query, 3, "query"),
        flat(key, 3, "key"),
        flat(value, 3, "value"),
        mask=None if mask is None else flat(as_array(mask, "mask"), 3, "mask"),
        is_causal=is_causal,
        local_window_size=options.local_window_size,
        segment_ids=jax.tree.map(lambda x: flat(x, 1, "segment_ids"), segment_ids),
        positions=jax.tree.map(lambda x: flat(x, 1, "positions"), positions),
        logits_soft_cap=options.logits_soft_cap,
        dropout=dropout,
        precision=options.precision,
        sharding=options.sharding,
        implementation=options.implementation,
    )
    output = cast(jax.Array, output)  # not a pair, as no residual is asked for
    return output.reshape(*batch_shape, *output.shape[1:])


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["pages", "index", "is_full"],
    meta_fields=["batch_shape", "max_length"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeCache:
    """A module's own cache: one layer, every row of the batch equally long.

    The pages of row b are `b * M .. (b + 1) * M - 1`. Nothing about them has to be kept, so a cache
    of zeros is an empty cache.

    Attributes:
      pages: `PagedKVCache` of one layer.
      index: int32 `[]`, tokens of each row so far.
      is_full: bool `[]`, whether a call under `jit` had more tokens than there was room for: it
        wrote nothing, and its output is NaN. Once set it stays. (Outside `jit` such a call raises.)
      batch_shape: Of the inputs.
      max_length: Tokens that each row has room for.
    """

    pages: PagedKVCache
    index: jax.Array
    is_full: jax.Array
    batch_shape: tuple[int, ...]
    max_length: int

    @classmethod
    def create(
        cls,
        *,
        batch_shape: tuple[int, ...],
        max_length: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: jax.typing.DTypeLike,
    ) -> "DecodeCache":
        """An empty cache.

        Args:
          batch_shape: Of the inputs, without length and features.
          max_length: Tokens that each row has room for.
          page_size: Tokens per page.
          num_kv_heads: K.
          head_dim: H.
          dtype: Of keys and values.
        """
        check_sizes(page_size=page_size)
        if max_length < 1:
            raise ValueError(f"A cache needs room for at least 1 token, got length {max_length}.")
        pages_per_row = -(-max_length // page_size)
        return cls(
            pages=PagedKVCache.create(
                num_layers=1,
                num_pages=math.prod(batch_shape) * pages_per_row,
                page_size=page_size,
                num_kv_heads=num_kv_heads,
                head_dim=head_dim,
                dtype=dtype,
            ),
            index=jnp.zeros((), jnp.int32),
            is_full=jnp.zeros((), bool),
            batch_shape=tuple(batch_shape),
            max_length=max_length,
        )


def decode_step(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: DecodeCache,
    *,
    positions: Positions | None,
) -> tuple[jax.Array, DecodeCache]:
    """Appends the tokens of this call to the cache; each sees itself and everything before it.

    Args:
      options: Of the module.
      query: `[..., t, N, H]`, any number t of tokens, not turned yet.
      key: `[..., t, K, H]`.
      value: `[..., t, K, H]`.
      cache: The module's.
      positions: Of `[..., t]`, for the rotary embedding alone; by default they follow the index.

    Returns:
      Output `[..., t, N, H]` and the cache with the tokens in it.

    Raises:
      ValueError: The tokens do not fit (inside `jit`: see `DecodeCache.is_full`), or the batch is
        not that of the cache.
    """
    *batch_shape, tokens = query.shape[:-2]
    if key.shape[:-2] != query.shape[:-2] or tuple(batch_shape) != cache.batch_shape:
        raise ValueError(
            f"Decoding appends keys of [..., t, N, H] = {query.shape} to a cache for a batch of "
            f"{cache.batch_shape}, and got keys of {key.shape}; query and key must have the batch "
            "of the cache and the same number of tokens."
        )
    used = 0 if isinstance(cache.index, Tracer) else int(cache.index)
    if used + tokens > cache.max_length:
        raise ValueError(
            f"{tokens} more tokens do not fit: the cache has room for {cache.max_length} and holds "
            f"at least {used}. Make a longer one before decoding."
        )
    fits = cache.index + tokens <= cache.max_length
    written = jnp.where(fits, tokens, 0)

    if positions is None:
        index = cache.index + jnp.arange(tokens, dtype=jnp.int32)
        positions = Positions(query=index, key=index)
    query, key = turn(options.rotary, query, key, positions)
    rows = math.prod(batch_shape)
    query_tokens, key_tokens, value_tokens = (
        x.reshape(rows * tokens, *x.shape[-2:]).astype(cache.pages.dtype)
        for x in (query, key, value)
    )
    output, pages = paged_step(
        options,
        query_tokens,
        key_tokens,
        value_tokens,
        cache.pages,
        layer=0,
        page_table=jnp.arange(cache.pages.num_pages, dtype=jnp.int32).reshape(rows, -1),
        kv_lengths=jnp.broadcast_to(cache.index + written, (rows,)),
        # Tokens that do not fit belong to no row, and so are not written.
        query_starts=written * jnp.arange(rows + 1, dtype=jnp.int32),
    )
    output = jnp.where(fits, output, jnp.nan).astype(query.dtype).reshape(query.shape)
    return output, dataclasses.replace(
        cache, pages=pages, index=cache.index + written, is_full=cache.is_full | ~fits
    )


def paged_step(
    options: AttentionOptions,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    cache: PagedKVCache,
    *,
    layer: int | jax.Array,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
) -> tuple[jax.Array, PagedKVCache]:
    """`paged_attention` of tokens that are turned already, `[tokens, heads, H]`."""
    return paged_attention(
        query,
        cache,
        key=key,
        value=value,
        layer=layer,
        page_table=page_table,
        kv_lengths=kv_lengths,
        query_starts=query_starts,
        local_window_size=options.local_window_size,
        logits_soft_cap=options.logits_soft_cap,
        sharding=options.sharding,
        implementation=options.implementation,
    )
