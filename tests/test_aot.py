"""What aot says of programs whose errors, memory and cycles are known beforehand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental import pallas as pl
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from flax_pallas_attn import aot

MATRIX = jax.ShapeDtypeStruct((256, 256), jnp.float32)
MATRIX_BYTES = 256 * 256 * 4


def double(x):
    def kernel(x_ref, out_ref):
        out_ref[...] = x_ref[...] * 2

    out_shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=out_shape, name="double")(x)


def product(x, y):
    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    out_shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
    return pl.pallas_call(kernel, out_shape=out_shape, name="product")(x, y)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
def test_compiles_a_kernel_for_every_generation(topology):
    program = aot.compile_for_tpu(lambda x: double(double(x)), MATRIX, topology=topology)
    assert program.kernels == ("double", "double")
    assert program.topology == topology
    assert program.device_count == 1
    assert (
        program.device_kind == program.compiled.input_shardings[0][0].device_set.pop().device_kind
    )
    assert program.argument_bytes == program.output_bytes == MATRIX_BYTES


@pytest.mark.tpu_compile
def test_kernels_keep_their_names_under_transformations():
    attend = jax.custom_vjp(double)
    attend.defvjp(lambda x: (double(x), None), lambda _, gradient: (product(gradient, gradient),))

    def loss(x):
        return jnp.sum(attend(jax.vmap(attend)(x[None])[0]))

    program = aot.compile_for_tpu(jax.value_and_grad(loss), MATRIX)
    assert sorted(program.kernels) == ["double", "double", "product", "product"]


@pytest.mark.tpu_compile
def test_short_names_mean_different_devices():
    kinds = {aot.topology_mesh(name, {"x": 1}).devices[0].device_kind for name in aot.TOPOLOGIES}
    assert len(kinds) == 5


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("donated", "alias_bytes"), [((), 0), ((0,), MATRIX_BYTES)])
def test_memory_counts_donation(donated, alias_bytes):
    program = aot.compile_for_tpu(jax.jit(lambda x: x + 1, donate_argnums=donated), MATRIX)
    assert program.argument_bytes == MATRIX_BYTES
    assert program.output_bytes == MATRIX_BYTES
    assert program.alias_bytes == alias_bytes
    assert program.temporary_bytes == 0
    assert program.total_bytes == 2 * MATRIX_BYTES - alias_bytes


@pytest.mark.tpu_compile
@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_a_mesh_shards_arguments_and_needs_collectives(axis_type):
    cpu_mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(axis_type,) * 2)
    array = jax.device_put(jnp.ones((256, 256)), NamedSharding(cpu_mesh, PartitionSpec("data")))
    abstract = jax.ShapeDtypeStruct(
        (256, 256), jnp.float32, sharding=PartitionSpec("data", "tensor")
    )

    def axis_types_and_sum(x, y):
        assert jax.sharding.get_abstract_mesh().axis_types == (axis_type,) * 2
        return jnp.sum(x + y)

    program = aot.compile_for_tpu(axis_types_and_sum, array, abstract, mesh=cpu_mesh)
    assert program.device_count == 4
    assert program.argument_bytes == MATRIX_BYTES // 2 + MATRIX_BYTES // 4
    assert program.collectives.keys() == {"all-reduce"}


@pytest.mark.tpu_compile
def test_one_device_needs_no_collectives():
    assert aot.compile_for_tpu(jnp.sum, MATRIX).collectives == {}


@pytest.mark.tpu_compile
def test_topology_mesh_gives_shardings_to_compile_with():
    mesh = aot.topology_mesh("v6e", {"data": 4}, axis_types=[AxisType.Explicit])
    sharding = NamedSharding(mesh, PartitionSpec("data"))
    step = jax.jit(lambda x: x * 2, in_shardings=sharding, out_shardings=sharding)
    program = aot.compile_for_tpu(step, MATRIX, topology="v6e", mesh=mesh)
    assert program.argument_bytes == program.output_bytes == MATRIX_BYTES // 4


@pytest.mark.tpu_compile
def test_takes_what_jit_takes():
    scaled = jax.jit(lambda x, factor: x * factor, static_argnums=1)
    assert aot.compile_for_tpu(scaled, MATRIX, 3).argument_bytes == MATRIX_BYTES
    assert aot.compile_for_tpu(lambda: jnp.ones((256, 256))).output_bytes == MATRIX_BYTES
    assert aot.compile_for_tpu(double, np.ones((256, 256))).argument_bytes == MATRIX_BYTES
    assert aot.compile_for_tpu(
        lambda key: jax.random.normal(key, (256, 256)), jax.random.key(0)
    ).output_bytes == MATRIX_BYTES  # fmt: skip

    linear = nnx.eval_shape(lambda: nnx.Linear(256, 256, use_bias=False, rngs=nnx.Rngs(0)))
    for call in (lambda module, x: module(x), nnx.jit(lambda module, x: module(x))):
        assert aot.compile_for_tpu(call, linear, MATRIX).argument_bytes == 2 * MATRIX_BYTES


@pytest.mark.tpu_compile
def test_mosaic_errors_come_through_with_function_and_topology():
    half = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    # The class differs between versions of jax.
    with pytest.raises(Exception, match="Mosaic failed to compile") as caught:
        aot.compile_for_tpu(functools.partial(double), half, topology="v5p")
    assert caught.value.__notes__ == ["While compiling double for v5p (TPU v5)."]


@pytest.mark.tpu_compile
def test_out_of_memory_is_an_error_here_as_there():
    too_large = jax.ShapeDtypeStruct((5, 2**30), jnp.float32)  # 20 GiB of the 16 that v5e has
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory on HBM"):
        aot.compile_for_tpu(lambda x: x + 1, too_large, topology="v5e")


@pytest.mark.tpu_compile
def test_errors_while_tracing_keep_their_type():
    with pytest.raises(TypeError, match="dot_general") as caught:
        aot.compile_for_tpu(jnp.matmul, MATRIX, jax.ShapeDtypeStruct((3, 3), jnp.float32))
    assert "While compiling matmul for v5e:2x2 (TPU v5 lite)." in caught.value.__notes__


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5", "v5e:3x3", "h100:2x2"])
def test_unknown_topology_lists_those_that_work(topology):
    with pytest.raises(ValueError, match=rf"topology='{topology}'.*v4, v5e, v5p, v6e, tpu7x"):
        aot.compile_for_tpu(double, MATRIX, topology=topology)


@pytest.mark.tpu_compile
def test_mesh_larger_than_topology():
    mesh = jax.sharding.AbstractMesh((8,), ("data",))
    with pytest.raises(ValueError, match=r"\{'data': 8\} needs 8 devices, .*'v5e:2x2' has 4"):
        aot.compile_for_tpu(double, MATRIX, mesh=mesh)


def test_without_libtpu_says_what_to_install(monkeypatch):
    def get_topology_desc(*args, **options):
        raise RuntimeError("JAX TPU support not installed")

    monkeypatch.setattr(aot.topologies, "get_topology_desc", get_topology_desc)
    with pytest.raises(NotImplementedError, match=r'pip install "jax\[tpu\]"'):
        aot.compile_for_tpu(double, MATRIX, topology="v5e:4x4")


@pytest.mark.tpu_compile
def test_cycles_of_a_product_are_those_of_matrix_unit_and_transfers():
    operand = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    cycles = aot.estimate_cycles(product, operand, operand, topology="v5e")
    (name,) = cycles
    assert name.startswith("product")
    # One grid step: operands in, product, result out, one after the other. v5e does 131,072 flop a
    # cycle at 1.5 GHz, and moves 819 GB/s.
    multiply = 2 * 512**3 / 131_072
    transfer = (2 * 512**2 * 2 + 512**2 * 4) / 819e9 * 1.5e9
    assert multiply + transfer < cycles[name] < 1.3 * (multiply + transfer)
    assert aot.estimate_cycles(product, operand, operand, topology="v5e") == cycles


@pytest.mark.tpu_compile
def test_cycles_take_donation_and_modules():
    cache = jax.ShapeDtypeStruct((64, 1024, 1024), jnp.float32)
    linear = nnx.eval_shape(lambda: nnx.Linear(1024, 8, use_bias=False, rngs=nnx.Rngs(0)))

    @functools.partial(jax.jit, donate_argnums=1)
    def write(linear, cache):
        return cache.at[0].set(0), linear(cache[1, :8])

    operations = aot.estimate_cycles(write, linear, cache)
    assert sum(operations.values()) > 0
    assert not [name for name in operations if name.startswith("copy")]


def test_cycles_refuse_what_cannot_be_handed_over():
    with pytest.raises(ValueError, match=r"argument 3, .* Bind it with functools\.partial"):
        aot.estimate_cycles(jnp.add, MATRIX, 3)


@pytest.mark.tpu_compile
def test_cycles_refuse_nnx_jit():
    with pytest.raises(ValueError, match=r"which jax\.jit did not make"):
        aot.estimate_cycles(nnx.jit(double), MATRIX)


@pytest.mark.tpu_compile
def test_cycles_of_what_does_not_compile():
    half = jax.ShapeDtypeStruct((256, 256), jnp.float16)
    with pytest.raises(RuntimeError, match=r"(?s)Simulating double on v5e.*Invalid vector type"):
        aot.estimate_cycles(double, half, topology="v5e")


def test_cycles_are_not_available_on_v4():
    for topology in ("v4", "v4:2x2x2"):
        with pytest.raises(NotImplementedError, match=f"topology='{topology}'.*not v4"):
            aot.estimate_cycles(double, MATRIX, topology=topology)


@pytest.mark.parametrize(
    "after",
    ["\n\n@ 0x7f (unknown)", "\n=== Source Location Trace: ===\nx.cc:4", "\n*** Check fail"],
)
def test_a_crash_of_the_simulator_is_one_line(after):
    stderr = (
        f"W1130 x.cc:1] hello\nF1130 22:14:38.7 2654 llo.cc:1697] Profiling failed: WHY.{after}"
    )
    assert aot._fatal_message(stderr) == "Profiling failed: WHY."
    assert aot._fatal_message("Killed") == "Killed"
    stderr = "Traceback:\n  File x\njax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: WHY\n\nmore"
    assert (
        aot._fatal_message(stderr) == "jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: WHY\n\nmore"
    )
    long = "jax.errors.JaxRuntimeError: WHY\n" + "x" * 9000
    assert aot._fatal_message("noise\n" + long) == long[:4000]
