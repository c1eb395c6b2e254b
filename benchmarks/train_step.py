"""A training step of the tiny model beside flax's own attention: `python -m benchmarks.train_step`.

Two models with the same parameters take the same step in turn, in one process: one with this
package's module, the other with flax's (attention and rotary embedding). Each pair of steps gives
one ratio; the median over the pairs is free of what slows the machine for longer than a pair.
"""

import dataclasses
import functools
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.results_file import write_results
from models.config import GPTConfig
from models.gpt import GPT
from train.config import RECIPES
from train.data import Batch
from train.step import create_state, make_optimizer, make_train_step

WARM_UP_PAIRS = 5
PAIRS = 60
TARGET_RATIO = 1.03


class FlaxAttention(nnx.Module):
    """flax's module behind the call of `models.gpt.Block`."""

    def __init__(self, attention: nnx.MultiHeadAttention):
        """Wraps it."""
        self.attention = attention

    def __call__(self, inputs, *, is_causal, segment_ids, positions, deterministic, rngs):
        """Attends; no segments and no positions, which flax's module does not have."""
        if segment_ids is not None or positions is not None:
            raise NotImplementedError("flax's module has no segments and no positions.")
        return self.attention(inputs, is_causal=is_causal, deterministic=deterministic, rngs=rngs)


def with_flax_attention(model: GPT) -> GPT:
    """A copy of the model, same parameters, with flax's module in each block."""
    config = model.config
    rope = nnx.RoPE(config.rotary.base)  # pyright: ignore[reportOptionalMemberAccess]
    model = nnx.clone(model)
    for block in model.blocks:
        attention = nnx.MultiHeadAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            in_features=config.width,
            dtype=config.compute_dtype,
            use_bias=config.use_bias,
            normalize_qk=config.normalize_query_key,  # with the modules that replace its own below
            attention_fn=functools.partial(nnx.dot_product_attention_with_rope, rope=rope),
            decode=False,
            keep_rngs=False,
            rngs=nnx.Rngs(0),
        )
        for name in ("query", "key", "value", "out", "query_ln", "key_ln"):
            setattr(attention, name, getattr(block.attention, name))
        block.attention = FlaxAttention(attention)  # pyright: ignore[reportAttributeAccessIssue]
    return model


def check_that_both_are_the_same(config: GPTConfig, tokens: jax.Array) -> None:
    """Compares their logits in float32."""
    ours = GPT(dataclasses.replace(config, dtype="float32"), rngs=nnx.Rngs(0))
    logits = [jax.jit(model)(tokens) for model in (ours, with_flax_attention(ours))]
    np.testing.assert_allclose(*logits, rtol=1e-3, atol=1e-4)


def main() -> None:
    """Measures, prints, and writes the result file."""
    recipe = RECIPES["tiny"]
    optimizer = make_optimizer(recipe.optimizer, recipe.steps)
    tokens = np.random.default_rng(0).integers(0, 256, (recipe.batch_size, recipe.row_tokens + 1))
    tokens = tokens.astype(np.int32)
    batch = jax.device_put(Batch(inputs=tokens[:, :-1], targets=tokens[:, 1:]))

    check_that_both_are_the_same(recipe.model, batch.inputs)

    ours = GPT(recipe.model, rngs=nnx.Rngs(0))
    steps = {}
    for name, model in (("ours", ours), ("flax", with_flax_attention(ours))):
        graphdef, state = create_state(model, optimizer)
        state = jax.tree.map(jnp.copy, state)  # the step donates it, and the models share arrays
        steps[name] = Stepper(make_train_step(graphdef, optimizer, seed=0), state, batch)

    seconds = {"ours": [], "flax": []}
    for pair in range(WARM_UP_PAIRS + PAIRS):
        order = ("ours", "flax") if pair % 2 else ("flax", "ours")
        for name in order:
            start = time.perf_counter()
            steps[name].take()
            if pair >= WARM_UP_PAIRS:
                seconds[name].append(time.perf_counter() - start)

    ratios = [a / b for a, b in zip(seconds["ours"], seconds["flax"], strict=True)]
    low, ratio, high = statistics.quantiles(ratios, n=4)
    row = {
        "model": "tiny",
        "batch_size": recipe.batch_size,
        "row_tokens": recipe.row_tokens,
        "dtype": recipe.model.dtype,
        "device": jax.devices()[0].device_kind,
        "pairs": PAIRS,
        "ours_milliseconds": round(1e3 * statistics.median(seconds["ours"]), 2),
        "flax_milliseconds": round(1e3 * statistics.median(seconds["flax"]), 2),
        "ratio": round(ratio, 4),
        "ratio_quartiles": [round(low, 4), round(high, 4)],
        "target_ratio": TARGET_RATIO,
    }
    for name, value in row.items():
        print(f"{name:20} {value}")
    print("wrote", write_results("train_step", "python -m benchmarks.train_step", [row]))


@dataclasses.dataclass
class Stepper:
    """A training step, its state, and the batch that it takes again and again."""

    train_step: jax.stages.Wrapped
    state: object
    batch: Batch

    def take(self) -> None:
        """Takes a step and waits for all of it."""
        self.state, _ = self.train_step(self.state, self.batch, 1)
        jax.block_until_ready(self.state)


if __name__ == "__main__":
    main()
