"""Attention compiled for TPU: what Mosaic and XLA say of shapes, memory and copies.

A kernel that was only interpreted is not tested: Mosaic refuses what the interpreter accepts.
"""

import dataclasses
import functools
import itertools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from flax_pallas_attn import Positions, Rotary, SegmentIds, aot, dot_product_attention
from tests.jaxprs import equations

pytestmark = pytest.mark.tpu_compile

MIB = 1 << 20
B, N, K = 2, 4, 2


def of(*shape, dtype=jnp.bfloat16, sharding=None):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def integers(*shape):
    return of(*shape, dtype=jnp.int32)


# Each mask: what is static, and what is traced, for T queries and S keys.
MASKS = {
    "full": lambda T, S: ({}, {}),
    "causal": lambda T, S: ({"is_causal": True, "query_offset": S - T}, {}),
    "window": lambda T, S: ({"local_window_size": (50, 3)}, {}),
    "rule": lambda T, S: ({"is_causal": True, "mask": lambda i, j: (i - j) % 3 != 1}, {}),
    "segments": lambda T, S: (
        {"is_causal": True},
        {"segment_ids": SegmentIds(integers(B, T), integers(B, S))},
    ),
    "lengths": lambda T, S: (
        {},
        {"query_seq_lengths": integers(B), "key_value_seq_lengths": integers(B)},
    ),
    "positions": lambda T, S: (
        {"local_window_size": (90, 0)},
        {"positions": Positions(integers(B, T), integers(B, S))},
    ),
    "offsets, segments": lambda T, S: (
        {"is_causal": True},
        {
            "query_offset": integers(B),
            "segment_ids": SegmentIds(integers(B, T), integers(B, S)),
        },
    ),
    "dense": lambda T, S: ({"is_causal": True}, {"mask": of(B, N, T, S, dtype=bool)}),
    "dense of keys": lambda T, S: ({}, {"mask": of(B, 1, 1, S, dtype=jnp.float32)}),
    "dense of queries": lambda T, S: ({}, {"mask": of(1, N, T, 1, dtype=jnp.int8)}),
}


@dataclasses.dataclass(frozen=True)
class Shape:
    T: int
    S: int
    H: int
    Hv: int
    dtype: type = jnp.bfloat16

    def __str__(self):
        return f"T{self.T} S{self.S} H{self.H} Hv{self.Hv} {jnp.dtype(self.dtype).name}"


def compile_step(shape, mask, topology, heads=(N, K)):
    """Forward and backward of the public function, heads first, as one program."""
    static, traced = MASKS[mask](shape.T, shape.S)

    def step(query, key, value, cotangents, traced):
        attend = functools.partial(
            dot_product_attention,
            layout="BNTH",
            implementation="pallas",
            return_residual=True,
            **static,
            **traced,
        )
        output, vjp = jax.vjp(attend, query, key, value)
        return output, vjp(cotangents)

    query_heads, key_heads = heads
    arrays = (
        of(B, query_heads, shape.T, shape.H, dtype=shape.dtype),
        of(B, key_heads, shape.S, shape.H, dtype=shape.dtype),
        of(B, key_heads, shape.S, shape.Hv, dtype=shape.dtype),
        (
            of(B, query_heads, shape.T, shape.Hv, dtype=shape.dtype),
            of(B, query_heads, shape.T, dtype=jnp.float32),
        ),
    )
    program = aot.compile_for_tpu(step, *arrays, traced, topology=topology)
    assert program.kernels == ("flash_forward", "flash_backward")


