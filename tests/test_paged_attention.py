"""Paged attention through the public function: every implementation, wrong ones, wrong calls."""

import dataclasses
import functools
import re
from contextlib import nullcontext

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn import aot
from flax_pallas_attn.paged import PagedKVCache, paged_attention
from tests.paged_conformance import CASES, XLA_CASES, Case, check, make_call

IMPLEMENTATIONS = ("reference", "xla", "pallas")


def attention(implementation):
    return functools.partial(paged_attention, implementation=implementation)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_equals_attention_without_pages(implementation, case, interpret):
    check(attention(implementation), case)


@pytest.mark.parametrize("case", XLA_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_options_that_the_kernel_lacks(implementation, case):
    check(attention(implementation), case)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_runs_in_float64(implementation, x64):
    check(
        attention(implementation),
        Case(name="float64", counts=(3, 1), lengths=(20, 33), dtype="float64", has_sinks=True),
    )


write = jax.jit(PagedKVCache.write)


def by_sequence(change):
    """A wrong implementation: the tables that are read differ from the true ones."""

    def attend(query, cache, *, key, value, layer, local_window_size, **arguments):
        tables = {
            name: arguments.pop(name) for name in ("page_table", "kv_lengths", "query_starts")
        }
        cache = write(cache, key, value, layer=layer, **tables)
        changed = {**tables, "local_window_size": local_window_size, "layer": layer}
        changed |= change(**changed)
        return paged_attention(query, cache, **changed, **arguments, implementation="xla")

    return attend


def swap_first_pages(page_table, **_):
    return {"page_table": page_table.at[:, :2].set(page_table[:, 1::-1])}


def forget_to_write(query, cache, *, key, value, **arguments):
    return paged_attention(query, cache, **arguments, implementation="xla")


def leave_padding(query, cache, **arguments):
    output, cache = paged_attention(query, cache, **arguments, implementation="xla")
    stop = arguments["query_starts"][-1]
    return jnp.where((jnp.arange(len(output)) < stop)[:, None, None], output, 1), cache


SABOTAGED = {
    "leaked page": by_sequence(
        lambda page_table, **_: {"page_table": page_table.at[0, 0].set(page_table[1, 0])}
    ),
    "wrong page order": by_sequence(swap_first_pages),
    "causal mask off by one, later": by_sequence(
        lambda kv_lengths, **_: {"kv_lengths": kv_lengths + 1}
    ),
    "causal mask off by one, earlier": by_sequence(
        lambda kv_lengths, **_: {"kv_lengths": kv_lengths - 1}
    ),
    "window one too wide": by_sequence(
        lambda local_window_size, **_: {"local_window_size": local_window_size + 1}
    ),
    "window one too narrow": by_sequence(
        lambda local_window_size, **_: {"local_window_size": local_window_size - 1}
    ),
    "dropped key": by_sequence(lambda **_: {"local_window_size": 38}),
    "wrong layer": by_sequence(lambda layer, **_: {"layer": layer - 1}),
    "neighbour's queries": by_sequence(
        lambda query_starts, **_: {"query_starts": query_starts.at[1].add(-1)}
    ),
    "missing scale": functools.partial(paged_attention, scale=1.0, implementation="xla"),
    "missing soft cap": lambda query, cache, *, logits_soft_cap, **arguments: paged_attention(
        query, cache, **arguments, implementation="xla"
    ),
    "nothing written": forget_to_write,
    "padding that is not zero": leave_padding,
}
SABOTAGE_CASE = Case(
    name="window and soft cap", counts=(1, 20, 2), lengths=(60, 40, 9), window=10, soft_cap=2.0
)
FULL_CASE = Case(name="40 tokens", counts=(20, 2), lengths=(40, 9))


@pytest.mark.parametrize("name", SABOTAGED)
def test_suite_rejects_what_is_wrong(name):
    case = FULL_CASE if name in ("dropped key", "leaked page") else SABOTAGE_CASE
    check(attention("xla"), case)
    with pytest.raises(AssertionError):
        check(SABOTAGED[name], case)


def test_decoding_step_by_step_equals_the_prompt_at_once():
    """CASES.md 29, the cache's part: 5 tokens, then one by one."""
    call, expected = make_call(Case(name="", counts=(12,), lengths=(12,), padding=0))
    arguments = {"layer": 1, "page_table": call.arguments["page_table"]}
    step = jax.jit(functools.partial(paged_attention, **arguments), donate_argnums=1)
    outputs, cache, done = [], call.cache, 0
    for count in (5, *[1] * 7):
        now = slice(done, done + count)
        done += count
        output, cache = step(
            call.query[now],
            cache,
            key=call.arguments["key"][now],
            value=call.arguments["value"][now],
            kv_lengths=jnp.array([done]),
            query_starts=jnp.array([0, count]),
        )
        outputs.append(np.asarray(output))
    np.testing.assert_allclose(np.concatenate(outputs), expected, atol=5e-6)


def test_reads_alone_where_layers_share_a_cache():
    call, expected = make_call(Case(name="", counts=(2, 1), lengths=(20, 9), padding=0))
    _, cache = paged_attention(call.query, call.cache, **call.arguments)
    output, unchanged = paged_attention(
        call.query, cache, **{**call.arguments, "key": None, "value": None}
    )
    np.testing.assert_allclose(output, expected, atol=5e-6)
    assert unchanged.pages is cache.pages


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_layer_after_layer_copies_no_cache(implementation):
    create = functools.partial(
        PagedKVCache.create, num_layers=3, num_pages=1024, page_size=16, num_kv_heads=2, head_dim=64
    )
    cache = jax.eval_shape(create)

    def layers(cache, x, tables):
        for layer in range(3):
            x, cache = paged_attention(
                x,
                cache,
                key=x[:, :2],
                value=x[:, 2:],
                layer=layer,
                **tables,
                implementation=implementation,
            )
        return x, cache

    x = jax.ShapeDtypeStruct((2, 4, 64), jnp.bfloat16)
    lowered = jax.jit(layers, donate_argnums=0).lower(cache, x, tables((5, 12)))
    memory = lowered.compile().memory_analysis()
    cache_bytes = cache.pages.size * 2
    assert memory.alias_size_in_bytes == cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes // 16


@pytest.mark.parametrize("head_dim", [16, 72])  # key and value in the same 128 lanes, and not
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_what_is_masked_does_not_leak_and_what_is_not_does(implementation, head_dim, interpret):
    """A NaN in one token of a prompt: rows before it, and other sequences, are untouched."""
    call, expected = make_call(
        Case(name="", counts=(20, 1, 3), lengths=(20, 30, 9), head_dim=head_dim, padding=0)
    )
    for name in ("key", "value"):
        broken = call.arguments[name].at[7, 0, 3].set(jnp.inf if name == "value" else jnp.nan)
        output, _ = paged_attention(
            call.query,
            call.cache,
            **{**call.arguments, name: broken},
            implementation=implementation,
        )
        is_touched = np.zeros(expected.shape[:2], bool)
        is_touched[7:20, :2] = True  # the two query heads of key/value head 0
        np.testing.assert_allclose(output[~is_touched], expected[~is_touched], atol=5e-6)
        assert np.isnan(output[is_touched]).any(axis=-1).all()


def tables(lengths, table_pages=2):
    count = len(lengths)
    return {
        "page_table": jnp.arange(count * table_pages, dtype=jnp.int32).reshape(count, table_pages),
        "kv_lengths": jnp.array(lengths, jnp.int32),
        "query_starts": jnp.arange(count + 1, dtype=jnp.int32),
    }


def create_cache(*, page_size=8, num_kv_heads=2):
    return PagedKVCache.create(
        num_layers=1,
        num_pages=8,
        page_size=page_size,
        num_kv_heads=num_kv_heads,
        head_dim=16,
        dtype="float32",
    )


def decode(lengths=(5, 12), heads=4, kv_heads=2, head_dim=16, dtype="float32", **changes):
    """A call of one token for each sequence, with some arguments changed."""
    cache = create_cache(num_kv_heads=kv_heads)
    shape = (len(lengths), kv_heads, 16)
    arguments = {
        "query": jnp.ones((len(lengths), heads, head_dim), dtype),
        "cache": cache,
        "key": jnp.ones(shape),
        "value": jnp.ones(shape),
        **tables(lengths),
        **changes,
    }
    return paged_attention(arguments.pop("query"), arguments.pop("cache"), **arguments)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"query": jnp.ones((2, 4))},
            ValueError,
            "query has shape (2, 4); expected [tokens, N, H]",
        ),
        ({"head_dim": 8}, ValueError, "query has head size 8 and the cache's keys 16"),
        ({"heads": 3}, ValueError, "query has 3 heads; a multiple of the cache's 2 key/value"),
        ({"heads": 0}, ValueError, "query has 0 heads; a multiple of the cache's 2 key/value"),
        (
            {"page_table": [[0, 3], [1, 3]], "kv_lengths": [9, 9]},
            ValueError,
            "token 1, of sequence 1, in slot 0 of page 3",
        ),
        ({"logits_soft_cap": -5}, ValueError, "logits_soft_cap=-5 must be positive"),
        ({"local_window_size": 1.5}, ValueError, "local_window_size=1.5 must be an int or a pair"),
        ({"scale": 1j}, ValueError, "scale must be a number"),
        ({"layer": 1.0}, ValueError, "layer has dtype float32; integers are expected"),
        ({"layer": jnp.array([0])}, ValueError, "layer has shape (1,); one integer is expected"),
        ({"dtype": "bfloat16"}, ValueError, "query has dtype bfloat16 and the cache float32"),
        ({"key": None}, ValueError, "key and value must be given together"),
        ({"key": jnp.ones((1, 2, 16))}, ValueError, "query has 2 tokens and key 1"),
        ({"key": jnp.ones((2, 4, 16))}, ValueError, "key has shape (2, 4, 16); expected"),
        ({"value": jnp.ones((2, 2, 16), "bfloat16")}, ValueError, "value has dtype bfloat16"),
        ({"page_table": jnp.arange(4)}, ValueError, "page_table has shape (4,); expected"),
        ({"kv_lengths": jnp.array([5])}, ValueError, "kv_lengths has shape (1,); expected (2,)"),
        ({"query_starts": jnp.arange(2)}, ValueError, "query_starts has shape (2,); expected (3,)"),
        ({"kv_lengths": jnp.array([5.0, 12.0])}, ValueError, "kv_lengths has dtype float32"),
        ({"layer": 1}, ValueError, "layer=1 is not one of the cache's 1 layers"),
        ({"query_starts": jnp.array([0, 2, 1])}, ValueError, "query_starts=[0, 2, 1] must start"),
        ({"query_starts": jnp.array([0, 1, 3])}, ValueError, "the number of query tokens, 2"),
        ({"lengths": (5, 17)}, ValueError, "kv_lengths[1]=17 is beyond what a row of page_table"),
        ({"lengths": (0, 12)}, ValueError, "kv_lengths[0]=0 counts this call's tokens too"),
        (
            {"page_table": jnp.array([[0, 99], [1, 8]])},
            ValueError,
            "page_table[1, 1]=8 is not a page of the cache, which has 8",
        ),
        ({"local_window_size": -1}, ValueError, "local_window_size=-1 must be an int or a pair"),
        ({"sinks": jnp.ones(2)}, ValueError, "sinks has shape (2,); expected one per query head"),
        ({"implementation": "cuda"}, ValueError, "implementation='cuda' is not known"),
        ({"tree_mask": jnp.ones((2, 2))}, NotImplementedError, "tree_mask is not supported yet"),
        ({"logits_soft_cap": -1.0}, ValueError, "logits_soft_cap=-1.0 must be positive"),
        ({"page_table": [[0, 1], [2]]}, ValueError, "page_table=[[0, 1], [2]] is not an array"),
        ({"cache": None}, ValueError, "cache is a NoneType; pass a PagedKVCache"),
        ({"sharding": object()}, NotImplementedError, "sharding is not supported yet"),
        ({"bias": jnp.ones((4, 2))}, NotImplementedError, "only Alibi is"),
        (
            {"cache": create_cache(page_size=5), "lengths": (5, 9), "implementation": "pallas"},
            NotImplementedError,
            "kernel cannot take this call: page_size=5 is not a multiple of 8",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_wrong_call_says_what_is_wrong(changes, error, message):
    with pytest.raises(error, match=re.escape(message)):
        decode(**changes)


def test_lists_and_numpy_arrays_do_as_well():
    arguments = {name: np.asarray(array) for name, array in tables((5, 12)).items()}
    lists = {name: array.tolist() for name, array in arguments.items()}
    output, cache = decode(**lists)
    expected, _ = decode(**arguments)
    np.testing.assert_array_equal(output, expected)
    assert cache.overflows(lists["page_table"], [5, 17]).tolist() == [False, True]
    key = np.ones((2, 2, 16), np.float32)
    np.testing.assert_array_equal(cache.write(key, key, **lists).pages, cache.pages)


@pytest.mark.parametrize("implementation", [None, *IMPLEMENTATIONS])
def test_is_not_differentiable(implementation):
    def loss(query):
        return decode(query=query, implementation=implementation)[0].sum()

    for transform in (jax.grad(loss), lambda x: jax.jvp(loss, (x,), (x,))):
        with pytest.raises(
            NotImplementedError,
            match="paged_attention is not differentiable; use dot_product_attention for training",
        ):
            jax.eval_shape(transform, jnp.ones((2, 4, 16)))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_decoding_past_the_table_under_jit(implementation, interpret):
    """CASES.md 30: flagged, NaN, and nothing of anybody overwritten."""
    call, _ = make_call(Case(name="", counts=(1, 1), lengths=(16, 9), table_pages=2, padding=1))
    step = jax.jit(functools.partial(paged_attention, implementation=implementation, layer=1))
    arguments = {
        name: call.arguments[name] for name in ("key", "value", "page_table", "query_starts")
    }
    lengths = jnp.array([17, 9])
    output, cache = step(call.query, call.cache, kv_lengths=lengths, **arguments)
    full = cache.overflows(call.arguments["page_table"], lengths)
    np.testing.assert_array_equal(full, [True, False])
    assert np.isnan(output[0]).all()
    assert np.isfinite(output[1]).all()
    np.testing.assert_array_equal(output[2], 0)
    written = ~np.isclose(cache.pages, call.cache.pages, rtol=0, atol=0, equal_nan=True)
    page = int(call.arguments["page_table"][1, 1])
    assert set(zip(*np.nonzero(written.any(axis=(2, 4))), strict=True)) == {(1, page, 0)}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_traced_nonsense_stays_in_bounds(implementation, interpret):
    step = jax.jit(lambda arguments: decode(implementation=implementation, **arguments))
    for changes in (
        {"page_table": jnp.array([[99, -7], [-1, 1000]])},
        {"query_starts": jnp.array([0, 900, 1])},
        {"query_starts": jnp.array([-5, 1, 2])},
        {"kv_lengths": jnp.array([-3, 0])},
        {"kv_lengths": jnp.array([1 << 20, 12])},
        {"layer": jnp.int32(9)},
    ):
        arguments = {**tables((5, 12)), "layer": jnp.int32(0), **changes}
        output, cache = step(arguments)  # the interpreter raises on an access out of bounds
        assert output.shape == (2, 4, 16)
        assert np.isfinite(cache.pages).all()


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"page_table": jnp.array([[0, 77], [1, -1]])}, [False, True]),
        ({"page_table": jnp.array([[9, 77], [1, 2]])}, [True, False]),
        ({"page_table": jnp.array([[0, 77], [-1, 2]]), "local_window_size": 3}, [False, False]),
        ({"page_table": jnp.array([[0, 77], [-1, 2]]), "local_window_size": 4}, [False, True]),
        ({"layer": jnp.int32(-1)}, [True, True]),
        ({"layer": jnp.int32(1)}, [True, True]),
    ],
)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_pages_and_layers_that_do_not_exist_under_jit(implementation, changes, lost, interpret):
    """NaN for the tokens that would read them, and nothing is written elsewhere."""
    window = changes.get("local_window_size")
    step = _step(implementation, window)
    if implementation == "xla" and "page_table" in changes:  # what is NaN under jit raises outside
        with pytest.raises(ValueError, match="is not a page") if any(lost) else nullcontext():
            decode(implementation=implementation, **changes)
    arguments = {**tables((5, 12)), "layer": jnp.int32(0), **changes}
    arguments.pop("local_window_size", None)
    output, cache = step(arguments)
    np.testing.assert_array_equal(np.isnan(output).all((1, 2)), lost)
    np.testing.assert_array_equal(np.isnan(output).any((1, 2)), lost)
    if "layer" in changes:
        assert not cache.pages.any()


