"""What every implementation of `paged_attention` must pass: cases, and the truth for them.

The truth knows no pages: plain float64 numpy over each sequence's own keys and values.
All else in the cache holds NaN.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from flax_pallas_attn.logits import Alibi
from flax_pallas_attn.paged import PageAllocator, PagedKVCache

# Largest error as a share of the largest value. Rounding alone gives at most a third of these.
TOLERANCE = {"float64": 1e-13, "float32": 1.5e-6, "bfloat16": 1.5e-2}
LAYER = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call: sequence s has `lengths[s]` tokens, the last `counts[s]` of them in the call."""

    name: str
    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    value_head_dim: int | None = None
    page_size: int = 8
    table_pages: int = 8
    dtype: str = "float32"
    padding: int = 3
    window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False
    has_alibi: bool = False


class Call(NamedTuple):
    query: jax.Array
    cache: PagedKVCache
    arguments: dict[str, Any]


CASES = (
    Case(name="decode", counts=(1, 1, 1), lengths=(17, 1, 63)),
    Case(
        name="prompt, draft, decodes, an idle and an empty sequence in one call",
        counts=(1, 300, 5, 0, 0, 1),
        lengths=(33, 340, 5, 20, 0, 64),
        head_dim=64,
        page_size=16,
        table_pages=24,
    ),
    Case(
        name="one key/value head",
        counts=(4, 1, 16),
        lengths=(60, 16, 16),
        heads=8,
        kv_heads=1,
        head_dim=128,
        dtype="bfloat16",
    ),
    Case(
        name="three key/value heads, values of another size, pages of 32",
        counts=(5, 8),
        lengths=(45, 70),
        heads=15,
        kv_heads=3,
        head_dim=80,
        value_head_dim=48,
        page_size=32,
    ),
    Case(
        name="head size 256, one page of 256",
        counts=(2, 1),
        lengths=(100, 256),
        kv_heads=4,
        head_dim=256,
        page_size=256,
        table_pages=1,
        dtype="bfloat16",
    ),
    Case(
        name="window and soft cap",
        counts=(1, 20, 2),
        lengths=(60, 40, 9),
        window=10,
        soft_cap=2.0,
        padding=0,
    ),
    Case(name="sinks", counts=(1, 9), lengths=(20, 9), has_sinks=True, window=4),
    Case(name="ALiBi", counts=(1, 9), lengths=(20, 9), has_alibi=True),
    Case(
        name="ALiBi and sinks, a group of three",
        counts=(1, 0, 40),
        lengths=(60, 0, 64),
        heads=6,
        has_alibi=True,
        has_sinks=True,
        soft_cap=3.0,
    ),
)
XLA_CASES = (
    Case(name="pages of 5, of which blocks are not made", counts=(3,), lengths=(40,), page_size=5),
)


