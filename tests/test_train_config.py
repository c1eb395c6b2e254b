"""Settings of a run: recipes are complete, wrong values are named."""

import dataclasses
import json
import math

import pytest

from models.config import PRESETS
from train.config import RECIPES, InputError, OptimizerConfig, SampleConfig

TINY = RECIPES["tiny"]


def test_every_preset_has_a_recipe():
    assert list(RECIPES) == list(PRESETS)
    for name, recipe in RECIPES.items():
        assert recipe.preset == recipe.name == name
        assert recipe.model == PRESETS[name]


def test_settings_survive_json():
    settings = TINY.to_json()
    assert json.loads(json.dumps(settings)) == settings
    assert settings["data"]["directory"] == "examples/data/austen"
    assert settings["model"]["rotary"]["base"] == 10_000.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0 must be at least 1"),
        ({"batch_size": -8}, "batch_size=-8 must be at least 1"),
        ({"batch_size": 10**11}, "batch_size=100000000000 must be below 2147483648"),
        ({"seed": -1}, "seed=-1 must be between 0 and 4294967295"),
        ({"seed": 2**32}, "seed=4294967296 must be between 0 and 4294967295"),
        ({"name": "a/b"}, "name='a/b' must be the name of a directory"),
        ({"name": ""}, "name='' must be the name"),
        *(({"name": name}, f"name='{name}' must be the name") for name in (".", "..")),
        ({"row_tokens": 100_000}, "row_tokens=100000 is longer than model.context_tokens"),
        ({"steps": 50}, "optimizer.warmup_steps=100 must be below steps=50"),
        (
            {"model": dataclasses.replace(PRESETS["tiny"], vocab_size=100)},
            "model.vocab_size=100 must be at least 256",
        ),
        ({"sample": SampleConfig(prompt="é" * 40, new_tokens=100)}, "180 tokens, more than"),
    ],
)
def test_wrong_values_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate=0.0 must be positive"),
        ({"final_learning_rate": 1.0}, "final_learning_rate=1.0 must be between 0 and"),
        ({"warmup_steps": -1}, "warmup_steps=-1 must not be negative"),
        ({"beta2": 1.0}, "beta2=1.0 must be in"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1 must be finite and not negative"),
        ({"max_gradient_norm": 0.0}, "max_gradient_norm=0.0 must be positive"),
        *(
            ({name: value}, f"{name}={value} must be ")
            for value in (math.nan, math.inf)
            for name in (
                "learning_rate",
                "final_learning_rate",
                "beta1",
                "weight_decay",
                "max_gradient_norm",
            )
        ),
    ],
)
def test_wrong_optimizer_values_are_named(changes, message):
    with pytest.raises(InputError, match=message):
        OptimizerConfig(**({"learning_rate": 1e-3, "warmup_steps": 10} | changes))


def test_wrong_sampling_is_named():
    with pytest.raises(ValueError, match="temperature=-1"):
        SampleConfig(new_tokens=1, temperature=-1.0)