def test_known_arrays_inside_jit_are_checked_too():
    """What jax computes of them there is traced; what is checked must not be."""
    arguments, layers = tables((5, 12)), [jnp.int32(0), jnp.int32(1)]
    query = jnp.ones((2, 4, 16))
    jax.eval_shape(lambda x: decode(query=x, layer=layers[0], **arguments)[0], query)
    with pytest.raises(ValueError, match="layer=1 is not one"):
        jax.eval_shape(lambda x: decode(query=x, layer=layers[1], **arguments)[0], query)


@functools.cache
def _step(implementation, window):
    return jax.jit(
        lambda arguments: decode(
            implementation=implementation, local_window_size=window, **arguments
        )
    )


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_a_query_that_holds_nan_is_nan(implementation):
    call, expected = make_call(Case(name="", counts=(20,), lengths=(200,), table_pages=25))
    output, _ = paged_attention(
        call.query.at[7, :, 3].set(jnp.nan),
        call.cache,
        **call.arguments,
        implementation=implementation,
    )
    assert np.isnan(output[7]).all()
    np.testing.assert_allclose(np.delete(output, 7, 0), np.delete(expected, 7, 0), atol=5e-6)


@pytest.mark.parametrize(
    "changes",
    [
        {"page_table": [[0], [0]], "kv_lengths": [1, 1]},
        {"page_table": [[0, 0]], "kv_lengths": [16], "query_starts": [0, 16]},
    ],
)
def test_two_tokens_in_one_place(changes):
    """Refused where they are written; read alone, a page may be shared."""
    x = jnp.ones((16, 2, 16))
    cache = PagedKVCache.create(
        num_layers=1, num_pages=4, page_size=8, num_kv_heads=2, head_dim=16, dtype="float32"
    )
    arguments = {"query_starts": [0, 1, 2], **changes}
    with pytest.raises(ValueError, match="puts two tokens of this call in one place: token"):
        paged_attention(x, cache, key=x, value=x, **arguments)
    paged_attention(x, cache, **arguments)


