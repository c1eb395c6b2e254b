"""The paged kernel by itself: ragged calls by the hundred, copies, races, and compiling for TPU."""

import collections
import functools
import itertools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn import Alibi, aot
from flax_pallas_attn.kernels import paged
from flax_pallas_attn.kernels.paged_tiles import PagedTiles
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask
from flax_pallas_attn.paged import PagedKVCache, paged_attention
from tests.paged_conformance import Case, assert_close, make_call

SMALL_TILES = PagedTiles(query_tokens=32, tile_tokens=16, block_pages=2)
SEQUENCES, TABLE_PAGES, PAGE_SIZE, TOKENS = 4, 9, 8, 96


@functools.partial(jax.jit, static_argnames=("window", "tiles"))
def attend(call, *, window=None, tiles=SMALL_TILES):
    """The kernel, with tiles so small that every loop of it turns."""
    query, cache, arguments = call
    tables = {name: arguments[name] for name in ("page_table", "kv_lengths", "query_starts")}
    cache = cache.write(arguments["key"], arguments["value"], layer=arguments["layer"], **tables)
    return paged.attend(
        query,
        cache.pages,
        value_start=cache.value_start,
        value_dim=cache.value_head_dim,
        layer=arguments["layer"],
        **tables,
        mask=Mask(lower=0, upper=window),
        logits=Logits(),
        scale=query.shape[-1] ** -0.5,
        tiles=tiles,
    )


def traced(call):
    names = ("key", "value", "layer", "page_table", "kv_lengths", "query_starts")
    return call._replace(arguments={name: call.arguments[name] for name in names})


@st.composite
def ragged_cases(draw, window):
    """Any split of at most `TOKENS` queries among sequences, each of any length."""
    counts, left = [], TOKENS
    for _ in range(SEQUENCES):
        counts.append(draw(st.sampled_from([0, 1, 1, 2, 5, 16, 17, 31, 64])))
        counts[-1] = min(counts[-1], left)
        left -= counts[-1]
    lengths = [draw(st.integers(count, TABLE_PAGES * PAGE_SIZE)) for count in counts]
    return ragged_case(counts, lengths, window)


def ragged_case(counts, lengths, window):
    return Case(
        name="ragged",
        counts=tuple(counts),
        lengths=tuple(lengths),
        heads=6,
        page_size=PAGE_SIZE,
        table_pages=TABLE_PAGES,
        padding=TOKENS - sum(counts),
        window=window,
    )


