"""The model's configuration: presets are the published sizes, wrong values are named."""

import dataclasses
import math

import jax
import pytest
from flax import nnx

from flax_pallas_attn.rotary import Rotary
from models.config import PRESETS, GPTConfig
from models.gpt import GPT


@pytest.mark.parametrize(
    ("preset", "published"),
    [("gpt2", 124_439_808), ("gpt2-medium", 354_823_168), ("llama-1b", 1_235_814_400)],
)
def test_presets_have_the_published_number_of_parameters(preset, published):
    model = nnx.eval_shape(lambda: GPT(PRESETS[preset], rngs=nnx.Rngs(0)))
    shapes = jax.tree.leaves(nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    assert sum(math.prod(leaf.shape) for leaf in shapes) == published


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 0}, "num_layers=0 must be at least 1"),
        ({"num_heads": 3}, "num_heads=3 does not divide width=128"),
        ({"num_heads": 4, "num_kv_heads": 3}, "num_kv_heads=3 does not divide num_heads=4"),
        ({"num_heads": 128, "num_kv_heads": 1}, "heads of 1 features"),
        ({"rotary": Rotary(dims=100)}, "rotary.dims=100 is more than the 64 features of a head"),
        ({"normalization_epsilon": math.nan}, "normalization_epsilon=nan must be finite"),
        ({"dropout_rate": 1.0}, "dropout_rate=1.0 must be in"),
        ({"local_window_size": -1}, "local_window_size=-1 must not be negative"),
        ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0 must be positive"),
        ({"logits_soft_cap": math.nan}, "logits_soft_cap=nan must be positive"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(PRESETS["tiny"], **changes)


def test_config_is_hashable_and_frozen():
    config = PRESETS["tiny"]
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.width = 1  # pyright: ignore[reportAttributeAccessIssue]
    assert isinstance(config, GPTConfig)
