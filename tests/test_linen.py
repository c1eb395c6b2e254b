"""The Linen module against flax's own, and against the NNX module with the same parameters."""

import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

from flax_pallas_attn.attention import attention_fn
from flax_pallas_attn.linen import MultiHeadDotProductAttention
from flax_pallas_attn.masking import SegmentIds
from flax_pallas_attn.nnx import MultiHeadAttention
from flax_pallas_attn.rotary import Rotary

TOLERANCE = 1e-5  # float32, of the largest magnitude


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_close(got, expected):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=TOLERANCE * max(1, np.abs(b).max())
        ),
        got,
        expected,
    )


X, Y, Z = normal(2, 7, 12), normal(2, 9, 12, seed=1), normal(2, 9, 12, seed=2)
# Runs operation by operation: where the implementation does not matter, nothing has to be compiled.
PLAIN = {"implementation": "reference"}
SIZES = {"num_heads": 4, "qkv_features": 16, "out_features": 10}


def build(cls, **arguments):
    return cls(**SIZES | {"bias_init": linen.initializers.normal(1.0)} | arguments)


def causal(*shape):
    return linen.make_causal_mask(jnp.ones(shape))


def output_and_gradients(module, variables, inputs, **call):
    """Output, and gradients of its product with a fixed array in parameters and inputs."""

    @jax.jit
    def run(variables, inputs):
        def loss(variables, inputs):
            output = module.apply(variables, *inputs, **call)
            return jnp.vdot(output, normal(*output.shape, seed=9)), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(variables, inputs)

    return run(variables, inputs)


@pytest.mark.parametrize(
    ("arguments", "inputs", "call"),
    [
        pytest.param({}, [X], {}, id="self"),
        pytest.param({}, [X, Y, Z], {}, id="cross"),
        pytest.param({}, [X], {"mask": causal(2, 7)}, id="mask-float32"),
        pytest.param(
            {"normalize_qk": True, "use_bias": False},
            [X, Y],
            {"mask": (jnp.arange(9) < 5)[None, None, None]},
            id="normalized-bool-mask",
        ),
        pytest.param({}, [X[0]], {"mask": causal(7)}, id="no-batch"),
        pytest.param(
            {}, [normal(2, 3, 7, 12)], {"mask": causal(2, 3, 7)}, id="two-batch-dimensions"
        ),
    ],
)
def test_equals_flax_in_output_and_gradients(arguments, inputs, call):
    theirs = build(linen.MultiHeadDotProductAttention, **arguments)
    ours = build(MultiHeadDotProductAttention, **arguments)
    variables = theirs.init(jax.random.key(0), *inputs)
    mine = ours.init(jax.random.key(0), *inputs)
    jax.tree.map(np.testing.assert_array_equal, mine, variables)
    assert_close(
        output_and_gradients(ours, variables, inputs, **call),
        output_and_gradients(theirs, variables, inputs, **call),
    )


def test_fields_and_call_extend_those_of_flax():
    theirs, ours = (
        {field.name: field for field in dataclasses.fields(cls)}
        for cls in (linen.MultiHeadDotProductAttention, MultiHeadDotProductAttention)
    )
    positional = [name for name, field in theirs.items() if not field.kw_only]
    assert [name for name, field in ours.items() if not field.kw_only] == positional
    changed = {name for name in theirs if theirs[name].default != ours[name].default}
    assert changed == {"attention_fn"}
    theirs, ours = (
        inspect.signature(cls.__call__).parameters
        for cls in (linen.MultiHeadDotProductAttention, MultiHeadDotProductAttention)
    )
    assert list(ours)[: len(theirs)] == list(theirs)
    for name, parameter in ours.items():
        if name in theirs:
            assert (parameter.kind, parameter.default) == (theirs[name].kind, theirs[name].default)
        else:
            assert parameter.kind is parameter.KEYWORD_ONLY


