"""The blockwise form: the conformance suite, and what is its own."""

import dataclasses
import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from flax_pallas_attn import blockwise, reference
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, SegmentIds
from tests import conformance
from tests.conformance import quick_jit
from tests.drawn import combinations

# Tiles that divide neither T nor S, so that every case has several, of every kind.
attend = functools.partial(blockwise.attend, tiles=(16, 24))

CASES = {case.name: case for case in conformance.cases()}


@pytest.mark.parametrize("check", conformance.checks(), ids=str)
def test_conforms(check):
    check(attend)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["causal", "every option, segments, causal"])
def test_conforms_without_loops(name, dtype):
    conformance.check_case(blockwise.attend, CASES[name], dtype)


def test_conforms_in_float16():
    conformance.check_case(attend, CASES["segments, causal, window"], "float16")


def test_conforms_in_float64(x64):
    conformance.check_case(attend, CASES["every option, segments, causal"], "float64")


@hypothesis.given(combinations())
@hypothesis.settings(max_examples=6)
def test_drawn(combination):
    combination.check(attend)


@pytest.mark.slow
@hypothesis.given(combinations())
@hypothesis.settings(max_examples=2000)
def test_drawn_by_the_thousand(combination):
    combination.check(attend)


def small(batch=2, heads=4, kv_heads=2, tokens=40, head_size=16, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    counts = (heads, kv_heads, kv_heads)
    return [
        jax.random.normal(key, (batch, count, tokens, head_size), dtype)
        for key, count in zip(keys, counts, strict=True)
    ]


def loss(query, key, value, mask=Mask(lower=0), logits=Logits()):  # noqa: B008
    output, logsumexp = attend(query, key, value, mask, logits, scale=0.25)
    weight = jnp.cos(jnp.arange(output.size, dtype=jnp.float32)).reshape(output.shape)
    return (output * weight).sum() + jnp.sin(logsumexp).sum()


value_and_gradients = jax.value_and_grad(loss, argnums=(0, 1, 2))


def assert_trees_close(actual, expected, tolerance=1e-5):
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * max(1, np.abs(y).max()), rtol=0)


def test_vmap_over_everything():
    arrays = [jnp.stack([x, x[:, ::-1]]) for x in small()]
    one = quick_jit(value_and_gradients)
    expected = [one(*(x[n] for x in arrays)) for n in range(2)]
    assert_trees_close(
        quick_jit(jax.vmap(value_and_gradients))(*arrays),
        jax.tree.map(lambda *x: np.stack(x), *expected),
    )


