"""Tile sizes: they fit, for every generation and shape, and wrong ones are refused."""

import dataclasses

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import AbstractDevice, AbstractMesh

from flax_pallas_attn import Tiles, aot, dot_product_attention
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.tiles import Shape
from flax_pallas_attn.masking import Mask

KINDS = ("TPU v4", "TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x")
MIB = 1 << 20
SIZES = {
    "query": 256,
    "key": 128,
    "key_chunk": 512,
    "backward_key": 128,
    "backward_query": 256,
    "backward_query_chunk": 256,
}


def compiled_for(kind):
    """A context in which tracing finds that it is for a TPU of this kind."""
    mesh = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice(kind, 1, "tpu"))
    return jax.sharding.use_abstract_mesh(mesh)


def shape(
    queries=4096,
    keys=4096,
    head_dim=128,
    value_dim=128,
    itemsize=2,
    is_band=True,
    pair_bytes=0,
    token_rows=0,
):
    return Shape(
        queries=queries,
        keys=keys,
        head_dim=head_dim,
        value_dim=value_dim,
        itemsize=itemsize,
        is_band=is_band,
        pair_bytes=pair_bytes,
        token_rows=token_rows,
    )


def assert_tiles_fit(shape):
    tiles = tiles_lib.default_tiles(shape)
    limit = tiles_lib.vmem_limit_bytes()
    assert tiles_lib.forward_vmem_bytes(tiles, shape) <= limit
    assert tiles_lib.backward_vmem_bytes(tiles, shape, 0) <= limit
    # A tile that is larger than what there is computes nothing but padding.
    assert tiles.query < 2 * max(shape.queries, 128)
    assert tiles.key < 2 * max(shape.keys, 128)
    assert tiles.key_chunk < shape.keys + tiles.key
    assert tiles.backward_query_chunk < shape.queries + tiles.backward_query


@pytest.mark.parametrize("kind", KINDS)
@hypothesis.given(
    shape=st.builds(
        Shape,
        queries=st.integers(1, 300) | st.integers(1, 2**20),
        keys=st.integers(1, 300) | st.integers(1, 2**20),
        head_dim=st.integers(1, 512),
        value_dim=st.integers(1, 512),
        itemsize=st.sampled_from([2, 4]),
        is_band=st.booleans(),
        pair_bytes=st.sampled_from([0, 1, 4, 5]),
        token_rows=st.integers(0, 2),
    )
)
@hypothesis.settings(max_examples=200)
def test_tiles_fit_any_shape(kind, shape):
    with compiled_for(kind):
        assert_tiles_fit(shape)


def test_tiles_fit_where_nothing_is_known():
    """Then they are made for the smallest memory."""
    assert tiles_lib.tpu_kind() is None
    with compiled_for("TPU v4"):
        smallest = tiles_lib.vmem_limit_bytes()
    assert tiles_lib.vmem_limit_bytes() == smallest
    with compiled_for("TPU v9"):
        assert tiles_lib.vmem_limit_bytes() == smallest
    assert_tiles_fit(shape())


@pytest.mark.parametrize("kind", KINDS)
def test_whole_heads_stand_in_vmem_at_usual_lengths(kind):
    with compiled_for(kind):
        tiles = tiles_lib.default_tiles(shape(queries=4096, keys=4096, head_dim=64, value_dim=64))
    assert tiles.key_chunk == 4096


def test_a_head_that_is_too_large():
    too_large = shape(head_dim=2**16)
    with (
        compiled_for("TPU v4"),
        pytest.raises(
            NotImplementedError,
            match=r"no tiles fit \d+ bytes of VMEM at head size 65536 and value head size 128",
        ),
    ):
        tiles_lib.default_tiles(too_large)


@pytest.mark.parametrize("kind", KINDS)
def test_device_kind_comes_from_the_abstract_mesh(kind):
    with compiled_for(kind):
        assert tiles_lib.tpu_kind() == kind


def test_a_mesh_of_cpus_is_no_tpu():
    with jax.set_mesh(jax.make_mesh((8,), ("data",))):
        assert tiles_lib.tpu_kind() is None


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", aot.TOPOLOGIES)
def test_memory_of_each_generation_is_what_jax_says(topology):
    mesh = aot.topology_mesh(topology, {"x": 1})
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        capacity_bytes = pltpu.get_tpu_info().vmem_capacity_bytes
        limit = tiles_lib.vmem_limit_bytes()
    assert 0.8 * capacity_bytes <= limit <= capacity_bytes


@pytest.mark.parametrize("size", [0, -128, 100, 192])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_are_multiples_of_128(name, size):
    with pytest.raises(
        ValueError, match=rf"tiles\.{name}={size} must be a positive multiple of 128"
    ):
        Tiles(**SIZES | {name: size})