def test_named_alike_inside_another_module():
    """An unnamed layer keeps its place in the parameters of the model around it."""

    class Model(linen.Module):
        attention: type

        @linen.compact
        def __call__(self, x):
            return x + self.attention(num_heads=4)(x)

    theirs = Model(linen.MultiHeadDotProductAttention)
    ours = Model(MultiHeadDotProductAttention)
    variables = theirs.init(jax.random.key(0), X)
    jax.tree.map(np.testing.assert_array_equal, ours.init(jax.random.key(0), X), variables)
    assert_close(ours.apply(variables, X), theirs.apply(variables, X))


EXTRAS = {
    "normalize_qk": "rms",
    "rotary": Rotary(),
    "local_window_size": (6, 0),
    "logits_soft_cap": 3.0,
    "num_kv_heads": 2,
}


def nnx_twin(variables, **arguments):
    """The NNX module with the parameters of a Linen one."""
    module = MultiHeadAttention(
        in_features=12, decode=False, rngs=nnx.Rngs(0), **SIZES, **arguments
    )
    state = nnx.state(module, nnx.Param)
    nnx.replace_by_pure_dict(state, variables["params"])
    nnx.update(module, state)
    return module


def with_scales(variables):
    """Scales of the norms other than 1."""
    params = dict(variables["params"])
    params |= {name: {"scale": normal(4, seed=i)} for i, name in enumerate(("query_ln", "key_ln"))}
    return variables | {"params": params}


def test_extras_equal_nnx():
    module = build(MultiHeadDotProductAttention, **EXTRAS, **PLAIN)
    variables = with_scales(module.init(jax.random.key(0), X))
    segments = jnp.array([[0, 0, 0, 0, 2, 2, -1]] * 2)
    positions = jnp.array([0, 1, 2, 3, 0, 2, 9])
    call = {"segment_ids": segments, "positions": positions, "is_causal": True}
    output = module.apply(variables, X, **call)
    assert_close(output, nnx_twin(variables, **EXTRAS, **PLAIN)(X, **call))
    pair = SegmentIds(query=segments, key=segments)
    np.testing.assert_array_equal(
        module.apply(variables, X, **call | {"segment_ids": pair}), output
    )


def test_dropout_takes_flax_switches_and_streams():
    module = build(MultiHeadDotProductAttention, dropout_rate=0.5, **PLAIN)
    variables = module.init(jax.random.key(0), X, deterministic=True)
    apply = functools.partial(module.apply, variables, X, deterministic=False)
    key, other = jax.random.split(jax.random.key(1))
    by_argument = apply(dropout_rng=key)
    assert not np.array_equal(by_argument, apply(dropout_rng=other))
    by_stream = apply(rngs={"dropout": key})
    np.testing.assert_array_equal(by_stream, apply(rngs={"dropout": key}))
    # The argument goes before the stream.
    both = apply(rngs={"dropout": other}, dropout_rng=key)
    np.testing.assert_array_equal(both, by_argument)
    plain = build(MultiHeadDotProductAttention, **PLAIN).apply(variables, X)
    assert_close(module.apply(variables, X, deterministic=True), plain)
    twin = nnx_twin(variables, dropout_rate=0.5, **PLAIN)
    assert_close(by_argument, twin(X, deterministic=False, rngs=_Stream(key)))


class _Stream:
    """Gives one key."""

    def __init__(self, key):
        self.key = key

    def __call__(self):
        return self.key


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_callers_shard_map(check_vma):
    mesh = jax.make_mesh((4, 2), ("rows", "other"), (jax.sharding.AxisType.Auto,) * 2)
    module = build(MultiHeadDotProductAttention, num_kv_heads=2, rotary=Rotary())
    x, cotangent = normal(4, 7, 12), normal(4, 7, 10, seed=1)
    variables = module.init(jax.random.key(0), x)
    apply = functools.partial(module.apply, is_causal=True)
    rows = PartitionSpec("rows")
    mapped = jax.shard_map(
        apply, mesh=mesh, in_specs=(PartitionSpec(), rows), out_specs=rows, check_vma=check_vma
    )

    def output_and_gradient(apply):
        output, pull = jax.vjp(apply, variables, x)
        return output, pull(cotangent)

    assert_close(jax.jit(lambda: output_and_gradient(mapped))(), output_and_gradient(apply))


