"""The NNX module against flax's own, against the formula in NumPy, and against itself decoding."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from flax_pallas_attn import aot, module_core
from flax_pallas_attn.attention import attention_fn
from flax_pallas_attn.masking import Positions, SegmentIds
from flax_pallas_attn.nnx import MultiHeadAttention
from flax_pallas_attn.paged.cache import PagedKVCache
from flax_pallas_attn.rotary import Rotary
from flax_pallas_attn.sharding import AttentionSharding

TOLERANCE = 1e-5  # float32, of the largest magnitude


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def assert_close(got, expected, tolerance=TOLERANCE):
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(
            a, b, rtol=0, atol=tolerance * max(1, np.abs(b).max())
        ),
        got,
        expected,
    )


# Runs operation by operation: where the implementation does not matter, nothing has to be compiled.
PLAIN = {"implementation": "reference"}


def build(cls, **arguments):
    """A module of random parameters, biases included: the same ones for the same arguments."""
    defaults = {
        "num_heads": 4,
        "in_features": 12,
        "qkv_features": 16,
        "out_features": 10,
        "decode": False,
        "bias_init": nnx.initializers.normal(1.0),
        "rngs": nnx.Rngs(0),
    }
    return cls(**defaults | arguments)


def output_and_gradients(module, inputs, **call):
    """Output, and gradients of its product with a fixed array in parameters and inputs."""
    graph, params, rest = nnx.split(module, nnx.Param, ...)

    @jax.jit
    def run(params, inputs):
        def loss(params, inputs):
            output = nnx.merge(graph, params, rest, copy=True)(*inputs, **call)
            return jnp.vdot(output, normal(*output.shape, seed=9)), output

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(params, inputs)

    (in_params, in_inputs), output = run(params, tuple(inputs))
    return output, nnx.to_pure_dict(in_params), in_inputs


def causal(*shape):
    return nnx.make_causal_mask(jnp.ones(shape))


X, Y, Z = normal(2, 7, 12), normal(2, 9, 12, seed=1), normal(2, 9, 12, seed=2)
FIRST = jnp.arange(9) < 5


@pytest.mark.parametrize(
    ("arguments", "inputs", "call"),
    [
        pytest.param({}, [X], {}, id="self"),
        pytest.param({}, [X, Y, Z], {}, id="cross"),
        pytest.param({}, [X], {"is_causal": True}, id="causal"),
        pytest.param({}, [Y, X], {"is_causal": True}, id="causal-cross"),
        pytest.param({}, [X], {"mask": causal(2, 7)}, id="mask-float32"),
        pytest.param(
            {"num_kv_heads": 2}, [X], {"mask": causal(1, 7).astype(jnp.int32)}, id="gqa-int-mask"
        ),
        pytest.param(
            {"num_kv_heads": 1, "normalize_qk": True},
            [X, Y],
            {"mask": FIRST[None, None, None]},
            id="mqa-normalized-bool-mask",
        ),
        pytest.param(
            {"in_kv_features": 5},
            [X, normal(2, 9, 5)],
            {"mask": jnp.eye(7, 9) + (normal(2, 4, 7, 9, seed=5) > 0), "is_causal": True},
            id="other-kv-features-full-mask-and-causal",
        ),
        pytest.param({}, [X[0]], {"mask": causal(7)}, id="no-batch"),
        pytest.param(
            {}, [normal(2, 3, 7, 12)], {"mask": causal(2, 3, 7)}, id="two-batch-dimensions"
        ),
        pytest.param(
            {},
            [normal(2, 1, 3, 7, 12)],
            {"mask": nnx.make_causal_mask(jnp.ones(7), extra_batch_dims=3)},
            id="three-batch-dimensions-shared-mask",
        ),
    ],
)
def test_equals_flax_in_output_and_gradients(arguments, inputs, call):
    theirs = output_and_gradients(build(nnx.MultiHeadAttention, **arguments), inputs, **call)
    ours = output_and_gradients(build(MultiHeadAttention, **arguments), inputs, **call)
    assert_close(ours, theirs)


def double(x, y, *rest, **options):
    return 2 * jax.lax.dot_general(x, y, *rest, **options)


def to_float32(arrays, dtype=None):
    return jax.tree.map(lambda x: x.astype(jnp.float32), arrays)


@pytest.mark.parametrize(
    "arguments",
    [
        {"qkv_features": None, "out_features": None},
        {"param_dtype": jnp.bfloat16, "precision": "highest"},
        {"kernel_init": nnx.initializers.ones, "out_kernel_init": nnx.initializers.normal(1.0)},
        {"bias_init": nnx.initializers.ones, "out_bias_init": nnx.initializers.normal(1.0)},
        {"use_bias": False, "normalize_qk": True, "ln_promote_dtype": to_float32},
        {"qkv_promote_dtype": to_float32, "out_promote_dtype": to_float32},
        {"qkv_dot_general": double, "out_dot_general": double},
        {"qkv_dot_general_cls": lambda: double, "out_dot_general_cls": lambda: double},
        {"dropout_rate": 0.5, "deterministic": True, "broadcast_dropout": False},
        {"dropout_rate": 0.5, "deterministic": True, "keep_rngs": False},
        {"attention_fn": nnx.dot_product_attention},
        {
            "kernel_metadata": {"a": 1},
            "out_kernel_metadata": {"b": 2},
            "bias_metadata": {"c": 3},
            "out_bias_metadata": {"d": 4},
            "normalize_qk": True,
            "query_ln_scale_metadata": {"e": 5},
            "key_ln_scale_metadata": {"f": 6},
        },
    ],
    ids=lambda arguments: "-".join(arguments),
)
def test_constructor_makes_what_flax_makes(arguments):
    theirs = build(nnx.MultiHeadAttention, **arguments)
    ours = build(MultiHeadAttention, **({} if "attention_fn" in arguments else PLAIN) | arguments)
    state = nnx.state(theirs)
    assert jax.tree.structure(state) == jax.tree.structure(nnx.state(ours))
    jax.tree.map(
        np.testing.assert_array_equal, nnx.state(ours, nnx.Param), nnx.state(theirs, nnx.Param)
    )
    assert jax.tree.map(lambda x: x.get_metadata(), state, is_leaf=_is_variable) == jax.tree.map(
        lambda x: x.get_metadata(), nnx.state(ours), is_leaf=_is_variable
    )
    assert_close(ours(X), theirs(X))


def _is_variable(x):
    return isinstance(x, nnx.Variable)


def test_signatures_extend_those_of_flax():
    for name in ("__init__", "__call__", "init_cache", "set_view"):
        theirs, ours = (
            inspect.signature(getattr(cls, name)).parameters
            for cls in (nnx.MultiHeadAttention, MultiHeadAttention)
        )
        positional = [p.name for p in theirs.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert list(ours)[: len(positional)] == positional
        assert theirs.keys() <= ours.keys()
        changed = {p for p in theirs if theirs[p].default != ours[p].default}
        assert changed - {"attention_fn", "bias_init", "dtype"} == set()
        for parameter in ours.keys() - theirs.keys():
            assert ours[parameter].kind is inspect.Parameter.KEYWORD_ONLY


def test_states_load_both_ways():
    arguments = {"num_kv_heads": 2, "normalize_qk": True, "dropout_rate": 0.1}
    theirs = build(nnx.MultiHeadAttention, rngs=nnx.Rngs(1), **arguments)
    ours = build(MultiHeadAttention, rngs=nnx.Rngs(2), **arguments, **PLAIN)
    for source, target in ((theirs, ours), (ours, theirs)):
        for parameter in jax.tree.leaves(nnx.state(source, nnx.Param), is_leaf=_is_variable):
            parameter[...] = parameter[...] + 1.0
        expected = source(X, deterministic=True)
        nnx.update(target, nnx.state(source))
        assert_close(target(X, deterministic=True), expected)
        assert (
            dict(nnx.to_flat_state(nnx.state(target))).keys()
            == dict(nnx.to_flat_state(nnx.state(source))).keys()
        )


def layer_ref(module, x, *, rotary_positions=None, window=None, cap=None, rms=False):
    """The layer in float64 NumPy on one row: [T, features] -> [T, out_features]."""

    def project(layer, x, spec):
        return np.einsum(spec, x, np.float64(layer.kernel[...])) + np.float64(layer.bias[...])

    x = np.float64(x)
    query, key, value = (
        project(layer, x, "td,dnh->tnh") for layer in (module.query, module.key, module.value)
    )
    if rms:
        query, key = (
            z / np.sqrt((z**2).mean(-1, keepdims=True) + 1e-6) * np.float64(norm.scale[...])
            for z, norm in ((query, module.query_ln), (key, module.key_ln))
        )
    tokens, heads, size = query.shape
    if rotary_positions is not None:
        frequencies = 10_000.0 ** (-2 * np.arange(size // 2) / size)
        turn = np.exp(1j * np.asarray(rotary_positions)[:, None, None] * frequencies)
        for z in (query, key):
            pairs = (z[..., : size // 2] + 1j * z[..., size // 2 :]) * turn
            z[:] = np.concatenate([pairs.real, pairs.imag], -1)
    key, value = (np.repeat(z, heads // z.shape[1], axis=1) for z in (key, value))
    scores = np.einsum("tnh,snh->nts", query, key) / np.sqrt(size)
    if cap is not None:
        scores = cap * np.tanh(scores / cap)
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    allowed = distance >= 0
    if window is not None:
        allowed &= distance <= window
    weights = np.where(allowed, np.exp(scores - scores.max(-1, keepdims=True)), 0)
    weights /= weights.sum(-1, keepdims=True)
    return project(module.out, np.einsum("nts,snh->tnh", weights, value), "tnh,nho->to")


@pytest.mark.parametrize(
    ("arguments", "reference"),
    [
        pytest.param({"rotary": Rotary()}, {"rotary_positions": range(7)}, id="rotary"),
        pytest.param({"local_window_size": (2, 0)}, {"window": 2}, id="window"),
        pytest.param({"logits_soft_cap": 0.7}, {"cap": 0.7}, id="soft-cap"),
        pytest.param({"normalize_qk": "rms"}, {"rms": True}, id="rms"),
        pytest.param(
            {
                "rotary": Rotary(),
                "local_window_size": 3,
                "logits_soft_cap": 2.0,
                "normalize_qk": "rms",
                "implementation": "reference",
            },
            {"rotary_positions": range(7), "window": 3, "cap": 2.0, "rms": True},
            id="all",
        ),
    ],
)
def test_extras_equal_formula(arguments, reference):
    module = build(MultiHeadAttention, num_kv_heads=2, **arguments)
    if "rms" in reference:
        module.query_ln.scale[...] = normal(4, seed=6)
        module.key_ln.scale[...] = normal(4, seed=7)
    output = module(X, is_causal=True)
    assert_close(output, np.stack([layer_ref(module, x, **reference) for x in X]))


@pytest.mark.parametrize("leading", [(), (2, 3)], ids=str)
def test_packed_documents_equal_each_alone(leading):
    module = build(MultiHeadAttention, num_kv_heads=2, rotary=Rotary())
    x = normal(*leading, 9, 12)
    segments = jnp.broadcast_to(jnp.array([4, 4, 4, 1, 1, 1, 1, -1, -1]), (*leading, 9))
    positions = jnp.broadcast_to(jnp.array([0, 1, 2, 0, 1, 2, 3, 0, 0]), (*leading, 9))
    output = module(x, is_causal=True, segment_ids=segments, positions=positions)
    for document in (slice(0, 3), slice(3, 7)):
        rows = x[..., document, :].reshape(-1, *x[..., document, :].shape[-2:])
        alone = [layer_ref(module, row, rotary_positions=range(len(row))) for row in rows]
        assert_close(
            output[..., document, :].reshape(len(rows), -1), np.reshape(alone, (len(rows), -1))
        )
    # Padding sees nothing: what is left is the output's bias.
    padding = np.broadcast_to(module.out.bias[...], output[..., 7:, :].shape)
    np.testing.assert_array_equal(output[..., 7:, :], padding)


def test_pairs_and_flax_name_say_the_same():
    module = build(MultiHeadAttention, rotary=Rotary(base=5.0), **PLAIN)
    segments, positions = jnp.array([[0, 0, 0, 0, 2, 2, 2]] * 2), jnp.array([0, 1, 2, 3, 0, 2, 5])
    output = module(X, segment_ids=segments, positions=positions)
    pairs = module(
        X,
        segment_ids=SegmentIds(query=segments, key=segments),
        positions=Positions(query=positions, key=positions),
    )
    np.testing.assert_array_equal(pairs, output)
    by_flax_name = module(X, segment_ids=segments, input_positions=positions)
    np.testing.assert_array_equal(by_flax_name, output)
    assert not np.allclose(module(X, segment_ids=segments), output)


def test_lists_shared_by_all_rows_are_positions_and_segments():
    module = build(MultiHeadAttention, rotary=Rotary())
    numbers = [0, 0, 0, 1, 1, 1, 1]
    every_row = jnp.broadcast_to(jnp.array(numbers), (2, 7))
    expected = module(X, positions=every_row, segment_ids=every_row)
    np.testing.assert_array_equal(module(X, positions=numbers, segment_ids=[numbers]), expected)
    np.testing.assert_array_equal(module(X, positions=[numbers], segment_ids=numbers), expected)
    with pytest.raises(ValueError, match=r"positions \(of queries\)='first' is not an array"):
        module(X, positions="first")


def test_positions_order_tokens():
    """Tokens in any order give the outputs of their order, when positions tell it."""
    module = build(MultiHeadAttention, rotary=Rotary(), local_window_size=(3, 0))
    order = jnp.array([3, 0, 6, 1, 5, 2, 4])
    expected = module(X, is_causal=True)[:, order]
    shuffled = X[:, order]
    assert_close(module(shuffled, is_causal=True, positions=order), expected)
    pair = Positions(query=order, key=jnp.arange(7))
    assert_close(module(shuffled, X, is_causal=True, positions=pair), expected)


def test_row_that_sees_nothing_is_zero_before_the_output_projection():
    module = build(MultiHeadAttention)
    mask = jnp.ones((1, 1, 7, 7)).at[:, :, 3].set(0)
    output, gradients, in_inputs = output_and_gradients(module, [X], mask=mask)
    np.testing.assert_array_equal(
        output[:, 3], np.broadcast_to(module.out.bias[...], output[:, 3].shape)
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves((gradients, in_inputs)))


def test_bfloat16_stays_bfloat16():
    module = build(MultiHeadAttention, dtype=jnp.bfloat16, rotary=Rotary(), normalize_qk="rms")
    output = module(X, is_causal=True)
    assert output.dtype == jnp.bfloat16
    full = build(MultiHeadAttention, rotary=Rotary(), normalize_qk="rms")(X, is_causal=True)
    error = np.linalg.norm(np.asarray(output, np.float32) - full) / np.linalg.norm(full)
    assert error < 2.0**-6


def uniform_ones(rate, **arguments):
    """A layer whose output, for T x S tokens, is the kept share of keys over 1 - rate."""
    module = MultiHeadAttention(
        2,
        4,
        dropout_rate=rate,
        decode=False,
        kernel_init=nnx.initializers.zeros,
        bias_init=nnx.initializers.ones,
        out_kernel_init=nnx.initializers.ones,
        out_bias_init=nnx.initializers.zeros,
        out_features=1,
        rngs=nnx.Rngs(3),
        **arguments,
        **PLAIN,
    )
    module.out.kernel[...] = jnp.array([[1.0, 0], [0, 0]])[..., None]  # of the first head alone
    return module


@pytest.mark.parametrize("broadcast", [True, False])
def test_dropout_keeps_a_share_and_rescales(broadcast):
    module = uniform_ones(0.25, broadcast_dropout=broadcast)
    output = np.asarray(module(jnp.zeros((2, 64, 4)), deterministic=False))[..., 0]
    kept = output * 0.75 * 64
    np.testing.assert_allclose(kept, kept.round(), atol=1e-3)
    # Binomial: 64 * 64 keys (twice as many, unless the rows share them), each kept with 3 in 4.
    draws = 64 * 64 * (1 if broadcast else 2)
    share = kept.mean() / 64
    assert abs(share - 0.75) < 4 * np.sqrt(0.75 * 0.25 / draws)
    assert np.array_equal(kept[0], kept[1]) == broadcast
    assert 0.5 < kept.var() / (64 * 0.75 * 0.25) < 2


def test_dropout_takes_flax_switches_and_streams():
    module = uniform_ones(0.5, deterministic=False)
    x = jnp.zeros((1, 16, 4))
    first, second = module(x), module(x)
    assert not np.array_equal(first, second)  # the module's own stream moves on
    a, b = (module(x, rngs=nnx.Rngs(dropout=5)) for _ in range(2))
    np.testing.assert_array_equal(a, b)
    c = module(x, rngs=nnx.Rngs(dropout=5).dropout)
    np.testing.assert_array_equal(a, c)
    np.testing.assert_allclose(module(x, deterministic=True), 1, atol=1e-6)
    with pytest.raises(ValueError, match="keep_rngs"):
        uniform_ones(0.5, keep_rngs=False)(x, deterministic=False)
    with pytest.raises(ValueError, match="deterministic"):
        uniform_ones(0.5)(x)


@pytest.mark.parametrize("check_vma", [True, False])
def test_inside_a_callers_shard_map(check_vma):
    mesh = jax.make_mesh((4, 2), ("rows", "other"), (jax.sharding.AxisType.Auto,) * 2)
    module = build(MultiHeadAttention, num_kv_heads=2, rotary=Rotary())
    graph, params = nnx.split(module)
    rows = PartitionSpec("rows")
    x, cotangent = normal(4, 7, 12), normal(4, 7, 10, seed=1)

    def apply(params, x):
        return nnx.merge(graph, params)(x, is_causal=True)

    mapped = jax.shard_map(
        apply,
        mesh=mesh,
        in_specs=(PartitionSpec(), rows),
        out_specs=rows,
        check_vma=check_vma,
    )

    def output_and_gradient(apply):
        output, pull = jax.vjp(apply, params, x)
        return output, pull(cotangent)

    ours = jax.jit(lambda: output_and_gradient(mapped))()
    assert_close(ours, output_and_gradient(apply))


@pytest.mark.parametrize(("leading", "jit"), [((), True), ((2, 3), True), ((2,), False)], ids=str)
def test_prompt_and_single_tokens_equal_full_forward(leading, jit):
    module = build(
        MultiHeadAttention,
        num_kv_heads=2,
        normalize_qk="rms",
        rotary=Rotary(),
        local_window_size=(6, 0),
        logits_soft_cap=3.0,
        implementation=None if jit else "reference",
    )
    x = normal(*leading, 11, 12)
    rows = x.reshape(-1, 11, 12)
    reference = {"rotary_positions": range(11), "window": 6, "cap": 3.0, "rms": True}
    expected = np.stack([layer_ref(module, row, **reference) for row in rows])
    module.init_cache(x.shape, page_size=8)
    step = nnx.jit(lambda module, x: module(x, decode=True)) if jit else MultiHeadAttention.__call__
    step_arguments = {} if jit else {"decode": True}
    pieces = [(0, 5), *((t, t + 1) for t in range(5, 11))] if jit else [(0, 5), (5, 9), (9, 11)]
    outputs = [step(module, x[..., a:b, :], **step_arguments) for a, b in pieces]
    assert_close(jnp.concatenate(outputs, axis=-2), expected.reshape(*leading, 11, 10))
    assert int(module.cache.index) == 11
    assert not module.cache.is_full


def test_cache_is_in_pages_of_the_modules_dtype():
    module = build(MultiHeadAttention, num_kv_heads=2, dtype=jnp.bfloat16, decode=True, **PLAIN)
    module.init_cache((3, 20, 12), page_size=16)
    pages = module.cache.pages
    assert (pages.num_layers, pages.num_pages, pages.num_kv_heads, pages.page_size) == (1, 6, 2, 16)
    assert pages.dtype == jnp.bfloat16
    assert module(normal(3, 5, 12)).dtype == jnp.bfloat16
    module.init_cache((3, 20, 12), jnp.float32)
    assert module.cache.pages.dtype == jnp.float32
    assert module(normal(3, 5, 12)).dtype == jnp.bfloat16
    assert int(module.cache.index) == 5


def test_decoding_beyond_the_cache_raises_and_changes_nothing():
    module = build(MultiHeadAttention, decode=True, **PLAIN)
    x = normal(2, 7, 12)
    module.init_cache((2, 6, 12), page_size=8)
    module(x[:, :5])
    before = nnx.state(module, nnx.Cache)
    with pytest.raises(ValueError, match=r"2 more tokens do not fit.*room for 6 and holds.* 5"):
        module(x[:, 5:7])
    with pytest.raises(ValueError, match="7 more tokens do not fit"):
        nnx.jit(lambda module, x: module(x))(module, x)
    jax.tree.map(np.testing.assert_array_equal, nnx.state(module, nnx.Cache), before)
    module(x[:, 5:6])  # the last that fits


def test_decoding_beyond_the_cache_under_jit_sets_the_flag_and_overwrites_nothing():
    module = build(MultiHeadAttention, decode=True, **PLAIN)
    x = normal(2, 7, 12)
    module.init_cache((2, 6, 12), page_size=4)
    step = nnx.jit(lambda module, x: module(x))
    assert np.isfinite(step(module, x[:, :5])).all()
    pages = np.asarray(module.cache.pages.pages)
    assert np.isnan(step(module, x[:, 5:7])).all()
    assert module.cache.is_full
    assert int(module.cache.index) == 5
    np.testing.assert_array_equal(module.cache.pages.pages, pages)
    # What fits is still right, and the flag stays.
    output = step(module, x[:, 5:6])
    assert_close(output, np.stack([layer_ref(module, row)[5:6] for row in x[:, :6]]))
    assert module.cache.is_full


def test_paged_equals_each_sequence_alone():
    module = build(
        MultiHeadAttention,
        num_kv_heads=2,
        normalize_qk="rms",
        rotary=Rotary(),
        local_window_size=(6, 0),
    )
    lengths, new = [11, 3, 9], [4, 3, 1]
    texts = [normal(n, 12, seed=n) for n in lengths]
    reference = {"window": 6, "rms": True}
    expected = [
        layer_ref(module, x, rotary_positions=range(len(x)), **reference)[-n:]
        for x, n in zip(texts, new, strict=True)
    ]
    cache = PagedKVCache.create(
        num_layers=3, num_pages=9, page_size=8, num_kv_heads=2, head_dim=4, dtype=jnp.float32
    )
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    page_table = jnp.array([[7, 2], [5, 0], [1, 3]])

    @jax.jit
    def run(tokens, cache, kv_lengths, query_starts):
        return module.paged(
            tokens,
            cache,
            layer=1,
            page_table=page_table,
            kv_lengths=kv_lengths,
            query_starts=query_starts,
        )

    def starts(counts):
        return jnp.cumsum(jnp.array([0, *counts]))

    before = [length - n for length, n in zip(lengths, new, strict=True)]
    tokens = jnp.concatenate([x[:n] for x, n in zip(texts, before, strict=True)])
    _, cache = run(tokens, cache, jnp.array(before), starts(before))
    tokens = jnp.concatenate([x[-n:] for x, n in zip(texts, new, strict=True)])
    output, cache = run(tokens, cache, jnp.array(lengths), starts(new))
    assert_close(output, np.concatenate(expected))
    assert np.isnan(cache.pages[jnp.array([0, 2])]).all()  # the other layers


@pytest.mark.parametrize(
    ("arguments", "call"),
    [({}, {"mask": causal(2, 7)}), ({"num_kv_heads": 2}, {"is_causal": True})],
    ids=["mask", "causal-gqa"],
)
def test_attention_fn_in_flax_module(arguments, call):
    theirs = output_and_gradients(build(nnx.MultiHeadAttention, **arguments), [X], **call)
    ours = output_and_gradients(
        build(nnx.MultiHeadAttention, attention_fn=attention_fn, **arguments), [X], **call
    )
    assert_close(ours, theirs)


def test_attention_fn_in_flax_module_drops_and_sows_as_ours_does():
    arguments = {"dropout_rate": 0.5, "decode": False, "in_features": 12, "num_heads": 4}
    flaxs = nnx.MultiHeadAttention(attention_fn=attention_fn, rngs=nnx.Rngs(0), **arguments)
    ours = MultiHeadAttention(rngs=nnx.Rngs(0), **arguments)
    for deterministic in (True, False):
        a, b = (
            module(X, deterministic=deterministic, rngs=nnx.Rngs(dropout=1))
            for module in (flaxs, ours)
        )
        assert_close(a, b)
    assert not np.array_equal(flaxs(X, deterministic=False), flaxs(X, deterministic=True))
    with pytest.raises(NotImplementedError, match="sow_weights"):
        flaxs(X, deterministic=True, sow_weights=True)


def test_another_attention_fn_shows_weights_and_takes_rotary():
    module = build(MultiHeadAttention, attention_fn=nnx.dot_product_attention, rotary=Rotary())
    run = nnx.capture(
        lambda module: module(X, mask=causal(2, 7), sow_weights=True), nnx.Intermediate
    )
    output, sown = run(module)
    (weights,) = sown["attention_weights"].get_value()
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)
    assert_close(output, build(MultiHeadAttention, rotary=Rotary())(X, is_causal=True))


def test_view_switches_and_makes_a_cache():
    module = build(MultiHeadAttention, dropout_rate=0.5, **PLAIN)
    decoding = nnx.view(module, decode=True, deterministic=True, batch_size=2, max_length=8)
    expected = module(X, is_causal=True, deterministic=True)
    assert_close(decoding(X), expected)
    assert module.cache is None
    with pytest.raises(ValueError, match="max_length"):
        nnx.view(module, decode=True, batch_size=2)


DECODING = {"decode": True}


@pytest.mark.parametrize(
    ("arguments", "call", "error", "words"),
    [
        ({}, {"sow_weights": True}, NotImplementedError, "sow_weights needs"),
        ({}, {"inputs_v": X}, ValueError, "inputs_v"),
        ({}, {"inputs_k": X[..., :3]}, ValueError, "inputs_k has 3 features"),
        ({}, {"positions": jnp.arange(7), "input_positions": X}, ValueError, "input_positions"),
        ({"decode": None}, {}, ValueError, "decode"),
        ({}, {"decode": True}, ValueError, "init_cache"),
        (DECODING, {"mask": causal(2, 7)}, NotImplementedError, "mask cannot"),
        (DECODING, {"segment_ids": jnp.zeros((2, 7), int)}, NotImplementedError, "segment_ids"),
        (DECODING, {"sow_weights": True}, NotImplementedError, "sow_weights cannot"),
        (DECODING, {"inputs_k": Y}, ValueError, "the same number of tokens"),
        (DECODING, {"inputs_q": X[:1]}, ValueError, "the batch"),
        (
            {"decode": True, "dropout_rate": 0.5, "deterministic": False},
            {},
            NotImplementedError,
            "dropout cannot",
        ),
        (
            {"decode": True, "attention_fn": nnx.dot_product_attention},
            {},
            NotImplementedError,
            "attention_fn cannot",
        ),
        (
            {"attention_fn": nnx.dot_product_attention, "logits_soft_cap": 2.0},
            {},
            NotImplementedError,
            "logits_soft_cap is not known",
        ),
        (
            {"attention_fn": nnx.dot_product_attention},
            {"segment_ids": jnp.zeros((2, 7), int), "positions": jnp.arange(7)},
            NotImplementedError,
            "segment_ids, positions is not known",
        ),
    ],
)
def test_what_cannot_be_done_raises(arguments, call, error, words):
    module = build(MultiHeadAttention, **arguments)
    if arguments.get("decode"):
        module.init_cache(X.shape)
    with pytest.raises(error, match=words):
        module(**{"inputs_q": X} | call)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"normalize_qk": "batch"}, "normalize_qk='batch'"),
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"num_heads": 0}, "num_heads=0 must be an int of at least 1"),
        ({"num_kv_heads": 0}, "num_kv_heads=0 must be an int of at least 1"),
        ({"qkv_features": 15}, "15"),
        ({"rotary": True}, r"rotary=True must be Rotary\(\)"),
        ({"local_window_size": 2.5}, "local_window_size=2.5"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0"),
        ({"implementation": "cuda"}, "implementation='cuda'"),
        ({"sharding": "data"}, "sharding='data'"),
    ],
)
def test_bad_options_raise_when_built(arguments, words):
    with pytest.raises(ValueError, match=words):
        build(MultiHeadAttention, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"input_shape": (16,)}, r"input_shape=\(16,\) must be that of the inputs"),
        ({"input_shape": (1, 16, 12), "page_size": 0}, "page_size=0 must be an int of at least 1"),
        ({"input_shape": (1, 0, 12)}, "room for at least 1 token, got length 0"),
    ],
)
def test_bad_sizes_of_a_cache(arguments, words):
    with pytest.raises(ValueError, match=words):
        build(MultiHeadAttention).init_cache(**arguments)


def test_options_reach_the_attention_functions(monkeypatch):
    seen = {}
    for name in ("dot_product_attention", "paged_attention"):
        function = getattr(module_core, name)
        monkeypatch.setattr(
            module_core,
            name,
            lambda *args, _name=name, _function=function, **kwargs: (
                seen.update({_name: kwargs}) or _function(*args, **kwargs)
            ),
        )
    options = {"implementation": "xla", "local_window_size": (5, 0), "logits_soft_cap": 3.0}
    module = build(MultiHeadAttention, **options)
    module.init_cache(X.shape)
    module(X)
    module(X, decode=True)
    assert set(seen) == {"dot_product_attention", "paged_attention"}
    for kwargs in seen.values():
        assert {name: kwargs[name] for name in options} == options
    module = build(MultiHeadAttention, sharding=AttentionSharding(heads="nowhere"))
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="nowhere"):
        module(X)


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_precision_is_that_of_attention_too(precision):
    module = build(MultiHeadAttention, precision=precision, implementation="reference")
    text = str(jax.make_jaxpr(lambda x: module(x))(X))
    # Three projections, two products of attention, the output; each names it for both operands.
    assert text.count("dot_general[") == 6
    assert text.count(f"Precision.{precision.upper()}") == 12


def test_projections_are_sharded_as_flax_has_it():
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), (jax.sharding.AxisType.Explicit,) * 2)
    module = build(MultiHeadAttention)
    expected = module(X, is_causal=True)
    with jax.set_mesh(mesh):
        graph, state = nnx.split(module)
        state = jax.device_put(state, jax.sharding.NamedSharding(mesh, PartitionSpec()))
        output = nnx.merge(graph, state)(
            jax.device_put(X, jax.sharding.NamedSharding(mesh, PartitionSpec("data"))),
            is_causal=True,
            qkv_sharding=PartitionSpec("data", None, "tensor", None),
            out_sharding=PartitionSpec("data", None, None),
        )
        assert jax.typeof(output).sharding.spec == PartitionSpec("data", None, None)
    assert_close(output, expected)


@pytest.mark.tpu_compile
def test_training_and_decoding_compile_for_tpu_with_the_kernels():
    module = MultiHeadAttention(
        8,
        512,
        num_kv_heads=2,
        dtype=jnp.bfloat16,
        rotary=Rotary(),
        local_window_size=(127, 0),
        decode=True,
        rngs=nnx.Rngs(0),
    )
    module.init_cache((2, 200, 512))
    graph, params, cache = nnx.split(module, nnx.Param, ...)

    def loss(params, x):
        return nnx.merge(graph, params, cache)(x, decode=False, is_causal=True).sum()

    def decode(params, cache, x):
        module = nnx.merge(graph, params, cache)
        output = module(x)
        return output, nnx.state(module, nnx.Cache)

    prompt, token = (jax.ShapeDtypeStruct((2, t, 512), jnp.bfloat16) for t in (150, 1))
    training = aot.compile_for_tpu(jax.grad(loss), params, prompt)
    assert set(training.kernels) == {"flash_forward", "flash_backward"}
    for x in (prompt, token):
        assert aot.compile_for_tpu(decode, params, cache, x).kernels == ("paged_attention",)
