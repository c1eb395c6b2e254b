"""A training step: the optimizer is AdamW as written down, and devices do not change it."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from flax_pallas_attn import aot
from models.config import GPTConfig
from models.gpt import GPT
from train.config import RECIPES, OptimizerConfig
from train.data import Batch
from train.loss import IGNORED
from train.mesh import by_row, data_mesh, replicated
from train.step import (
    TrainState,
    all_finite,
    create_state,
    make_evaluation_step,
    make_optimizer,
    make_train_step,
)

CONFIG = GPTConfig(
    vocab_size=32,
    context_tokens=16,
    num_layers=1,
    num_heads=2,
    num_kv_heads=2,
    width=16,
    mlp_width=32,
    rotary=None,
    normalization="layernorm",
    mlp="gelu",
    use_bias=False,  # a key's bias has no gradient but rounding, which Adam would make large
    tie_head=True,
    dtype="float32",
)
OPTIMIZER = OptimizerConfig(
    learning_rate=1e-2,
    warmup_steps=4,
    final_learning_rate=1e-3,
    beta1=0.8,
    beta2=0.9,
    weight_decay=0.1,
    max_gradient_norm=0.5,
)
STEPS = 12


def make_batch(step):
    tokens = np.random.default_rng(step).integers(0, 32, (8, 17)).astype(np.int32)
    return Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:])


@pytest.fixture(scope="module")
def start():
    optimizer = make_optimizer(OPTIMIZER, STEPS)
    graphdef, state = create_state(GPT(CONFIG, rngs=nnx.Rngs(0)), optimizer)
    return graphdef, optimizer, state


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_one_value_that_is_not_finite_is_found(value):
    tree = {"count": jnp.int32(3), "kernel": jnp.ones((3, 5))}
    assert all_finite(tree)
    assert not all_finite(tree | {"bias": jnp.ones(4).at[2].set(value)})


def test_steps_are_adamw_with_clipping_warmup_and_cosine(start):
    """The formulas, written out in float64 for the gradients that JAX computes."""
    graphdef, optimizer, state = start
    train_step = make_train_step(graphdef, optimizer, seed=0)

    @jax.jit
    def gradients_of(parameters, batch):
        def loss(parameters):
            logits = nnx.merge(graphdef, parameters)(batch.inputs)
            picked = jnp.take_along_axis(
                jax.nn.log_softmax(logits), batch.targets[..., None], axis=-1
            )
            return -picked.mean()

        return jax.grad(loss)(parameters)

    state = jax.tree.map(jnp.copy, state)
    mean = jax.tree.map(lambda p: np.zeros(p.shape), state.parameters)
    square = mean
    for step in range(1, 8):
        batch = make_batch(step)
        gradients = jax.tree.map(np.float64, gradients_of(state.parameters, batch))
        norm = np.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        before = jax.tree.map(np.float64, state.parameters)
        state, metrics = train_step(state, batch, step)
        np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-5)

        clipped = jax.tree.map(lambda g, n=norm: g * min(1, 0.5 / n), gradients)
        mean = jax.tree.map(lambda m, g: 0.8 * m + 0.2 * g, mean, clipped)
        square = jax.tree.map(lambda s, g: 0.9 * s + 0.1 * g**2, square, clipped)
        done = step - 1  # the rate follows the steps done
        share = (1 + np.cos(np.pi * (done - 4) / (STEPS - 4))) / 2
        rate = 1e-2 * done / 4 if done < 4 else 1e-3 + 9e-3 * share

        def expect(path, p, m, s, rate=rate, step=step):
            adam = (m / (1 - 0.8**step)) / (np.sqrt(s / (1 - 0.9**step)) + 1e-8)
            decayed = path[-1].key in ("kernel", "embedding")
            return p - rate * (adam + 0.1 * p * decayed)

        expected = jax.tree_util.tree_map_with_path(expect, before, mean, square)
        jax.tree.map(
            lambda got, want: np.testing.assert_allclose(got, want, rtol=1e-4, atol=2e-6),
            state.parameters,
            expected,
        )


def test_eight_devices_step_as_one(start):
    graphdef, optimizer, state = start
    train_step = make_train_step(graphdef, optimizer, seed=0)
    mesh = data_mesh(8)
    alone = jax.tree.map(jnp.copy, state)
    together = jax.device_put(jax.tree.map(jnp.copy, state), replicated(mesh))
    for step in range(1, 4):
        alone, alone_metrics = train_step(alone, make_batch(step), step)
        with jax.set_mesh(mesh):
            batch = jax.device_put(make_batch(step), by_row(mesh))
            together, together_metrics = train_step(together, batch, step)
        np.testing.assert_allclose(alone_metrics, together_metrics, rtol=1e-5)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), alone, together
    )


def test_dropout_is_a_function_of_seed_and_step():
    optimizer = make_optimizer(OPTIMIZER, STEPS)
    config = dataclasses.replace(CONFIG, dropout_rate=0.5)
    graphdef, state = create_state(GPT(config, rngs=nnx.Rngs(0)), optimizer)

    def losses(seed, *steps):
        train_step = make_train_step(graphdef, optimizer, seed)
        batch = make_batch(1)
        return [
            float(train_step(jax.tree.map(jnp.copy, state), batch, step)[1].loss) for step in steps
        ]

    first, second, again = losses(0, 1, 2, 1)
    [other] = losses(1, 1)
    assert first == again
    assert len({first, second, other}) == 3


def test_evaluation_counts_real_targets_without_dropout(start):
    graphdef, _, state = start
    inputs, targets = make_batch(1)
    batch = Batch(inputs=inputs, targets=np.where(np.arange(8)[:, None] < 5, targets, IGNORED))
    total, count = make_evaluation_step(graphdef)(state.parameters, batch)
    assert count == 5 * 16
    first = Batch(inputs=inputs[:5], targets=targets[:5])
    expected, _ = make_evaluation_step(graphdef)(state.parameters, first)
    np.testing.assert_allclose(total, expected, rtol=1e-6)


@pytest.mark.tpu_compile
@pytest.mark.parametrize("generation", aot.TOPOLOGIES)
def test_the_tiny_step_compiles_for_tpu(generation):
    """On four chips: layers run the kernels, the state stays in place, gradients are summed."""
    recipe = RECIPES["tiny"]
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    model = nnx.eval_shape(lambda: GPT(recipe.model, rngs=nnx.Rngs(0)))
    graphdef, variables = nnx.split(model)
    parameters = nnx.to_pure_dict(variables)
    state = TrainState(parameters, jax.eval_shape(optimizer.init, parameters))
    mesh = aot.topology_mesh(generation, {"data": 4})
    rows = jax.ShapeDtypeStruct(
        (recipe.batch_size, recipe.row_tokens), jnp.int32, sharding=by_row(mesh)
    )
    state = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=replicated(mesh)), state
    )
    program = aot.compile_for_tpu(
        make_train_step(graphdef, optimizer, recipe.seed),
        state,
        Batch(inputs=rows, targets=rows),
        1,
        topology=generation,
        mesh=mesh,
    )
    layers = recipe.model.num_layers
    assert sorted(program.kernels) == ["flash_backward"] * layers + ["flash_forward"] * layers
    assert set(program.collectives) == {"all-reduce"}
    state_bytes = sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(state))
    assert program.alias_bytes >= state_bytes
