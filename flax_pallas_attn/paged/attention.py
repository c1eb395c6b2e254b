"""Attention of ragged queries over a paged cache: check, choose an implementation, call it."""

import functools
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType

from flax_pallas_attn.input_checks import (
    as_array,
    as_integers,
    check_band,
    check_scale,
    check_soft_cap,
    warn,
)
from flax_pallas_attn.kernels import paged as kernel
from flax_pallas_attn.kernels.paged_tiles import reasons_against
from flax_pallas_attn.kernels.tiles import tpu_kind
from flax_pallas_attn.logits import Alibi, Logits
from flax_pallas_attn.masking import Mask
from flax_pallas_attn.paged import gather
from flax_pallas_attn.paged.cache import PagedKVCache, token_places
from flax_pallas_attn.sharding import vary_alike

Implementation = Literal["pallas", "xla", "reference"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


def paged_attention(
    query: jax.Array,
    cache: PagedKVCache,
    *,
    key: jax.Array | None = None,
    value: jax.Array | None = None,
    layer: int | jax.Array = 0,
    page_table: jax.Array,
    kv_lengths: jax.Array,
    query_starts: jax.Array,
    scale: float | jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    bias: Alibi | None = None,
    tree_mask: jax.Array | None = None,
    sharding: object | None = None,
    implementation: Implementation | None = None,
) -> tuple[jax.Array, PagedKVCache]:
    """Causal attention of any number of tokens per sequence over a paged cache.

    The tokens of all sequences lie one after another in `query`. Those of sequence s are rows
    `query_starts[s]` up to `query_starts[s + 1]`, and they are its last tokens: row i of q stands
    at position `kv_lengths[s] - q + i` and sees its own position and those before it. So one call
    serves prompts (many tokens), decoding (one) and drafts (a few) together. A sequence may have no
    token in the call. Not differentiable: use `dot_product_attention` for training.

    Letters: P pages, L tokens per page, M pages per sequence, N query heads, K key/value heads.

    Args:
      query: `[tokens, N, H]`. Tokens past `query_starts[-1]` are padding and come out zero.
      cache: Keys and values so far, K heads (K divides N), of the query's dtype.
      key: `[tokens, K, H]` of the same tokens, written to their pages before anything is read;
        None, with `value`, when they are there already (layers that share a cache).
      value: `[tokens, K, Hv]`.
      layer: The layer of the cache to write and read.
      page_table: `[sequences, M]` int32: the pages of each sequence in order. Entries past its
        length, or before what its window reaches, may hold anything.
      kv_lengths: `[sequences]` int32: the tokens of each sequence, those of this call included.
      query_starts: `[sequences + 1]` int32, rising.
      scale: Factor on the scores; None for `H ** -0.5`.
      local_window_size: As in `jax.nn.dot_product_attention`: w keys to the left of oneself, and
        oneself (what lies to the right is never visible here). A published model's
        `sliding_window=w` is `w - 1` here.
      logits_soft_cap: Scores become `cap * tanh(scores / cap)`.
      sinks: `[N]`, a logit per head that takes part in the softmax and has no value.
      bias: `Alibi(slopes)`, by position in the sequence.
      tree_mask: For drafts shaped as a tree; not supported yet.
      sharding: Placement on a mesh; not supported yet.
      implementation: "pallas" (TPU), "xla" or "reference". None takes the first for TPU, where it
        supports the arguments, and the second elsewhere, by the platform that is compiled for.

    Returns:
      Output `[tokens, N, Hv]` in the query's dtype, and the cache with the new tokens in it.

    Raises:
      ValueError: Shapes, dtypes or heads that do not fit; and outside `jit`, where values are
        known, lengths beyond the page table, pages that do not exist, starts that do not rise,
        two tokens of the call in one place. Under `jit` nothing is read or written out of bounds:
        tokens of a sequence beyond its page table (see `PagedKVCache.overflows`), or that needs a
        page that does not exist, come out NaN.
      NotImplementedError: What is valid and not supported here, a derivative among it.

    >>> import jax.numpy as jnp
    >>> from flax_pallas_attn.paged import PagedKVCache, paged_attention
    >>> cache = PagedKVCache.create(
    ...     num_layers=1, num_pages=4, page_size=8, num_kv_heads=1, head_dim=16, dtype=jnp.float32
    ... )
    >>> x = jnp.ones((5, 1, 16))  # a prompt of 4 tokens, and a sequence's first token
    >>> output, cache = paged_attention(
    ...     x, cache, key=x, value=x,
    ...     page_table=jnp.array([[2, 0], [3, 0]]),
    ...     kv_lengths=jnp.array([4, 1]),
    ...     query_starts=jnp.array([0, 4, 5]),
    ... )
    >>> output.shape
    (5, 1, 16)
    """
    if not isinstance(cache, PagedKVCache):
        raise ValueError(f"cache is a {type(cache).__name__}; pass a PagedKVCache.")
    query = as_array(query, "query")
    key = None if key is None else as_array(key, "key")
    value = None if value is None else as_array(value, "value")
    page_table, kv_lengths, query_starts = (
        x if isinstance(x, np.ndarray) else as_array(x, name)
        for x, name in (
            (page_table, "page_table"),
            (kv_lengths, "kv_lengths"),
            (query_starts, "query_starts"),
        )
    )
    _check_shapes(query, cache, key, value, page_table, kv_lengths, query_starts)
    if as_integers(layer, "layer").shape != ():
        raise ValueError(f"layer has shape {jnp.shape(layer)}; one integer is expected.")
    _, left = check_band(True, local_window_size)
    _check_values(query.shape[0], cache, layer, page_table, kv_lengths, query_starts, left)
    if key is not None and _is_known(page_table, kv_lengths, query_starts):
        _check_places(cache.page_size, *map(_integers, (page_table, kv_lengths, query_starts)))
    if tree_mask is not None:
        raise NotImplementedError("tree_mask is not supported yet; verify one branch per sequence.")
    if sharding is not None:
        raise NotImplementedError("sharding is not supported yet; call within jax.shard_map.")
    if bias is not None and not isinstance(bias, Alibi):
        raise NotImplementedError(f"bias={type(bias).__name__} is not supported; only Alibi is.")
    mask = Mask(lower=0, upper=left)
    logits = Logits(
        soft_cap=check_soft_cap(logits_soft_cap),
        slopes=None if bias is None else _per_head("bias.slopes", bias.slopes, query),
        sinks=None if sinks is None else _per_head("sinks", sinks, query),
    )
    page_table, kv_lengths, query_starts = (
        jnp.asarray(x, jnp.int32) for x in (page_table, kv_lengths, query_starts)
    )
    tables = {"page_table": page_table, "kv_lengths": kv_lengths, "query_starts": query_starts}
    implementation = _choose(query, cache, page_table, logits, implementation)
    if key is not None and value is not None:
        cache = _write(cache, key, value, layer=layer, **tables)
    output = _attend(
        query,
        cache,
        mask=mask,
        logits=logits,
        scale=check_scale(scale, query.shape[-1]),
        layer=layer,
        **tables,
        implementation=implementation,
    )
    return output, cache


# Under a `jit` of their own, so that outside one they compile once per shape.
_write = jax.jit(PagedKVCache.write)


@functools.partial(jax.jit, static_argnames="implementation")
def _attend(query, cache, *, implementation, **arguments) -> jax.Array:
    query, cache, arguments = vary_alike(_not_differentiable((query, cache, arguments)))
    attend = {
        None: _by_platform,
        "pallas": _kernel,
        "xla": gather.attend_blockwise,
        "reference": gather.attend,
    }[implementation]
    output = attend(query, cache, **arguments)
    tables = [arguments[name] for name in ("page_table", "kv_lengths", "query_starts")]
    page_table, kv_lengths, query_starts = tables
    sequence, position = token_places(query.shape[0], kv_lengths, query_starts)
    is_lost = cache.overflows(page_table, kv_lengths)
    is_lost |= _absent_pages(cache, *tables, left=arguments["mask"].upper).any(axis=1)
    is_lost |= (arguments["layer"] < 0) | (arguments["layer"] >= cache.num_layers)
    is_lost = is_lost[sequence] & (position >= 0)
    return jnp.where(is_lost[:, None, None], jnp.nan, output)


def _absent_pages(cache, page_table, kv_lengths, query_starts, left: int | None):
    """Which entries of a page table are read in a call, and are no pages: `[sequences, M]`."""
    start = np.arange(page_table.shape[1]) * cache.page_size
    is_read = start < kv_lengths[:, None]
    if left is not None:
        first_query = kv_lengths - (query_starts[1:] - query_starts[:-1])
        is_read &= start + cache.page_size > first_query[:, None] - left
    return is_read & ((page_table < 0) | (page_table >= cache.num_pages))


@jax.custom_jvp
def _not_differentiable(tree):
    return tree


@_not_differentiable.defjvp
def _refuse_derivative(primals, tangents):
    raise NotImplementedError(
        "paged_attention is not differentiable; use dot_product_attention for training."
    )


def _choose(query, cache, page_table, logits, implementation) -> Implementation | None:
    """The implementation that takes the call; None where the platform decides."""
    if implementation in ("reference", "xla"):
        return implementation
    if implementation not in (None, "pallas"):
        raise ValueError(
            f"implementation={implementation!r} is not known; use None or one of {IMPLEMENTATIONS}."
        )
    reasons = reasons_against(query, cache.pages, page_table, logits)
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_names, mesh.axis_sizes, mesh.axis_types, strict=True)
    unplaced = [name for name, size, kind in axes if size > 1 and kind != AxisType.Manual]
    if unplaced:
        reasons.append(f"XLA cannot split the kernel over the mesh axes {unplaced}: use shard_map")
    if not reasons:
        return implementation
    refusal = f"The paged Pallas kernel cannot take this call: {'; '.join(reasons)}."
    if implementation == "pallas":
        raise NotImplementedError(f'{refusal} Change that, or use implementation="xla".')
    if tpu_kind() is not None:
        warn(f'{refusal} implementation="xla" does.')
    return "xla"


