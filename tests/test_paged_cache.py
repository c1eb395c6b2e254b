"""The paged cache: where tokens land, what writes nothing, and that nothing is copied."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn import aot
from flax_pallas_attn.paged import PagedKVCache
from flax_pallas_attn.paged.cache import token_places

SIZES = {"num_layers": 2, "num_pages": 8, "page_size": 4, "num_kv_heads": 3, "head_dim": 16}
TABLES = {
    # Sequence 0 is idle; 1 has 6 tokens, 3 of them new; 2 has 9 tokens in a table of 8.
    "page_table": jnp.array([[0, 1], [5, 2], [7, 3]]),
    "kv_lengths": jnp.array([4, 6, 9]),
    "query_starts": jnp.array([0, 0, 3, 5]),
}


def new_tokens(tokens, kv_heads=3, head_dim=16, value_head_dim=16, dtype="float32"):
    rng = np.random.default_rng(0)
    return tuple(
        jnp.asarray(rng.standard_normal((tokens, kv_heads, size)), dtype)
        for size in (head_dim, value_head_dim)
    )


@pytest.mark.parametrize(
    ("head_dim", "value_head_dim", "value_start", "lanes"),
    [
        (16, 16, 16, 128),
        (64, 64, 64, 128),
        (80, 80, 128, 256),
        (128, 128, 128, 256),
        (192, 128, 256, 384),
        (256, 256, 256, 512),
        (96, 32, 96, 128),
    ],
)
def test_keys_and_values_share_lanes_where_both_fit(head_dim, value_head_dim, value_start, lanes):
    cache = PagedKVCache.create(**{**SIZES, "head_dim": head_dim}, value_head_dim=value_head_dim)
    assert cache.pages.shape == (2, 8, 3, 4, lanes)
    assert cache.value_start == value_start
    assert cache.dtype == jnp.bfloat16
    assert (cache.num_layers, cache.num_pages, cache.num_kv_heads, cache.page_size) == (2, 8, 3, 4)
    assert cache.capacity_tokens == 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_pages": 0}, "num_pages=0 must be at least 1"),
        ({"value_head_dim": -1}, "value_head_dim=-1 must be at least 1"),
        ({"dtype": "int8"}, "dtype=int8 must be a floating-point type"),
    ],
)
def test_a_wrong_size_says_so(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        PagedKVCache.create(**{**SIZES, **changes})


def test_token_places():
    sequence, position = token_places(7, TABLES["kv_lengths"], TABLES["query_starts"])
    np.testing.assert_array_equal(sequence[:5], [1, 1, 1, 2, 2])
    np.testing.assert_array_equal(position, [3, 4, 5, 7, 8, -1, -1])


@pytest.mark.parametrize("sizes", [(16, 16), (80, 48)])
def test_tokens_land_in_their_pages_and_nowhere_else(sizes):
    key, value = new_tokens(7, head_dim=sizes[0], value_head_dim=sizes[1])
    sizes_of_both = {**SIZES, "head_dim": sizes[0], "value_head_dim": sizes[1]}
    cache = PagedKVCache.create(**sizes_of_both, dtype="float32")
    cache = cache.write(key, value, layer=1, **TABLES)
    # Token 4 lies beyond its table, tokens 5 and 6 are padding.
    for token, page, slot in ((0, 5, 3), (1, 2, 0), (2, 2, 1), (3, 3, 3)):
        keys, values = cache.read(1, jnp.array([page]))
        np.testing.assert_array_equal(keys[:, slot], key[token])
        np.testing.assert_array_equal(values[:, slot], value[token])
    written = np.asarray(cache.pages != 0).any(axis=(2, 4))
    assert written.sum() == 4
    assert not written[0].any()


def test_read_joins_pages_in_order():
    pages = jnp.arange(2 * 8 * 3 * 4 * 128, dtype=jnp.float32).reshape(2, 8, 3, 4, 128)
    cache = PagedKVCache(pages=pages, head_dim=16, value_head_dim=8)
    keys, values = cache.read(1, jnp.array([[5, 2], [99, -1]]))
    assert keys.shape == (2, 3, 8, 16)
    for row, ids in enumerate(((5, 2), (7, 0))):
        joined = jnp.concatenate([pages[1, i] for i in ids], axis=1)
        np.testing.assert_array_equal(keys[row], joined[..., :16])
        np.testing.assert_array_equal(values[row], joined[..., 16:24])


def test_overflows():
    cache = PagedKVCache.create(**SIZES)
    full = jax.jit(cache.overflows)(TABLES["page_table"], TABLES["kv_lengths"])
    np.testing.assert_array_equal(full, [False, False, True])


@pytest.mark.parametrize("page_id", [8, -1])
def test_a_page_that_does_not_exist_is_not_written(page_id):
    key, value = new_tokens(1)
    cache = PagedKVCache.create(**SIZES, dtype="float32")
    cache = jax.jit(PagedKVCache.write)(
        cache,
        key,
        value,
        page_table=jnp.array([[page_id]]),
        kv_lengths=jnp.array([1]),
        query_starts=jnp.array([0, 1]),
    )
    assert not cache.pages.any()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_heads": 2}, "key has shape (5, 2, 16); expected [tokens, K, head size] = (5, 3, 16)"),
        ({"value_head_dim": 8}, "value has shape (5, 3, 8); expected"),
        ({"dtype": "bfloat16"}, "key has dtype bfloat16 and the cache float32"),
    ],
)
def test_tokens_that_do_not_fit_the_cache(changes, message):
    key, value = new_tokens(5, **changes)
    cache = PagedKVCache.create(**SIZES, dtype="float32")
    with pytest.raises(ValueError, match=re.escape(message)):
        cache.write(key, value, **TABLES)


def abstract_write(tokens, dtype, num_pages):
    create = functools.partial(
        PagedKVCache.create,
        num_layers=2,
        num_pages=num_pages,
        page_size=16,
        num_kv_heads=8,
        head_dim=128,
        dtype=dtype,
    )
    rows = jax.ShapeDtypeStruct((tokens, 8, 128), dtype)
    tables = {
        "page_table": jax.ShapeDtypeStruct((4, 64), jnp.int32),
        "kv_lengths": jax.ShapeDtypeStruct((4,), jnp.int32),
        "query_starts": jax.ShapeDtypeStruct((5,), jnp.int32),
    }
    layer = jax.ShapeDtypeStruct((), jnp.int32)
    arguments = (jax.eval_shape(create), rows, rows, layer, tables)

    def write(cache, key, value, layer, tables):
        return cache.write(key, value, layer=layer, **tables)

    return jax.jit(write, donate_argnums=0), arguments


def test_a_donated_cache_is_written_in_place():
    write, arguments = abstract_write(tokens=64, dtype="float32", num_pages=256)
    memory = write.lower(*arguments).compile().memory_analysis()
    assert memory.alias_size_in_bytes == arguments[0].pages.size * 4
    assert memory.temp_size_in_bytes < memory.alias_size_in_bytes // 16


@pytest.mark.tpu_compile
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, "bfloat16"), (16, "float32"), (512, "bfloat16"), (2048, "bfloat16")]
)
def test_a_donated_cache_is_written_in_place_on_tpu(tokens, dtype):
    write, arguments = abstract_write(tokens, dtype, num_pages=4096)
    program = aot.compile_for_tpu(write, *arguments, topology="v5e")
    cache_bytes = arguments[0].pages.size * jnp.dtype(dtype).itemsize
    assert program.alias_bytes == cache_bytes
    assert program.temporary_bytes < cache_bytes // 64


def test_whole_pages_are_copied_in_all_layers():
    cache = PagedKVCache.create(**SIZES, dtype="float32")
    pages = np.random.default_rng(0).standard_normal(cache.pages.shape).astype(np.float32)
    cache = dataclasses.replace(cache, pages=jnp.asarray(pages))
    copied = jax.jit(PagedKVCache.copy_pages)(cache, jnp.array([1, 6]), jnp.array([4, 0]))
    pages[:, [4, 0]] = pages[:, [1, 6]]
    np.testing.assert_array_equal(copied.pages, pages)
    absent = jnp.array([-1, 8, 3, 3])
    unchanged = cache.copy_pages(absent, absent[::-1])
    np.testing.assert_array_equal(unchanged.pages, cache.pages)
    none = cache.copy_pages(jnp.zeros(0, jnp.int32), jnp.zeros(0, jnp.int32))
    np.testing.assert_array_equal(none.pages, cache.pages)


@pytest.mark.parametrize("targets", [[1, 2], [[1]]])
def test_pages_are_copied_one_to_one(targets):
    cache = PagedKVCache.create(**SIZES)
    with pytest.raises(ValueError, match=r"sources has shape .* and targets .*; expected one page"):
        cache.copy_pages(jnp.zeros(1, jnp.int32), jnp.array(targets))


@pytest.mark.tpu_compile
def test_pages_of_a_donated_cache_are_copied_in_place_on_tpu():
    cache = jax.eval_shape(lambda: PagedKVCache.create(**{**SIZES, "num_pages": 4096}))
    ids = jax.ShapeDtypeStruct((16,), jnp.int32)
    copy = jax.jit(PagedKVCache.copy_pages, donate_argnums=0)
    program = aot.compile_for_tpu(copy, cache, ids, ids, topology="v5e")
    assert program.alias_bytes == cache.pages.size * 2
    assert program.temporary_bytes < program.alias_bytes // 64