def check_drawn(case, seed):
    used = sum(-(-length // case.page_size) for length in case.lengths)
    spare = SEQUENCES * TABLE_PAGES + 3 - used  # one size of cache: one compilation serves all
    call, expected = make_call(case, seed, spare)
    output = attend(traced(call), window=case.window)
    if sum(case.counts):
        assert_close(output, expected, case.dtype)
    np.testing.assert_array_equal(output[sum(case.counts) :], 0)


@pytest.mark.parametrize(("window", "edges"), [(None, (15, 16, 17, 31)), (20, (36, 37, 38, 39))])
def test_any_ragged_call(window, edges, interpret):
    # Decodes whose last key, or whose window's first, lies beside an edge of a block of 16 keys.
    @hypothesis.example(ragged_case((1, 1, 1, 1), edges, window), 0)
    @hypothesis.given(ragged_cases(window), st.integers(0, 1000))
    @hypothesis.settings(max_examples=7)
    def run(case, seed):
        check_drawn(case, seed)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("window", [None, 1, 11, 20])
def test_any_ragged_call_by_the_hundred(window, interpret):
    @hypothesis.given(ragged_cases(window), st.integers(0, 1000))
    @hypothesis.settings(max_examples=150)
    def run(case, seed):
        check_drawn(case, seed)

    run()


RAGGED = Case(
    name="ragged", counts=(1, 40, 5, 0, 1), lengths=(33, 60, 5, 20, 64), heads=6, table_pages=8
)


def test_no_races():
    call, expected = make_call(RAGGED)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        output = attend(traced(call))
    assert_close(output, expected, "float32")
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    assert not interpret_pallas_call.races.races_found


def test_reads_only_the_pages_that_window_and_length_allow(monkeypatch, interpret):
    """CASES.md 27: a window of 128 in a context of 8k, counted as the copies are started."""
    started = collections.Counter()
    make_async_copy = pltpu.make_async_copy

    class CountedCopy:
        def __init__(self, source, target, semaphore):
            self.page = source.transforms[-1].indices[1]
            self.copy = make_async_copy(source, target, semaphore)
            self.wait = self.copy.wait

        def start(self):
            jax.debug.callback(lambda page: started.update([int(page)]), self.page)
            self.copy.start()

    monkeypatch.setattr(paged.pltpu, "make_async_copy", CountedCopy)
    case = Case(
        name="8k", counts=(1, 1), lengths=(8191, 20), page_size=16, table_pages=512, window=127
    )
    call, expected = make_call(case)
    output = attend(traced(call), window=case.window, tiles=None)
    jax.effects_barrier()
    assert_close(output, expected, "float32")
    table = np.asarray(call.arguments["page_table"])
    live = [*table[0, -9:].tolist(), *table[1, :2].tolist()]  # 128 / 16 + 1 pages, and all of 20
    assert started == collections.Counter(live)


@pytest.mark.parametrize(("window", "keys", "pages"), [(None, 320, 20), (99, 100, 8)])
def test_cost_is_arithmetic(window, keys, pages):
    """4 decodes, 20 pages each: every page once, or those that a window of 100 can touch."""
    query = jax.ShapeDtypeStruct((4, 8, 64), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((2, 100, 2, 16, 128), jnp.bfloat16)
    table = jax.ShapeDtypeStruct((4, 20), jnp.int32)
    cost = paged.cost(query, cache, table, Mask(lower=0, upper=window), 64)
    assert cost.flops == 2 * 4 * 8 * keys * (64 + 64)
    assert cost.transcendentals == 4 * 8 * keys
    page_bytes = 2 * 16 * 128 * 2
    assert cost.bytes_accessed == 4 * pages * page_bytes + 2 * 4 * 8 * 64 * 2


def compile_call(
    *,
    topology,
    sequences=4,
    tokens,
    heads=8,
    kv_heads=1,
    head_dim=128,
    value_head_dim=None,
    page_size=16,
    table_pages=32,
    dtype="bfloat16",
    **options,
):
    """Compiles a call of the public function, its cache of 128k tokens donated."""
    cache = jax.eval_shape(
        lambda: PagedKVCache.create(
            num_layers=2,
            num_pages=(1 << 17) // page_size,
            page_size=page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            value_head_dim=value_head_dim,
            dtype=dtype,
        )
    )

    def call(cache, query, key, value, page_table, kv_lengths, query_starts):
        return paged_attention(
            query,
            cache,
            key=key,
            value=value,
            layer=1,
            page_table=page_table,
            kv_lengths=kv_lengths,
            query_starts=query_starts,
            **options,
        )

    program = aot.compile_for_tpu(
        jax.jit(call, donate_argnums=0),
        cache,
        jax.ShapeDtypeStruct((tokens, heads, head_dim), dtype),
        jax.ShapeDtypeStruct((tokens, kv_heads, head_dim), dtype),
        jax.ShapeDtypeStruct((tokens, kv_heads, value_head_dim or head_dim), dtype),
        jax.ShapeDtypeStruct((sequences, table_pages), jnp.int32),
        jax.ShapeDtypeStruct((sequences,), jnp.int32),
        jax.ShapeDtypeStruct((sequences + 1,), jnp.int32),
        topology=topology,
    )
    assert program.kernels == ("paged_attention",)
    cache_bytes = cache.pages.size * cache.dtype.itemsize
    assert program.alias_bytes == cache_bytes
    # Nothing of the size of a layer: queries and outputs, padded and laid out for the kernel.
    padded = 8 * (tokens + 256) * max(heads, 8) * 256 * jnp.dtype(dtype).itemsize
    assert program.temporary_bytes < padded
    return program


HEADS = ((8, 1), (32, 8))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
@pytest.mark.parametrize(
    ("count", "heads", "page_size"),
    [
        (1, HEADS[0], 16),
        (4, HEADS[1], 128),
        (5, HEADS[0], 128),
        (8, HEADS[1], 16),
        (16, HEADS[0], 16),
    ],
)
def test_compiles_for_every_generation(topology, count, heads, page_size):
    """CASES.md 21: `count` query tokens for each of 4 sequences."""
    compile_call(
        topology=topology,
        tokens=4 * count,
        heads=heads[0],
        kv_heads=heads[1],
        page_size=page_size,
    )


SHAPES = {
    "head size 64, pages of 8": {"head_dim": 64, "page_size": 8, "heads": 8, "kv_heads": 2},
    "head size 80, 3 key/value heads, pages of 32": {
        "head_dim": 80,
        "page_size": 32,
        "heads": 15,
        "kv_heads": 3,
    },
    "head size 256, pages of 256": {"head_dim": 256, "page_size": 256, "heads": 6, "kv_heads": 3},
    "float32": {"heads": 32, "kv_heads": 8, "page_size": 128, "dtype": "float32"},
    "float32, pages of 8": {
        "head_dim": 80,
        "heads": 9,
        "kv_heads": 3,
        "page_size": 8,
        "dtype": "float32",
    },
    "values of another size, window, soft cap": {
        "head_dim": 192,
        "value_head_dim": 128,
        "heads": 6,
        "kv_heads": 2,
        "local_window_size": 100,
        "logits_soft_cap": 30.0,
    },
    "ALiBi and sinks, a group of three": {
        "heads": 24,
        "kv_heads": 8,
        "bias": Alibi(np.ones(24, np.float32)),
        "sinks": np.ones(24, np.float32),
    },
    "32 key/value heads": {"heads": 32, "kv_heads": 32, "page_size": 128},
    "2048 queries on 32k": {
        "sequences": 1,
        "tokens": 2048,
        "table_pages": 2048,
    },
}


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", SHAPES)
def test_compiles_for_any_shape(name):
    """CASES.md 24 and 25."""
    compile_call(**{"topology": "v5e", "tokens": 40, **SHAPES[name]})


@pytest.mark.slow
@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
def test_compiles_every_shape_for_every_generation(topology):
    for name in SHAPES:
        compile_call(**{"topology": topology, "tokens": 40, **SHAPES[name]})
    for count, heads, page_size in itertools.product((1, 4, 5, 8, 16), HEADS, (16, 128)):
        compile_call(
            topology=topology,
            sequences=16,
            tokens=16 * count,
            heads=heads[0],
            kv_heads=heads[1],
            page_size=page_size,
        )
