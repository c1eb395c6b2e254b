"""What `explain_attention` says is what `dot_product_attention` does."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from flax_pallas_attn import (
    Alibi,
    AttentionSharding,
    Dropout,
    Positions,
    SegmentIds,
    aot,
    dot_product_attention,
    explain_attention,
)
from flax_pallas_attn.kernels import tiles as tiles_lib
from tests.jaxprs import kernels

MIB = 1 << 20


def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def qkv(B=2, T=1000, S=1000, N=8, K=2, H=64, dtype=jnp.bfloat16):
    return tuple(of(*shape, dtype=dtype) for shape in ((B, T, N, H), (B, S, K, H), (B, S, K, H)))


def compiled_for(kind="TPU v5 lite", **axes):
    axes = axes or {"data": 1}
    mesh = AbstractMesh(
        tuple(axes.values()),
        tuple(axes),
        axis_types=(AxisType.Auto,) * len(axes),
        abstract_device=AbstractDevice(kind, 1, "tpu"),
    )
    return jax.sharding.use_abstract_mesh(mesh)


def test_takes_the_arguments_of_the_function_itself():
    parameters = [
        [(p.name, p.kind, p.default) for p in inspect.signature(fn).parameters.values()]
        for fn in (explain_attention, dot_product_attention)
    ]
    assert parameters[0] == parameters[1]


def test_reads_as_text():
    with compiled_for(data=2, tensor=2):
        text = str(explain_attention(*qkv(B=8), is_causal=True))
    assert text.split("\ntiles: ")[0] == (
        "on TPU: pallas; elsewhere: xla\n"
        "  not xla: pallas takes the call and comes first\n"
        "  not reference: pallas takes the call and comes first\n"
        "TPU generation: TPU v5 lite\n"
        "mesh: batch over data, heads over tensor\n"
        "one device: query [4, 4, 1000, 64], key [4, 1, 1000, 64]"
    )


@pytest.mark.parametrize("kind", ["TPU v4", "TPU v5 lite", "TPU7x", None])
@pytest.mark.parametrize(
    ("shapes", "arguments"),
    [
        ({}, {"is_causal": True}),
        ({"T": 5}, {"is_causal": True, "query_offset": 900}),
        ({"S": 300, "dtype": jnp.float32}, {"bias": of(8, 1000, 300, dtype=jnp.float32)}),
        ({"T": 40_000, "S": 40_000, "H": 128, "K": 8}, {"local_window_size": (512, 0)}),
    ],
    ids=str,
)
def test_tiles_and_vmem_are_those_of_the_kernels(shapes, arguments, kind, monkeypatch):
    """Also where the kernels see folded heads, or keep their sums in HBM."""
    arrays = qkv(**shapes)
    asked = []
    limit_of = tiles_lib.vmem_limit_bytes

    def vmem_limit_bytes(estimate=None):
        if estimate is not None:
            asked.append(estimate)
        return limit_of(estimate)

    def step(query, key, value):
        def attend(*arrays):
            return dot_product_attention(*arrays, **values, implementation="pallas")

        output, vjp = jax.vjp(attend, query, key, value)
        return vjp(output)

    values = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
        arguments,
    )
    mesh = compiled_for(kind) if kind else compiled_for("CPU")
    with mesh:
        explanation = explain_attention(*arrays, **arguments)
        monkeypatch.setattr(tiles_lib, "vmem_limit_bytes", vmem_limit_bytes)
        assert kernels(step, *arrays).keys() >= {"flash_forward", "flash_backward"}
    assert explanation.on_tpu == "pallas"
    assert explanation.device_kind == kind
    assert explanation.forward_vmem_bytes == asked[0]
    assert explanation.backward_vmem_bytes in asked[1:]
    assert explanation.is_folded == (arrays[0].shape[1] < 128)


def test_reasons_of_all():
    half = qkv(dtype=jnp.float16)
    explanation = explain_attention(*half)
    assert (explanation.on_tpu, explanation.elsewhere) == ("xla", "xla")
    assert "dtype float16 has no TPU kernel" in explanation.reasons["pallas"]
    assert explanation.reasons["reference"] == "xla takes the call and comes first"
    assert explanation.tiles is None
    assert explanation.forward_vmem_bytes is None
    assert "tiles" not in str(explanation)

    insisted = explain_attention(*half, implementation="pallas")
    assert insisted.on_tpu is None
    assert insisted.elsewhere is None
    assert str(insisted).startswith("on TPU: nothing; elsewhere: nothing\n  not pallas: dtype")

    plain = explain_attention(*qkv(), implementation="reference")
    assert plain.on_tpu == plain.elsewhere == "reference"
    assert plain.reasons == dict.fromkeys(
        ("pallas", "xla"), 'implementation="reference" was asked for'
    )
    assert explain_attention(*qkv(B=0)).reasons["pallas"] == "the batch is empty"


def test_placement():
    mesh = compiled_for(data=2, fsdp=2, tensor=4)
    with mesh:
        explanation = explain_attention(*qkv(B=6, K=1))
        kept = explain_attention(*qkv(B=6), sharding=AttentionSharding(heads=None))
    assert (explanation.batch_axes, explanation.head_axes) == (("data",), ("tensor",))
    assert explanation.replicated_axes == ("fsdp",)
    assert "mesh: batch over data, heads over tensor, repeated over fsdp" in str(explanation)
    assert explanation.query_shape == (3, 2, 1000, 64)
    assert explanation.key_shape == (3, 1, 1000, 64)
    assert kept.head_axes == ()
    assert kept.query_shape == (3, 8, 1000, 64)
    assert explain_attention(*qkv()).batch_axes is None
    with mesh, pytest.raises(ValueError, match="query has 6 heads, which the mesh axes"):
        explain_attention(*qkv(N=6))


def test_every_option_may_be_abstract():
    ids = of(2, 1000, dtype=jnp.int32)
    explanation = explain_attention(
        *qkv(),
        mask=of(2, 1, 1, 1000, dtype=bool),
        bias=Alibi(of(8, dtype=jnp.float32)),
        scale=of(dtype=jnp.float32),
        query_seq_lengths=of(2, dtype=jnp.int32),
        key_value_seq_lengths=[3, 1000],
        segment_ids=SegmentIds(ids, ids),
        positions=Positions(ids, ids),
        sinks=of(8, dtype=jnp.float32),
        dropout=Dropout(rate=0.1, key=jax.eval_shape(lambda: jax.random.key(0))),
        return_residual=True,
    )
    assert explanation.on_tpu == "pallas"
    turned = [of(2, n, 1000, 64) for n in (8, 2, 2)]
    assert explain_attention(*turned, layout="BNTH").query_shape == (2, 8, 1000, 64)


def test_wrong_arguments_raise_as_they_do_there():
    for arguments, message in (
        ({"mask": of(7, 7, dtype=bool)}, r"mask has shape \(7, 7\)"),
        ({"implementation": "flash"}, "implementation='flash' is not known"),
        ({"return_residual": 1}, "return_residual=1 must be True or False"),
        ({"sharding": "data"}, "sharding='data' must be AttentionSharding"),
    ):
        with pytest.raises(ValueError, match=message):
            explain_attention(*qkv(), **arguments)


def test_costs_nothing():
    """Half a terabyte of queries, were they made."""
    explanation = explain_attention(*qkv(B=1024, T=2**20, S=2**20, N=32, H=128))
    assert explanation.on_tpu == "pallas"


def test_inside_jit_as_outside():
    query = np.zeros((2, 16, 4, 8), np.float32)
    found = []
    jax.eval_shape(lambda x: found.append(explain_attention(x, x, x)), query)
    assert found == [explain_attention(query, query, query)]


@pytest.mark.tpu_compile
def test_a_topology_is_a_generation():
    with jax.set_mesh(aot.topology_mesh("v6e", {"data": 4})):
        explanation = explain_attention(*qkv(B=4))
    assert explanation.device_kind == "TPU v6 lite"
    assert explanation.vmem_bytes > 100 * MIB
    assert explanation.query_shape == (1, 8, 1000, 64)