def _kernel(query, cache, *, logits, **arguments) -> jax.Array:
    return kernel.attend(
        query,
        cache.pages,
        value_start=cache.value_start,
        value_dim=cache.value_head_dim,
        logits=logits,
        **arguments,
    )


def _by_platform(query, cache, **arguments) -> jax.Array:
    return jax.lax.platform_dependent(
        query,
        cache,
        tpu=functools.partial(_kernel, **arguments),
        default=functools.partial(gather.attend_blockwise, **arguments),
    )


def _per_head(name: str, array: jax.Array, query: jax.Array) -> jax.Array:
    array = as_array(array, name)
    if array.shape != (query.shape[1],):
        raise ValueError(
            f"{name} has shape {array.shape}; expected one per query head, ({query.shape[1]},)."
        )
    return jnp.asarray(array, jnp.promote_types(query.dtype, jnp.float32))


def _check_shapes(query, cache, key, value, page_table, kv_lengths, query_starts) -> None:
    if query.ndim != 3 or query.shape[0] < 1:
        raise ValueError(
            f"query has shape {query.shape}; expected [tokens, N, H], the tokens (at least "
            "one) of all sequences one after another."
        )
    tokens, heads, head_dim = query.shape
    if head_dim != cache.head_dim:
        raise ValueError(
            f"query has head size {head_dim} and the cache's keys {cache.head_dim}; they must be "
            "equal."
        )
    if heads < 1 or heads % cache.num_kv_heads:
        raise ValueError(
            f"query has {heads} heads; a multiple of the cache's {cache.num_kv_heads} key/value "
            "heads is expected."
        )
    if query.dtype != cache.dtype:
        raise ValueError(
            f"query has dtype {query.dtype} and the cache {cache.dtype}; cast the query, or create "
            f"the cache with dtype={query.dtype}."
        )
    if (key is None) != (value is None):
        raise ValueError("key and value must be given together, or neither.")
    if key is not None and key.shape[0] != tokens:
        raise ValueError(f"query has {tokens} tokens and key {key.shape[0]}; they must be equal.")
    if page_table.ndim != 2 or page_table.size < 1:
        raise ValueError(
            f"page_table has shape {page_table.shape}; expected [sequences, pages per sequence], "
            "at least one of each."
        )
    sequences = page_table.shape[0]
    if kv_lengths.shape != (sequences,):
        raise ValueError(
            f"kv_lengths has shape {kv_lengths.shape}; expected ({sequences},), one per row of "
            "page_table."
        )
    if query_starts.shape != (sequences + 1,):
        raise ValueError(
            f"query_starts has shape {query_starts.shape}; expected ({sequences + 1},): the first "
            "token of each sequence, and the end of the last."
        )
    for name, array in (
        ("page_table", page_table),
        ("kv_lengths", kv_lengths),
        ("query_starts", query_starts),
    ):
        if not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"{name} has dtype {array.dtype}; integers are expected.")


