"""What jax makes of `dot_product_attention`: derivatives, export, vmap, a caller's shard_map."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from flax_pallas_attn import Alibi, Dropout, SegmentIds, aot, dot_product_attention

IMPLEMENTATIONS = ("reference", "xla", "pallas")


def draw(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def qkv(B=1, T=20, S=20, N=2, K=2, H=8):
    return [
        draw(*shape, seed=i) for i, shape in enumerate([(B, T, N, H), (B, S, K, H), (B, S, K, H)])
    ]


def assert_close(tree, expected, tolerance=5e-6):
    def check(x, expected):
        assert x.shape == expected.shape
        assert np.abs(x - expected).max() <= tolerance * np.abs(expected).max()

    jax.tree.map(check, tree, expected)


# --- Derivatives ---


def loss(query, key, value, **options):
    return (dot_product_attention(query, key, value, is_causal=True, **options) ** 2).sum()


@pytest.mark.parametrize("T", [20, 600])  # one tile, and several
def test_xla_has_second_derivatives_forward_over_reverse(T):
    query, key, value = qkv(T=T, S=T)
    tangents = (key, value, query, draw(1, 2, T, T))
    options = {
        "logits_soft_cap": 3.0,
        "sinks": draw(2),
        "dropout": Dropout(rate=0.1, key=jax.random.key(0)),
    }

    def second(implementation):
        def first(*arrays):
            fn = functools.partial(loss, implementation=implementation, **options)
            return jax.grad(lambda q, k, v, bias: fn(q, k, v, bias=bias), (0, 1, 2, 3))(*arrays)

        return jax.jit(lambda *arrays: jax.jvp(first, arrays, tangents)[1])

    arrays = (query, key, value, draw(1, 2, T, T, seed=1))
    assert_close(second("xla")(*arrays), second("reference")(*arrays), 2e-5)


@pytest.mark.parametrize("implementation", [None, "xla", "pallas"])
@pytest.mark.parametrize("transform", ["jvp", "linearize"])
def test_forward_mode_is_the_reference_s_alone(transform, implementation, interpret):
    """Jax raises this before the package could; the docstring says what to do."""
    query, key, value = qkv()
    fn = functools.partial(loss, key=key, value=value, implementation=implementation)
    plain = functools.partial(loss, key=key, value=value, implementation="reference")

    def derivative(fn):
        if transform == "jvp":
            return jax.jvp(fn, (query,), (key,))[1]
        return jax.linearize(fn, query)[1](key)

    with pytest.raises(TypeError, match=r"forward-mode autodiff \(jvp\) to a custom_vjp function"):
        derivative(fn)
    assert np.isfinite(derivative(plain))


SECOND = {
    "forward over reverse": lambda fn, x, t: jax.jvp(jax.grad(fn), (x,), (t,)),
    "reverse over reverse": lambda fn, x, t: jax.grad(lambda x: (jax.grad(fn)(x) * t).sum())(x),
    "of the cotangent": lambda fn, x, t: jax.jvp(jax.vjp(fn, x)[1], (1.0,), (1.0,)),
}


@pytest.mark.parametrize("name", SECOND)
def test_second_derivatives_of_the_kernels_say_what_to_use(name):
    query, key, value = qkv()
    fn = functools.partial(loss, key=key, value=value, implementation="pallas")
    with pytest.raises(
        NotImplementedError,
        match=r'implementation="pallas" has first derivatives.*implementation="xla" for '
        r'jax\.hessian.*"reference" for all others',
    ):
        jax.eval_shape(lambda x, t: SECOND[name](fn, x, t), query, key)


# --- Export ---


def step(query, key, value, **options):
    """Output and gradients."""
    output, vjp = jax.vjp(
        functools.partial(dot_product_attention, is_causal=True, **options), query, key, value
    )
    return output, *vjp(output)


def with_names(names):
    return jax.ShapeDtypeStruct(jax.export.symbolic_shape(names), jnp.float32)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("fn", [dot_product_attention, step])
def test_exported_for_tpu_it_holds_the_kernels(fn):
    x = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)
    with jax.set_mesh(aot.topology_mesh("v5e", {"data": 1})):
        exported = jax.export.export(jax.jit(fn), platforms=["tpu"])(x, x, x)
    read = jax.export.deserialize(exported.serialize())
    text = read.mlir_module()
    assert read.platforms == ("tpu",)
    assert text.count("@tpu_custom_call") == (1 if fn is dot_product_attention else 2)
    assert "flash_forward" in text
    assert ("flash_backward" in text) == (fn is step)
    program = aot.compile_for_tpu(jax.jit(read.call), x, x, x)
    assert len(program.kernels) == (1 if fn is dot_product_attention else 2)


@pytest.mark.parametrize("implementation", [None, "reference"])
def test_a_symbolic_batch(implementation):
    """One program for any batch size; of several tiles, with data of every row."""
    T = 150

    def attend(query, key, value, lengths):
        return step(
            query,
            key,
            value,
            query_seq_lengths=lengths,
            bias=draw(T, T),
            dropout=Dropout(rate=0.1, key=jax.random.key(0)),
            query_offset=3,
            implementation=implementation,
        )

    query = with_names(f"b, {T}, 2, 8")
    lengths = jax.ShapeDtypeStruct(query.shape[:1], jnp.int32)
    attend = jax.jit(attend)
    exported = jax.export.export(attend)(query, query, query, lengths)
    for batch in (1, 3):
        arrays = (*qkv(batch, T, T), np.arange(batch, dtype=np.int32) * 40 + 60)
        assert_close(exported.call(*arrays), attend(*arrays))


SYMBOLIC = {
    "pallas, batch": ("pallas", "b, 64, 4, 8", r"B=b: the kernels take no symbolic size"),
    "pallas, length": ("pallas", "1, t, 4, 8", r"T=t, S=t: .*export once for each of the sizes"),
    "xla, length": ("xla", "b, t, 4, 8", r'T=t, S=t: .*Use implementation="reference"'),
    "xla, heads": ("xla", "1, 64, n, 8", r"N=n, K=n: it takes a symbolic batch size, no other"),
    "head size": ("reference", "1, 64, 4, h", r"H is the symbolic dimension h\. .*pass scale"),
}


@pytest.mark.parametrize("name", SYMBOLIC)
def test_symbolic_sizes_that_are_not_taken_are_named(name):
    implementation, names, message = SYMBOLIC[name]
    fn = functools.partial(dot_product_attention, implementation=implementation)
    with pytest.raises(NotImplementedError, match=message):
        jax.export.export(jax.jit(fn), platforms=["tpu"])(*[with_names(names)] * 3)


def test_a_symbolic_length_takes_the_reference_with_a_warning():
    with pytest.warns(UserWarning, match=r'"reference" does, whose memory grows .* T=t, S=t'):
        exported = jax.export.export(jax.jit(step))(*[with_names("1, t, 4, 8")] * 3)
    arrays = qkv(1, 30, 30, 4, 4)
    assert_close(exported.call(*arrays), step(*arrays))


# --- vmap ---

M, B, T, S, N, K, H = 2, 2, 6, 9, 4, 2, 8

MAPPED = {
    "bias": lambda: {"bias": draw(M, N, T, S)},
    "mask": lambda: {"mask": draw(M, T, S) > -0.5},
    "segment_ids": lambda: {
        "segment_ids": SegmentIds(np.arange(M * B * T).reshape(M, B, T) % 3 - 1,
                                  np.arange(M * B * S).reshape(M, B, S) // 4 % 3)
    },
    "slopes": lambda: {"bias": Alibi(np.abs(draw(M, N)))},
    "sinks": lambda: {"sinks": draw(M, N)},
    "dropout key": lambda: {
        "dropout": Dropout(rate=0.4, key=jax.random.split(jax.random.key(0), M))
    },
    "lengths": lambda: {
        "query_seq_lengths": np.array([[6, 3], [2, 6]]),
        "key_value_seq_lengths": np.array([[9, 5], [1, 7]]),
    },
    "query_offset": lambda: {"query_offset": np.array([3, 0]), "is_causal": True},
    "scale": lambda: {"scale": np.array([0.1, 0.7], np.float32)},
}  # fmt: skip


@pytest.fixture
def interpret_mapped(interpret, monkeypatch):
    """Jax 0.12's interpreter does not know of the grid axis that `jax.vmap` adds; see README."""
    semantics_of = interpret_pallas_call._get_parallel_dim_semantics

    def with_mapped_axes(compiler_params, axes):
        semantics = semantics_of(compiler_params, axes)
        return (False,) * axes if len(semantics) < axes else semantics

    monkeypatch.setattr(interpret_pallas_call, "_get_parallel_dim_semantics", with_mapped_axes)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", MAPPED)