def test_takes_the_kernel_where_it_is_compiled_for_tpu():
    call, _ = make_call(CASES[0])
    lowered = jax.jit(paged_attention, static_argnames="layer").trace(
        call.query, call.cache, **call.arguments
    )
    assert "tpu_custom_call" in lowered.lower(lowering_platforms=("tpu",)).as_text()
    assert "tpu_custom_call" not in lowered.lower(lowering_platforms=("cpu",)).as_text()


def test_pallas_is_for_tpu_alone():
    with pytest.raises(ValueError, match="Only interpret mode is supported on CPU"):
        decode(implementation="pallas")


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_shard_map_over_heads(implementation, check_vma, interpret):
    call, expected = make_call(Case(name="", counts=(1, 9), lengths=(20, 9), padding=0))
    mesh = jax.make_mesh((2,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,))
    heads = jax.P(None, "tensor")
    pages = dataclasses.replace(call.cache, pages=jax.P(None, None, "tensor"))
    names = ("page_table", "kv_lengths", "query_starts")

    def attend(query, cache, key, value, tables):
        return paged_attention(
            query,
            cache,
            key=key,
            value=value,
            layer=1,
            **dict(zip(names, tables, strict=True)),
            implementation=implementation,
        )

    output, cache = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=(heads, pages, heads, heads, jax.P()),
        out_specs=(heads, pages),
        check_vma=check_vma,
    )(
        call.query,
        call.cache,
        call.arguments["key"],
        call.arguments["value"],
        tuple(call.arguments[name] for name in names),
    )
    np.testing.assert_allclose(output, expected, atol=5e-6)
    assert cache.pages.shape == call.cache.pages.shape


@pytest.mark.tpu_compile
def test_warns_where_the_kernel_declines_on_tpu():
    call, _ = make_call(Case(name="", counts=(1,), lengths=(9,), page_size=5))
    arguments = {**call.arguments, "query": call.query, "cache": call.cache}
    del arguments["layer"], arguments["local_window_size"], arguments["logits_soft_cap"]

    def attend(arguments):
        return paged_attention(arguments.pop("query"), arguments.pop("cache"), **arguments)

    with pytest.warns(UserWarning, match="page_size=5 is not a multiple of 8") as caught:
        program = aot.compile_for_tpu(attend, arguments, topology="v5e")
    assert program.kernels == ()
    assert caught[0].filename == __file__  # it points at the caller, under jit too