def make_call(case: Case, seed: int = 0, spare_pages: int = 3) -> tuple[Call, np.ndarray]:
    """Draws a case's arrays, and what its output must be, `[tokens, N, Hv]` float64.

    Pages lie scattered; `spare_pages` of them belong to nobody.
    """
    rng = np.random.default_rng(seed)
    value_dim = case.value_head_dim or case.head_dim
    sequences = len(case.counts)
    tokens = sum(case.counts) + case.padding
    num_pages = sum(-(-length // case.page_size) for length in case.lengths) + spare_pages

    def draw(*shape):
        return rng.standard_normal(shape).astype(jnp.dtype(case.dtype))

    query = draw(tokens, case.heads, case.head_dim)
    key = np.full((tokens, case.kv_heads, case.head_dim), np.nan, query.dtype)
    value = np.full((tokens, case.kv_heads, value_dim), np.nan, query.dtype)
    create = functools.partial(
        PagedKVCache.create,
        num_layers=2,
        num_pages=num_pages,
        page_size=case.page_size,
        num_kv_heads=case.kv_heads,
        head_dim=case.head_dim,
        value_head_dim=value_dim,
        dtype=case.dtype,
    )
    cache = jax.eval_shape(create)
    pages = np.full(cache.pages.shape, np.nan, query.dtype)
    page_table = np.full((sequences, case.table_pages), num_pages - 1, np.int32)
    scattered = rng.permutation(num_pages)
    allocator = PageAllocator(num_pages, case.page_size)
    starts = np.cumsum([0, *case.counts]).astype(np.int32)
    sinks = draw(case.heads).astype(np.float32) if case.has_sinks else None
    slopes = np.abs(draw(case.heads)).astype(np.float32) if case.has_alibi else None
    expected = np.zeros((tokens, case.heads, value_dim))
    for s, (count, length) in enumerate(zip(case.counts, case.lengths, strict=True)):
        row = scattered[allocator.grow([], length)]
        page_table[s, : len(row)] = row
        keys = draw(length, case.kv_heads, case.head_dim)
        values = draw(length, case.kv_heads, value_dim)
        for t in range(length - count):
            page, slot = row[t // case.page_size], t % case.page_size
            pages[LAYER, page, :, slot, : case.head_dim] = keys[t]
            first = cache.value_start
            pages[LAYER, page, :, slot, first : first + value_dim] = values[t]
            # Lanes that hold nothing: a cache is created with zeros there.
            pages[LAYER, page, :, slot, case.head_dim : first] = 0
            pages[LAYER, page, :, slot, first + value_dim :] = 0
        own = slice(starts[s], starts[s + 1])
        key[own], value[own] = keys[length - count :], values[length - count :]
        if count:
            expected[own] = _attend(case, query[own], keys, values, length - count, sinks, slopes)
    arguments = {
        "key": jnp.asarray(key),
        "value": jnp.asarray(value),
        "layer": LAYER,
        "page_table": jnp.asarray(page_table),
        "kv_lengths": jnp.asarray(case.lengths, jnp.int32),
        "query_starts": jnp.asarray(starts),
        "local_window_size": case.window,
        "logits_soft_cap": case.soft_cap,
        "sinks": None if sinks is None else jnp.asarray(sinks),
        "bias": None if slopes is None else Alibi(jnp.asarray(slopes)),
    }
    cache = dataclasses.replace(cache, pages=jnp.asarray(pages))
    return Call(jnp.asarray(query), cache, arguments), expected


def _attend(case, query, keys, values, offset, sinks, slopes) -> np.ndarray:
    """Attention of one sequence's last tokens, token by token and head by head."""
    query, keys, values = (np.asarray(x, np.float64) for x in (query, keys, values))
    output = np.empty((*query.shape[:2], values.shape[-1]))
    for i, n in np.ndindex(query.shape[:2]):
        position = offset + i
        first = 0 if case.window is None else max(0, position - case.window)
        seen, head = slice(first, position + 1), n // (case.heads // case.kv_heads)
        scores = keys[seen, head] @ query[i, n] / np.sqrt(case.head_dim)
        if case.soft_cap is not None:
            scores = case.soft_cap * np.tanh(scores / case.soft_cap)
        if slopes is not None:
            scores -= float(slopes[n]) * (position - np.arange(first, position + 1))
        weights = np.exp(scores)
        total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[n])))
        output[i, n] = weights @ values[seen, head] / total
    return output


def check(attend: Callable[..., Any], case: Case, seed: int = 0) -> None:
    """Fails where `attend`, called like `paged_attention`, is wrong on `case`."""
    call, expected = make_call(case, seed)
    output, cache = attend(call.query, call.cache, **call.arguments)
    assert output.dtype == call.query.dtype
    assert cache.pages.shape == call.cache.pages.shape
    output = np.asarray(output, np.float64)
    assert_close(output, expected, case.dtype)
    padding = output[sum(case.counts) :]
    np.testing.assert_array_equal(padding, np.zeros_like(padding))


def assert_close(output, expected, dtype: str) -> None:
    error = np.abs(np.asarray(output, np.float64) - expected).max() / np.abs(expected).max()
    assert error <= TOLERANCE[dtype], f"error {error:.2e} of the largest value"