@pytest.mark.parametrize(("leading", "jit"), [((), True), ((2, 3), True), ((2,), False)], ids=str)
def test_prompt_and_single_tokens_equal_full_forward(leading, jit):
    implementation = None if jit else "reference"
    module = build(
        MultiHeadDotProductAttention,
        decode=True,
        page_size=8,
        implementation=implementation,
        **EXTRAS,
    )
    x = normal(*leading, 11, 12)
    variables = with_scales(module.init(jax.random.key(0), x))
    parameters = {"params": variables["params"]}
    full = build(MultiHeadDotProductAttention, implementation="reference", **EXTRAS)
    expected = full.apply(parameters, x, is_causal=True)

    def step(variables, x):
        return module.apply(variables, x, mutable=["cache"])

    step = jax.jit(step) if jit else step
    pieces = [(0, 5), *((t, t + 1) for t in range(5, 11))] if jit else [(0, 5), (5, 9), (9, 11)]
    outputs = []
    for a, b in pieces:
        output, changed = step(variables, x[..., a:b, :])
        variables = variables | changed
        outputs.append(output)
    assert_close(jnp.concatenate(outputs, axis=-2), expected)
    cache = variables["cache"]["decode_cache"]
    assert int(cache.index) == 11
    assert not cache.is_full
    assert cache.pages.page_size == 8


def test_a_cache_of_zeros_is_empty():
    """Caches are commonly made from shapes alone, without running `init`."""
    module = build(MultiHeadDotProductAttention, decode=True, **PLAIN)
    variables = module.init(jax.random.key(0), X)
    shapes = jax.eval_shape(lambda: module.init(jax.random.key(0), X))["cache"]
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    a, _ = module.apply(variables, X, mutable=["cache"])
    b, _ = module.apply(variables | {"cache": zeros}, X, mutable=["cache"])
    np.testing.assert_array_equal(a, b)


def test_decoding_beyond_the_cache():
    module = build(MultiHeadDotProductAttention, decode=True, **PLAIN)
    x = normal(2, 7, 12)
    variables = module.init(jax.random.key(0), x[:, :6])
    apply = functools.partial(module.apply, mutable=["cache"])
    _, changed = apply(variables, x[:, :5])
    variables = variables | changed
    with pytest.raises(ValueError, match=r"2 more tokens do not fit.*room for 6 and holds.* 5"):
        apply(variables, x[:, 5:])
    output, changed = jax.jit(apply)(variables, x[:, 5:])
    after, before = (v["cache"]["decode_cache"] for v in (changed, variables))
    assert np.isnan(output).all()
    assert after.is_full
    assert int(after.index) == 5
    np.testing.assert_array_equal(after.pages.pages, before.pages.pages)


@pytest.mark.parametrize("call", [{"mask": causal(2, 7)}, {}], ids=["mask", "plain"])
def test_attention_fn_in_flax_module(call):
    theirs = build(linen.MultiHeadDotProductAttention)
    ours = build(linen.MultiHeadDotProductAttention, attention_fn=attention_fn)
    variables = theirs.init(jax.random.key(0), X)
    assert_close(
        output_and_gradients(ours, variables, [X], **call),
        output_and_gradients(theirs, variables, [X], **call),
    )