def test_vmap_over_an_option(name, implementation, interpret_mapped):
    """Of an option alone, the arrays being shared: output and gradients."""
    options = MAPPED[name]()
    is_causal = options.pop("is_causal", False)
    arrays = qkv(B, T, S, N, K, H)

    def attend(options, implementation=implementation):
        output, vjp = jax.vjp(
            lambda *arrays: dot_product_attention(
                *arrays, is_causal=is_causal, implementation=implementation, **options
            ),
            *arrays,
        )
        return output, *vjp(output)

    alone = jax.jit(functools.partial(attend, implementation="reference"))
    looped = [alone(jax.tree.map(lambda x: x[i], options)) for i in range(M)]  # noqa: B023
    expected = jax.tree.map(lambda *x: np.stack(x), *looped)
    assert_close(jax.jit(jax.vmap(attend))(options), expected)
    assert np.abs(expected[0][0] - expected[0][1]).max() > 1e-3


@pytest.mark.tpu_compile
@pytest.mark.parametrize("name", ["bias", "mask", "dropout key", "lengths"])
def test_vmap_over_an_option_compiles(name):
    options = MAPPED[name]()

    def attend(*arrays):
        return jax.vmap(lambda options: dot_product_attention(*arrays, **options))(options)

    program = aot.compile_for_tpu(attend, *qkv(B, T, S, N, K, H))
    assert len(program.kernels) == 1


