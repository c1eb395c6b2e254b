"""Text from the model that a run has trained."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from flax import nnx

from flax_pallas_attn.rotary import Llama3Scaling, Rotary, YarnScaling
from models.generate import generate
from models.gpt import GPT
from models.sampling import GREEDY
from train.checkpoint import Checkpoints
from train.config import RECIPES, InputError, model_from_json
from train.loop import locked, open_run
from train.sample import load_model, main
from train.step import TrainState

TINY = RECIPES["tiny"]
MODEL = dataclasses.replace(
    TINY.model, num_layers=1, width=32, mlp_width=32, rotary=Rotary(scaling=Llama3Scaling())
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """What a run leaves, with parameters that nobody has trained."""
    config = dataclasses.replace(TINY, model=MODEL, runs_directory=tmp_path_factory.mktemp("runs"))
    with locked(config.run_directory):
        open_run(config, is_begun=False)
    model = GPT(MODEL, rngs=nnx.Rngs(3))
    parameters = nnx.to_pure_dict(nnx.state(model))
    directory = config.run_directory / "checkpoints"
    with Checkpoints(directory, keep=1, asynchronous=False) as checkpoints:
        checkpoints.save(7, TrainState(parameters, {"mean": parameters}))
    return config.run_directory, model


def test_load_model_gives_the_model_of_the_run(run):
    directory, model = run
    loaded = load_model(str(directory))
    assert loaded.config == MODEL
    jax.tree.map(np.testing.assert_array_equal, nnx.state(loaded), nnx.state(model))


def test_the_command_continues_the_prompt(run, capsys):
    directory, model = run
    arguments = [str(directory), "--prompt", "Ann", "--max-new-tokens=9", "--temperature=0"]
    assert main(arguments) == 0
    shown = capsys.readouterr()
    [tokens] = generate(model, [b"Ann"], max_new_tokens=9, sampling=GREEDY)
    assert shown.out == "Ann" + bytes(tokens).decode("utf-8", "replace") + "\n"
    assert shown.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", ""], "prompts[0] is empty"),
        (["--prompt", "a" * 128], "prompts[0] has 128 tokens, which leaves no room"),
        (["--max-new-tokens", "0"], "max_new_tokens=0 must be at least 1"),
        (["--top-k", "0"], "top_k=0 must be"),
    ],
)
def test_wrong_arguments_are_named(run, arguments, message, capsys):
    assert main([str(run[0]), *arguments]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")


def test_what_is_no_run_is_named(run, tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "has no config.json, so it is no run; train one first" in capsys.readouterr().err
    (tmp_path / "config.json").write_text(json.dumps({"model": {"rotary": None, "depth": 3}}))
    with pytest.raises(InputError, match="does not describe a model of this version"):
        load_model(tmp_path)
    (tmp_path / "config.json").write_text((run[0] / "config.json").read_text())
    with pytest.raises(InputError, match="no complete checkpoint yet"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "model",
    [
        *(recipe.model for recipe in RECIPES.values()),
        dataclasses.replace(
            MODEL, rotary=Rotary(scaling=YarnScaling(factor=4.0, original_max_positions=64))
        ),
    ],
)
def test_every_model_survives_json(model):
    config = dataclasses.replace(TINY, model=model)
    assert model_from_json(config.to_json()["model"]) == model