# Each head size, each mask, and lengths of one token to many tiles.
QUICK = [
    (Shape(512, 512, 128, 128), "causal"),
    (Shape(1, 129, 16, 40), "full"),
    (Shape(127, 1000, 40, 16), "window"),
    (Shape(1000, 127, 64, 64), "segments"),
    (Shape(300, 333, 80, 96), "positions"),
    (Shape(129, 300, 96, 80), "rule"),
    (Shape(600, 600, 192, 128), "dense"),
    (Shape(700, 520, 256, 256), "offsets, segments"),
    (Shape(260, 260, 64, 128), "dense of keys"),
    (Shape(260, 390, 128, 64), "dense of queries"),
    (Shape(4092, 4092, 128, 128), "lengths"),
    (Shape(300, 250, 128, 64, jnp.float32), "segments"),
    (Shape(250, 250, 256, 256, jnp.float32), "causal"),
    (Shape(700, 130, 512, 512, jnp.float32), "full"),
    (Shape(32768, 32768, 128, 128), "segments"),
    (Shape(16384, 16384, 256, 256), "causal"),
]
GENERATIONS = tuple(aot.TOPOLOGIES)


@pytest.mark.parametrize(
    ("shape", "mask", "topology"),
    # v4 has the least memory and the oldest instructions. The others take turns.
    [(*case, "v4") for case in QUICK]
    + [(*case, GENERATIONS[1 + i % 4]) for i, case in enumerate(QUICK[:7])],
    ids=str,
)
def test_compiles(shape, mask, topology):
    compile_step(shape, mask, topology)


@pytest.mark.slow
@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("size", [16, 40, 64, 80, 96, 128, 192, 256])
def test_compiles_every_head_size_with_every_mask(size, mask, dtype, topology):
    compile_step(Shape(300, 1000, size, size, dtype), mask, topology)


@pytest.mark.slow
@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize(
    "lengths", [*itertools.product((1, 127, 129, 1000, 4092), repeat=2)], ids=str
)
def test_compiles_every_length(lengths, topology):
    T, S = lengths
    compile_step(Shape(T, S, 64, 80), "segments", topology)
    compile_step(Shape(T, S, 128, 128), "causal", topology)


@pytest.mark.slow
@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize("heads", [(8, 2), (4, 1), (6, 3), (1, 1)], ids=str)
def test_compiles_groups_of_long_sequences(heads, topology):
    for shape in (Shape(16384, 65536, 128, 128), Shape(131072, 131072, 256, 128, jnp.float32)):
        compile_step(shape, "causal", topology, heads)


# --- Case 1: memory, and work while tracing ---

LARGE = [of(18, 32, 16384, 256)] * 3


@pytest.mark.parametrize(
    ("length", "arguments"),
    [(16384, {}), (16384, {"is_causal": True}), (16000, {"is_causal": True})],
    ids=str,
)
def test_case_1_output_takes_the_memory_of_the_query(length, arguments):
    """[18, 32, 16384, 256] with q donated: o has no memory of its own. Nor at lengths nearby.

    Multiples of 16, that is: for others XLA gives the arguments of a program another layout.
    """
    attend = functools.partial(dot_product_attention, layout="BNTH", **arguments)
    arrays = [of(18, 32, length, 256)] * 3
    program = aot.compile_for_tpu(jax.jit(attend, donate_argnums=0), *arrays, topology="v5e:2x2")
    assert program.kernels == ("flash_forward",)
    assert program.temporary_bytes <= 64 * MIB
    assert program.alias_bytes == program.output_bytes >= 18 * 32 * length * 256 * 2


def test_case_1_does_not_fit_without_donation():
    """The test above would notice: q, k, v and o are 18 GiB."""
    with pytest.raises(jax.errors.JaxRuntimeError, match="Ran out of memory"):
        aot.compile_for_tpu(functools.partial(dot_product_attention, layout="BNTH"), *LARGE)


@pytest.mark.parametrize("arguments", [{}, {"is_causal": True}], ids=str)
def test_case_1_gradients_need_no_more_than_output_and_its_gradient(arguments):
    def loss(query, key, value):
        output = dot_product_attention(query, key, value, layout="BNTH", **arguments)
        return jnp.sum(output.astype(jnp.float32) ** 2)

    arrays = [of(4, 32, 16384, 256)] * 3
    program = aot.compile_for_tpu(jax.value_and_grad(loss, (0, 1, 2)), *arrays)
    assert program.kernels == ("flash_forward", "flash_backward")
    output_bytes, logsumexp_bytes = 4 * 32 * 16384 * 256 * 2, 4 * 32 * 16384 * 4
    assert program.temporary_bytes <= 2 * output_bytes + logsumexp_bytes + 64 * MIB