# --- One query, and a caller's shard_map ---


@pytest.mark.parametrize("implementation", ["xla", "pallas"])
def test_one_query_of_many_keys(implementation, interpret):
    """As a step of decoding: the last of 3000 positions, in a group of four heads."""
    arrays = qkv(2, 1, 3000, 4, 1)
    options = {
        "query_offset": 2999,
        "local_window_size": (2000, 0),
        "key_value_seq_lengths": np.array([3000, 2500]),
    }
    result = jax.jit(functools.partial(step, implementation=implementation, **options))(*arrays)
    assert_close(result, step(*arrays, implementation="reference", **options))


def test_the_kernels_inside_a_callers_shard_map(interpret):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,))
    arrays = qkv(2, 10, 10, 1, 1)
    mapped = jax.shard_map(
        functools.partial(step, implementation="pallas"),
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=False,
    )
    assert_close(jax.jit(mapped)(*arrays), step(*arrays, implementation="reference"))


@pytest.mark.tpu_compile
@pytest.mark.parametrize("mask", [None, lambda i, j: i >= j])
@pytest.mark.parametrize("check_vma", [True, False])
def test_a_callers_shard_map_compiled_for_tpu(check_vma, mask):
    """Of a mask that is a rule the units are listed: an array that no device has another of."""
    mesh = AbstractMesh((2,), ("data",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(
        functools.partial(step, mask=mask),
        in_specs=P("data"),
        out_specs=P("data"),
        check_vma=check_vma,
    )
    x = jax.ShapeDtypeStruct((4, 256, 2, 64), jnp.bfloat16)
    program = aot.compile_for_tpu(mapped, x, x, x, mesh=mesh)
    assert sorted(program.kernels) == ["flash_backward", "flash_forward"]
    assert program.collectives == {}