def test_attention_fn_in_flax_module_drops_and_sows_as_ours_does():
    flaxs = build(linen.MultiHeadDotProductAttention, attention_fn=attention_fn, dropout_rate=0.5)
    ours = build(MultiHeadDotProductAttention, dropout_rate=0.5)
    variables = ours.init(jax.random.key(0), X, deterministic=True)
    key = jax.random.key(1)
    for call in ({"deterministic": True}, {"deterministic": False, "dropout_rng": key}):
        assert_close(flaxs.apply(variables, X, **call), ours.apply(variables, X, **call))
    with pytest.raises(NotImplementedError, match="sow_weights"):
        flaxs.apply(variables, X, deterministic=True, sow_weights=True, mutable="intermediates")


def test_another_attention_fn_gets_what_it_names():
    module = build(
        MultiHeadDotProductAttention, attention_fn=linen.dot_product_attention, rotary=Rotary()
    )
    variables = module.init(jax.random.key(0), X)
    output, sown = module.apply(
        variables, X, mask=causal(2, 7), sow_weights=True, mutable=["intermediates"]
    )
    (weights,) = sown["intermediates"]["attention_weights"]
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    own = build(MultiHeadDotProductAttention, rotary=Rotary())
    assert_close(output, own.apply(variables, X, is_causal=True))
    causal_fn = build(MultiHeadDotProductAttention, attention_fn=nnx.dot_product_attention)
    own = build(MultiHeadDotProductAttention)
    assert_close(
        causal_fn.apply(variables, X, is_causal=True), own.apply(variables, X, is_causal=True)
    )


def test_deprecated_inputs_kv_still_stands_for_keys_and_values():
    module = build(MultiHeadDotProductAttention)
    variables = module.init(jax.random.key(0), X)
    with pytest.warns(DeprecationWarning, match="inputs_kv") as caught:
        output = module.apply(variables, X, inputs_kv=Y)
    assert caught[0].filename == __file__  # it points at the caller, not into flax
    np.testing.assert_array_equal(output, module.apply(variables, X, Y))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"normalize_qk": "batch"}, "normalize_qk='batch'"),
        ({"num_heads": 0}, "num_heads=0 must be an int of at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be an int of at least 1"),
        ({"page_size": 0}, "page_size=0 must be an int of at least 1"),
        ({"rotary": True}, r"rotary=True must be Rotary\(\)"),
        ({"local_window_size": (1, 2, 3)}, r"local_window_size=\(1, 2, 3\)"),
        ({"logits_soft_cap": -1.0}, "logits_soft_cap=-1.0"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"sharding": "data"}, "sharding='data'"),
    ],
)
def test_bad_options_raise_when_built(arguments, words):
    with pytest.raises(ValueError, match=words):
        build(MultiHeadDotProductAttention, **arguments)


FLAX_FN = {"attention_fn": linen.dot_product_attention}


@pytest.mark.parametrize(
    ("arguments", "call", "error", "words"),
    [
        ({}, {"sow_weights": True}, NotImplementedError, "sow_weights needs"),
        ({}, {"inputs_v": X}, ValueError, "inputs_v"),
        ({}, {"inputs_k": X, "inputs_kv": X}, ValueError, "inputs_kv"),
        ({"num_kv_heads": 3}, {}, ValueError, "num_kv_heads=3"),
        ({"qkv_features": 15}, {}, ValueError, "qkv_features=15"),
        (
            {"qk_attn_weights_einsum_cls": lambda: jnp.einsum},
            {},
            NotImplementedError,
            "qk_attn_weights_einsum_cls",
        ),
        ({"decode": True}, {"mask": causal(2, 7)}, NotImplementedError, "mask cannot"),
        ({"decode": True} | FLAX_FN, {}, NotImplementedError, "attention_fn cannot"),
        (FLAX_FN | {"local_window_size": 2}, {}, NotImplementedError, "local_window_size is not"),
        (FLAX_FN, {"is_causal": True}, NotImplementedError, "is_causal is not"),
    ],
)
def test_what_cannot_be_done_raises(arguments, call, error, words):
    module = build(MultiHeadDotProductAttention, **arguments)
    with pytest.raises(error, match=words):
        jax.eval_shape(lambda: module.init(jax.random.key(0), X, **call))