def _check_values(tokens, cache, layer, page_table, kv_lengths, query_starts, left) -> None:
    """Checks what is known: everything outside jit, nothing inside."""
    if _is_known(layer) and not 0 <= int(layer) < cache.num_layers:
        raise ValueError(f"layer={layer} is not one of the cache's {cache.num_layers} layers.")
    starts = _integers(query_starts) if _is_known(query_starts) else None
    if starts is not None and (
        starts[0] != 0 or (np.diff(starts) < 0).any() or starts[-1] > tokens
    ):
        raise ValueError(
            f"query_starts={starts.tolist()} must start at 0, never fall, and end at or before the "
            f"number of query tokens, {tokens}."
        )
    if not _is_known(kv_lengths):
        return
    lengths = _integers(kv_lengths)
    capacity = page_table.shape[1] * cache.page_size
    if lengths.max(initial=0) > capacity:
        sequence = int(lengths.argmax())
        raise ValueError(
            f"kv_lengths[{sequence}]={lengths[sequence]} is beyond what a row of page_table holds, "
            f"{page_table.shape[1]} pages of {cache.page_size} tokens = {capacity}. Widen "
            "page_table and allocate pages for it, or stop the sequence."
        )
    if starts is not None:
        short = np.flatnonzero(lengths < np.diff(starts))
        if short.size:
            sequence = int(short[0])
            raise ValueError(
                f"kv_lengths[{sequence}]={lengths[sequence]} counts this call's tokens too, and is "
                f"below their number, {starts[sequence + 1] - starts[sequence]} by query_starts."
            )
    if starts is not None and _is_known(page_table):
        table = _integers(page_table)
        wrong = np.argwhere(_absent_pages(cache, table, lengths, starts, left))
        if wrong.size:
            row, column = wrong[0].tolist()
            raise ValueError(
                f"page_table[{row}, {column}]={table[row, column]} is not a page of the cache, "
                f"which has {cache.num_pages}, and kv_lengths[{row}]={lengths[row]} reaches it."
            )


def _check_places(page_size, page_table, kv_lengths, query_starts) -> None:
    """Checks that no two tokens of a call are to be written to one place."""
    counts = np.diff(query_starts)
    sequence = np.repeat(np.arange(len(counts)), counts)
    token = np.arange(len(sequence))
    position = token + (kv_lengths - query_starts[1:])[sequence]
    page = page_table[sequence, position // page_size]
    places, first = np.unique(page * page_size + position % page_size, return_index=True)
    if len(places) < len(token):
        again = np.setdiff1d(token, first)[0]
        raise ValueError(
            f"page_table puts two tokens of this call in one place: token {again}, of sequence "
            f"{sequence[again]}, in slot {position[again] % page_size} of page {page[again]}, "
            "which holds another token already. A page that is written belongs to one sequence, "
            "once."
        )


def _integers(x) -> np.ndarray:
    return np.asarray(x, np.int64)  # of which differences are signed


def _is_known(*arrays) -> bool:
    return not any(isinstance(x, Tracer) for x in arrays)