@pytest.mark.parametrize("implementation", [None, "pallas"])
def test_case_1_tracing_does_not_grow_with_the_sequence(implementation):
    def step(query, key, value):
        attend = functools.partial(
            dot_product_attention, layout="BNTH", is_causal=True, implementation=implementation
        )
        output, vjp = jax.vjp(attend, query, key, value)
        return vjp(output)

    counts = [len(equations(step, *[of(18, 32, T, 256)] * 3)) for T in (16384, 131072)]
    assert counts[0] < 5000
    assert counts[1] <= 1.1 * counts[0]


# --- Nothing stands between the projections and the kernels ---


def layer(weights, x, rotary):
    query, key, value = (
        jnp.einsum("btd,dnh->btnh", x, weights[name]) for name in ("query", "key", "value")
    )
    if rotary:
        query, key = (Rotary().apply(y, jnp.arange(x.shape[1])) for y in (query, key))
    output = dot_product_attention(query, key, value, is_causal=True)
    return x + jnp.einsum("btnh,nhd->btd", output, weights["output"])


def moved_in_memory(hlo_text, sizes):
    """Instructions that copy or turn an array of one of these sizes, prefetches to VMEM aside."""
    found = []
    for line in hlo_text.splitlines():
        match = re.search(r"= \(?\w+\[([\d,]+)\]\S* (copy|transpose|copy-start)\(", line)
        if match is None:
            continue
        dims = sorted(int(size) for size in match[1].split(",") if size != "1")
        if dims not in sizes:
            continue
        if match[2] == "copy-start":  # the same layout twice, one in VMEM: S(1)
            layouts = [re.sub(r"S\(\d\)", "", x) for x in re.findall(r"\[[\d,]+\](\{\S+?\})", line)]
            if layouts[0] == layouts[1]:
                continue
        found.append(line.strip()[:200])
    return found


@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("mesh_shape", [None, (2, 2)], ids=["one device", "2x2"])
def test_no_copy_of_an_activation_in_a_model(mesh_shape, rotary):
    """A layer that is `[B, T, N, H]` throughout, forward and backward; no size occurs twice."""
    B, T, N, K, H, D = 6, 384, 8, 4, 64, 256
    mesh = mesh_shape and AbstractMesh(
        mesh_shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    data, tensor = ("data", "tensor") if mesh else (None, None)
    weights = {
        "query": of(D, N, H, sharding=P(None, tensor)),
        "key": of(D, K, H, sharding=P(None, tensor)),
        "value": of(D, K, H, sharding=P(None, tensor)),
        "output": of(N, H, D, sharding=P(tensor)),
    }
    x = of(B, T, D, sharding=P(data))

    def step(weights, x):
        def loss(weights, x):
            return jnp.sum(layer(weights, x, rotary).astype(jnp.float32) ** 2)

        return jax.value_and_grad(loss, (0, 1))(weights, x)

    program = aot.compile_for_tpu(step, weights, x, mesh=mesh, topology="v5e:2x2")
    assert program.kernels == ("flash_forward", "flash_backward")
    assert program.collectives.keys() <= {"all-reduce"}
    parts = (1, 1) if mesh_shape is None else mesh_shape
    sizes = [sorted([B // parts[0], T, heads // parts[1], H]) for heads in (N, K)]
    assert moved_in_memory(program.hlo_text, sizes) == []


def test_a_copy_would_be_seen():
    """The other layout, in a model that is `[B, T, N, H]`, at a jit boundary: there it costs."""
    B, T, N, H = 6, 384, 8, 64
    program = aot.compile_for_tpu(dot_product_attention, *[of(B, T, N, H)] * 3)
    assert moved_in_memory(program.hlo_text, [sorted([B, T, N, H])])
