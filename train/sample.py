"""`python -m train.sample RUN`: continues a prompt with the model that a run has trained."""

import codecs
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import rich.console
import tyro
from flax import nnx

from models.generate import stream
from models.gpt import GPT
from models.sampling import Sampling
from train.checkpoint import CheckpointError, restore_parameters
from train.config import InputError, model_from_json
from train.mesh import quiet_libtpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Continue a prompt with a model that `python -m train` has trained."""

    run_directory: tyro.conf.Positional[Path]
    """Of the run, such as runs/tiny; its last checkpoint is taken."""
    prompt: str = "She had "
    """What the text begins with."""
    max_new_tokens: int = 200
    """How many bytes to add; fewer where the model's context is full before."""
    temperature: float = 0.7
    """0 takes the likeliest token each time, 1 draws from the model's distribution."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only."""
    top_p: float | None = None
    """Draw from the likeliest tokens whose probabilities sum to p."""
    seed: int = 0
    """Of the draws: the same seed gives the same text."""


def load_model(run_directory: str | os.PathLike) -> GPT:
    """The model of a run, with the parameters of its last complete checkpoint.

    The optimizer's state is not read. Tokens are bytes: `models.generate.generate(model,
    [b"She had "], max_new_tokens=20)`.

    Args:
      run_directory: What `python -m train` wrote, such as `runs/tiny`.

    Raises:
      InputError: It is no run, or one without a checkpoint, or of another version.
      CheckpointError: The checkpoint cannot be read.
    """
    file = Path(run_directory) / "config.json"
    if not file.exists():
        raise InputError(f"{run_directory} has no config.json, so it is no run; train one first.")
    try:
        config = model_from_json(json.loads(file.read_text())["model"])
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{file} does not describe a model of this version: {error}. Train it anew."
        ) from error
    graphdef, variables = nnx.split(nnx.eval_shape(lambda: GPT(config, rngs=nnx.Rngs(0))))
    device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=device),
        nnx.to_pure_dict(variables),
    )
    return nnx.merge(graphdef, restore_parameters(Path(run_directory) / "checkpoints", abstract))


def print_continuation(
    model: GPT,
    prompt: str,
    console: rich.console.Console,
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seed: int,
) -> str:
    """Continues a prompt, decoding through the paged cache, and shows it as it comes.

    Returns:
      The prompt and what follows it.
    """
    tokens = stream(
        model, [prompt.encode()], max_new_tokens=max_new_tokens, sampling=sampling, seed=seed
    )
    console.print(prompt, end="", markup=False, highlight=False)
    text = prompt
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for step in tokens:
        # An id that is no byte is shown as what is no text: 255 never occurs in UTF-8.
        new_bytes = bytes(min(token, 255) for token in step if token is not None)
        new_text = decoder.decode(new_bytes)
        console.out(new_text, end="", highlight=False)
        text += new_text
    console.print()
    return text


def main(arguments: Sequence[str]) -> int:
    """Runs the program; returns the exit code, 1 after an error."""
    options = tyro.cli(Arguments, args=arguments, prog="python -m train.sample")
    try:
        sampling = Sampling(
            temperature=options.temperature, top_k=options.top_k, top_p=options.top_p
        )
        model = load_model(options.run_directory)
        room = model.config.context_tokens - len(options.prompt.encode())
        print_continuation(
            model,
            options.prompt,
            rich.console.Console(soft_wrap=True, highlight=False),
            max_new_tokens=min(options.max_new_tokens, room) if room > 0 else 1,
            sampling=sampling,
            seed=options.seed,
        )
    except (ValueError, CheckpointError) as error:  # the caller's mistakes
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    quiet_libtpu()
    sys.exit(main(sys.argv[1:]))
