"""One step of training, and of evaluation, as jitted functions of plain arrays."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from models.gpt import GPT
from train.config import OptimizerConfig
from train.data import Batch
from train.loss import cross_entropy

DECAYED_PARAMETERS = ("kernel", "embedding")


class TrainState(NamedTuple):
    """What training changes: plain nested dictionaries and tuples of arrays."""

    parameters: Any
    optimizer_state: Any


class StepMetrics(NamedTuple):
    """Of one batch, before the update; float32 `[]`."""

    loss: jax.Array
    grad_norm: jax.Array


type EvaluationStep = Callable[[Any, Batch], tuple[jax.Array, jax.Array]]


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """Clipping by global norm, then AdamW with warm-up and cosine decay.

    Source: Loshchilov and Hutter, 2019, "Decoupled Weight Decay Regularization"
    (arXiv 1711.05101).

    Args:
      config: Of the optimizer.
      steps: Of the whole run; the learning rate reaches its last value there.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=steps,
        end_value=config.final_learning_rate,
    )
    return optax.chain(
        optax.clip_by_global_norm(config.max_gradient_norm),
        optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=_is_decayed,
        ),
    )


def create_state(
    model: GPT, optimizer: optax.GradientTransformation
) -> tuple[nnx.GraphDef[GPT], TrainState]:
    """Takes a model apart: its structure, and the state of a training that is about to begin."""
    graphdef, variables = nnx.split(model)
    parameters = nnx.to_pure_dict(variables)
    return graphdef, TrainState(parameters, optimizer.init(parameters))


def make_train_step(
    graphdef: nnx.GraphDef[GPT], optimizer: optax.GradientTransformation, seed: int
) -> jax.stages.Wrapped:
    """The jitted function `(state, batch, step) -> (state, metrics)`; the state is donated.

    Args:
      graphdef: Of the model.
      optimizer: As `make_optimizer` builds it.
      seed: Of dropout, which is a function of seed and step.
    """

    def train_step(state, batch, step):
        dropout_key = jax.random.fold_in(jax.random.key(seed), step)

        def mean_loss(parameters):
            logits = nnx.merge(graphdef, parameters)(
                batch.inputs, deterministic=False, rngs=nnx.Rngs(dropout=dropout_key)
            )
            total, count = cross_entropy(logits, batch.targets)
            return total / count

        loss, gradients = jax.value_and_grad(mean_loss)(state.parameters)
        updates, optimizer_state = optimizer.update(
            gradients, state.optimizer_state, state.parameters
        )
        parameters = optax.apply_updates(state.parameters, updates)
        metrics = StepMetrics(loss=loss, grad_norm=optax.tree.norm(gradients))
        return TrainState(parameters, optimizer_state), metrics

    return jax.jit(train_step, donate_argnums=0)


def make_evaluation_step(
    graphdef: nnx.GraphDef[GPT],
) -> EvaluationStep:
    """The function `(parameters, batch) -> (sum of losses, number of targets)`, compiled once."""

    def evaluation_step(parameters, batch):
        logits = nnx.merge(graphdef, parameters)(batch.inputs, deterministic=True)
        return cross_entropy(logits, batch.targets)

    return jax.jit(evaluation_step)


@jax.jit
def all_finite(tree: Any) -> jax.Array:
    """Whether no array of a tree holds a NaN or an infinity; bool `[]`."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree)]).all()


def _is_decayed(parameters):
    """True for matrices; vectors (biases, scales of norms) are not pulled towards zero."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: path[-1].key in DECAYED_PARAMETERS, parameters
    )