def test_vmap_over_masks_alone():
    arrays = small()
    ids = jnp.stack([jnp.arange(40) // 13, jnp.arange(40) // 25 - 1])[:, None].repeat(2, 1)

    def of(ids):
        return value_and_gradients(*arrays, Mask(lower=0, segment_ids=SegmentIds(ids, ids)))

    one = quick_jit(of)
    expected = [one(ids[n]) for n in range(2)]
    assert_trees_close(
        quick_jit(jax.vmap(of))(ids), jax.tree.map(lambda *x: np.stack(x), *expected)
    )


def test_scan_and_remat():
    query, key, value = small()

    def layer(x, _):
        output, _ = attend(x, key, value, Mask(lower=0), Logits(), scale=0.25)
        return x + output, None

    def total(x, wrap):
        return (jax.lax.scan(wrap(layer), x, None, length=3)[0] ** 2).sum()

    def unrolled(x):
        for _ in range(3):
            x = layer(x, None)[0]
        return (x**2).sum()

    expected = quick_jit(jax.grad(unrolled))(query)
    for wrap in (lambda layer: layer, jax.checkpoint):
        assert_trees_close(
            quick_jit(jax.grad(functools.partial(total, wrap=wrap)))(query), expected
        )


def test_traced_mask_in_while_loop():
    arrays = small()

    def step(state):
        count, dense, total = state
        return (
            count + 1,
            dense & (jnp.arange(40) % 7 != count),
            total + loss(*arrays, Mask(dense=dense)),
        )

    start = (0, jnp.ones((1, 1, 1, 40), bool), jnp.float32(0))
    _, _, actual = quick_jit(lambda s: jax.lax.while_loop(lambda s: s[0] < 3, step, s))(start)
    dense, expected = np.ones((1, 1, 1, 40), bool), 0
    for count in range(3):
        expected += quick_jit(loss)(*arrays, Mask(dense=jnp.asarray(dense)))
        dense = dense & (np.arange(40) % 7 != count)
    assert_trees_close(actual, expected)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_shard_map(check_vma):
    """Queries differ between devices, keys and bias do not: their gradients are summed."""
    query, key, value = small(batch=4, kv_heads=4)
    ids = jnp.arange(40)[None].repeat(4, 0) // 15
    bias = jax.random.normal(jax.random.key(1), (1, 1, 40, 40))
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    def outputs(query, key, value, ids, bias):
        mask = Mask(lower=0, segment_ids=SegmentIds(ids, ids))
        key = key.repeat(query.shape[0], 0)
        return attend(query, key, value, mask, Logits(bias=bias), scale=0.25)

    split = P("data", "tensor")
    sharded = jax.shard_map(
        outputs,
        mesh=mesh,
        in_specs=(split, P(None, "tensor"), split, P("data"), P()),
        out_specs=(split, split),
        check_vma=check_vma,
    )

    def total(attend, query, key, value, bias):
        output, logsumexp = attend(query, key[:1], value, ids, bias)
        return jnp.sin(output).sum() + logsumexp.sum()

    grad = jax.grad(total, argnums=(1, 2, 3, 4))
    actual = quick_jit(functools.partial(grad, sharded))(query, key, value, bias)
    expected = quick_jit(functools.partial(grad, outputs))(query, key, value, bias)
    assert_trees_close(actual, expected)


def test_cotangent_of_one_document_leaves_the_other():
    """A document whose loss is NaN: the other's gradients are finite, and the same as before."""
    arrays = small()
    ids = jnp.arange(40)[None].repeat(2, 0) // 19
    mask = Mask(segment_ids=SegmentIds(ids, ids))

    @quick_jit
    def pullback(cotangents):
        return jax.vjp(lambda *x: attend(*x, mask, Logits(), scale=0.25), *arrays)[1](cotangents)

    cotangents = [jnp.ones_like(arrays[0]), jnp.ones((2, 4, 40))]
    clean = pullback(tuple(cotangents))
    for which in range(2):
        poisoned = list(cotangents)
        poisoned[which] = cotangents[which].at[:, :, 5].set(jnp.nan)
        actual = pullback(tuple(poisoned))
        for x, y in zip(actual, clean, strict=True):
            np.testing.assert_array_equal(x[:, :, 19:], y[:, :, 19:])
        assert np.isnan(actual[0][:, :, 5]).all()


def test_slopes_are_not_trained():
    arrays = small()

    def of_slopes(slopes):
        return loss(*arrays, logits=Logits(slopes=slopes))

    assert not quick_jit(jax.grad(of_slopes))(jnp.arange(4.0)).any()


def test_dropout_of_a_part_is_the_part_of_dropout():
    arrays = small(batch=4, kv_heads=4)
    logits = Logits(**conformance.dropout(0.5))
    here = dataclasses.replace(logits, first_batch=jnp.int32(2), first_head=jnp.int32(1))
    output = quick_jit(lambda logits, *x: attend(*x, Mask(), logits, scale=0.25)[0])
    whole = output(logits, *arrays)
    part = output(here, *(x[2:, 1:3] for x in arrays))
    np.testing.assert_allclose(part, whole[2:, 1:3], atol=1e-5)


def test_bfloat16_of_many_heads():
    """XLA's CPU backend has no product of bfloat16 with many batch rows and a turned operand."""
    arrays = small(batch=16, kv_heads=4, tokens=64, head_size=32, dtype=jnp.bfloat16)

    def of_one_tile(*x):
        return blockwise.attend(*x, Mask(), Logits(), scale=0.25)[0].astype(jnp.float32).sum()

    for x in quick_jit(jax.grad(of_one_tile, argnums=(0, 1, 2)))(*arrays):
        assert np.isfinite(x.astype(np.float32)).all()


def temporary_bytes(attend, tokens):
    def step(arrays, cotangents):
        pullback = jax.vjp(lambda *x: attend(*x, Mask(lower=0), Logits(), scale=0.125), *arrays)[1]
        return pullback(cotangents)

    array = jax.ShapeDtypeStruct((1, 2, tokens, 64), jnp.float32)
    row = jax.ShapeDtypeStruct(array.shape[:3], jnp.float32)
    compiled = jax.jit(step).lower([array] * 3, (array, row)).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory():
    """At most a tenth of the plain form's at T = 8192, and linear in T."""
    ours = temporary_bytes(blockwise.attend, 8192)
    assert ours <= temporary_bytes(reference.attend, 8192) / 10
    assert temporary_bytes(blockwise.attend, 32768) < 4 * ours