@pytest.mark.parametrize(
    ("chunk", "step"), [("key_chunk", "key"), ("backward_query_chunk", "backward_query")]
)
def test_chunks_are_multiples_of_tiles(chunk, step):
    with pytest.raises(
        ValueError, match=rf"tiles\.{chunk}=512 must be a multiple of tiles\.{step}=384"
    ):
        Tiles(**SIZES | {chunk: 512, step: 384})


def test_tiles_are_fixed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Tiles(**SIZES).query = 128


DENSE = jnp.ones((1, 1, 300, 1))


@pytest.mark.parametrize(
    ("mask", "is_band"),
    [
        (Mask(lower=0, upper=9), True),
        (Mask(rule=lambda i, j: i != j), False),
        (Mask(dense=DENSE), False),
    ],
)
def test_shape_of_a_call(mask, is_band):
    query, key, value = (
        jax.ShapeDtypeStruct((2, heads, tokens, size), jnp.bfloat16)
        for heads, tokens, size in ((4, 300, 64), (2, 500, 64), (2, 500, 32))
    )
    assert tiles_lib.shape_of(query, key, value, mask) == shape(
        queries=300,
        keys=500,
        head_dim=64,
        value_dim=32,
        is_band=is_band,
        pair_bytes=0 if mask.dense is None else 1,
        token_rows=sum(x is not None for x in (mask.positions, mask.segment_ids)),
    )


def test_gradients_of_keys_stay_in_vmem_while_they_fit():
    with compiled_for("TPU v4"):
        for keys, fit in ((1024, True), (2**17, False)):
            case = shape(keys=keys)
            assert tiles_lib.key_gradients_fit(tiles_lib.default_tiles(case), case) == fit


# The least there are: chunks are what a test makes too large.
SMALL = dict.fromkeys(SIZES, 128)


def traced(kind, tiles, wants_gradient):
    """Traces 4096 bfloat16 tokens of head size 128 with these tiles, for a TPU of this kind."""
    x = jax.ShapeDtypeStruct((1, 4096, 2, 128), jnp.bfloat16)

    def forward(x):
        return dot_product_attention(x, x, x, tiles=Tiles(**SMALL | tiles)).astype(jnp.float32)

    fn = jax.grad(lambda x: forward(x).sum()) if wants_gradient else forward
    with compiled_for(kind):
        return jax.eval_shape(fn, x)


def test_tiles_that_do_not_fit_are_refused():
    """With what they need, what there is, and what to do."""
    tiles = {"key_chunk": 2**16}
    with pytest.raises(
        ValueError,
        match=r"tiles=Tiles\(query=128, key=128, key_chunk=65536, \.\.\.\) do not fit: the forward "
        r"kernel needs some \d\d,\d{3},\d{3} bytes of VMEM with them, TPU v4 has 14,260,633 for "
        r"it\. Choose smaller ones, key_chunk first, or leave tiles out",
    ):
        traced("TPU v4", tiles, wants_gradient=False)
    traced("TPU v5 lite", tiles, wants_gradient=True)


def test_tiles_of_the_backward_kernel_count_where_there_is_a_gradient():
    tiles = {"backward_query_chunk": 2**15}
    traced("TPU v4", tiles, wants_gradient=False)
    with pytest.raises(ValueError, match=r"backward_query_chunk=32768, .* the backward kernel"):
        traced("TPU v4", tiles, wants_gradient=True)


def test_tiles_are_not_refused_where_no_tpu_is_known_of():
    """They may be meant for one with more memory; the compiler has the last word."""
    traced("CPU", {"key_chunk": 2**20, "backward_query_chunk": 2**20}, wants_gradient=True)


@pytest.mark.parametrize("heads_of", [tiles_lib.forward_heads, tiles_lib.backward_heads])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("heads", "group"), [(16, 1), (16, 4), (6, 3), (12, 12), (7, 1), (1, 1)])
def test_short_heads_share_a_grid_step(heads, group, kind, heads_of):
    with compiled_for(kind):
        for tokens in (64, 200, 512, 1000, 4096):
            call = shape(queries=tokens, keys=tokens)
            tiles = tiles_lib.default_tiles(call)
            together = heads_of(tiles, call, heads, group)
            assert heads % together == 0
            assert together % group == 0 or group % together == 0
            assert tiles_lib.forward_vmem_bytes(tiles, call, together) <= (
                tiles_lib.vmem_limit_bytes()
            )
            if tokens == 4096 or heads == 1:
                assert together == 1
            elif tokens <= 512 and heads != 7 and kind != "TPU v4":
                assert together > 1
