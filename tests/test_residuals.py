"""`jax.checkpoint` saves output and logsumexp by name, and the forward pass runs once."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from flax_pallas_attn import CHECKPOINT_NAMES, aot, dot_product_attention
from tests.jaxprs import equations

SAVED = jax.checkpoint_policies.save_only_these_names(*CHECKPOINT_NAMES)
B, T, N, K, H = 4, 256, 4, 2, 64


def step(policy, implementation=None):
    """Value and gradients of a layer that is computed again in the backward pass."""

    def layer(weights, x, key):
        query = jnp.sin(x @ weights)
        output = dot_product_attention(
            query, key, key, is_causal=True, implementation=implementation
        )
        return jnp.sin(output @ weights).astype(jnp.float32).sum()

    return jax.value_and_grad(jax.checkpoint(layer, policy=policy), (0, 1, 2))


def arguments(dtype=jnp.bfloat16):
    shapes = ((H, H), (B, T, N, H), (B, T, K, H))
    return [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]


def counts(policy, implementation):
    found = equations(step(policy, implementation), *arguments())
    return collections.Counter(
        eqn.params["name"] if eqn.primitive.name == "pallas_call" else eqn.primitive.name
        for eqn in found
    )


def test_the_forward_kernel_runs_once():
    again, saved = counts(None, "pallas"), counts(SAVED, "pallas")
    assert (again["flash_forward"], again["flash_backward"]) == (2, 1)
    assert (saved["flash_forward"], saved["flash_backward"]) == (1, 1)
    assert saved["sin"] == again["sin"] > 2  # the rest is still computed again


@pytest.mark.parametrize("name", CHECKPOINT_NAMES)
def test_both_are_needed(name):
    policy = jax.checkpoint_policies.save_only_these_names(name)
    assert counts(policy, "pallas")["flash_forward"] == 2


def test_the_blockwise_form_runs_once():
    saved, again = counts(SAVED, "xla"), counts(None, "xla")
    plain = collections.Counter(
        eqn.primitive.name
        for eqn in equations(
            lambda *arrays: jax.vjp(
                functools.partial(dot_product_attention, implementation="xla"), *arrays
            )[1](arrays[0]),
            *arguments()[1:2],
            *arguments()[2:] * 2,
        )
    )
    assert again["exp"] > saved["exp"] >= plain["exp"] > 0


@pytest.mark.tpu_compile
@pytest.mark.parametrize("mesh_shape", [None, (2, 2)], ids=["one device", "2x2"])
def test_compiled_for_tpu(mesh_shape):
    """Through `platform_dependent`, and on a mesh through `shard_map`."""
    mesh = mesh_shape and AbstractMesh(
        mesh_shape, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2
    )
    kernels = [
        sorted(aot.compile_for_tpu(step(policy), *arguments(), mesh=mesh).kernels)
        for policy in (SAVED, None)
    ]
    assert kernels == [
        ["flash_backward", "flash_forward"],
        ["flash_backward", "flash_forward", "flash_forward"],
    ]


def test_saving_changes_no_value():
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(x.shape).astype(np.float32) for x in arguments()]
    expected, saved = (jax.jit(step(policy))(*arrays) for policy in (None, SAVED))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-4), saved, expected
    )
