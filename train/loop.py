"""A run from its first step, or its last checkpoint, to its sample."""

import contextlib
import fcntl
import json
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.console
from flax import nnx
from jax.sharding import Mesh

from models.gpt import GPT
from train.checkpoint import Checkpoints
from train.config import InputError, TrainConfig
from train.data import (
    Batch,
    check_length,
    describe_files,
    read_text,
    training_batch,
    validation_batches,
)
from train.mesh import by_row, data_mesh, replicated
from train.metrics import MetricsFile, Progress, plot_loss, read_metrics
from train.sample import print_continuation
from train.step import (
    EvaluationStep,
    all_finite,
    create_state,
    make_evaluation_step,
    make_optimizer,
    make_train_step,
)

SAMPLE_FILE = "sample.txt"


class Interrupted(Exception):
    """SIGINT or SIGTERM asked the run to stop; a checkpoint was written.

    Attributes:
      signal_number: Of the signal.
    """

    def __init__(self, signal_number: int):
        super().__init__(signal_number)
        self.signal_number = signal_number


class Diverged(RuntimeError):
    """A loss, a gradient or a parameter is no longer finite; that state was not saved."""


def train(config: TrainConfig, console: rich.console.Console) -> None:
    """Trains until `config.steps`, from the last checkpoint if there is one.

    Args:
      config: Of the run.
      console: Where to report.

    Raises:
      InputError: The settings do not fit the text, the devices, or what the run began with; or
        another process is at this run.
      CheckpointError: A checkpoint could not be written or read.
      Diverged: The loss is no longer finite.
      Interrupted: A signal came; the same call continues the run.
    """
    training_text, validation_text = read_text(config.data)
    check_length(training_text, config.row_tokens)
    mesh = data_mesh(config.batch_size)
    platform = mesh.devices.flat[0].platform
    if config.model.implementation == "pallas" and platform != "tpu":
        raise InputError(
            f"model.implementation='pallas' runs on TPU, and the devices here are {platform}; "
            "leave it out, and what runs here is chosen."
        )
    with locked(config.run_directory):
        checkpoints = Checkpoints(
            config.run_directory / "checkpoints",
            keep=config.checkpoint.keep,
            asynchronous=config.checkpoint.asynchronous,
        )
        with checkpoints:
            open_run(config, is_begun=checkpoints.latest_step() is not None)
            _train(config, training_text, validation_text, mesh, checkpoints, console)


def _train(
    config: TrainConfig,
    training_text: np.ndarray,
    validation_text: np.ndarray,
    mesh: Mesh,
    checkpoints: Checkpoints,
    console: rich.console.Console,
) -> None:
    directory = config.run_directory
    start_step = checkpoints.latest_step() or 0
    if start_step >= config.steps and (directory / SAMPLE_FILE).exists():
        checkpoints.check(start_step)
        console.print(
            f"{directory} is finished: all {config.steps} steps are done. To start another run, "
            f"name it with --name, or delete {directory}."
        )
        print_result(config, console)
        return

    optimizer = make_optimizer(config.optimizer, config.steps)
    graphdef, state = create_state(GPT(config.model, rngs=nnx.Rngs(config.seed)), optimizer)
    state = jax.device_put(state, replicated(mesh))
    if start_step:
        state = checkpoints.restore(start_step, state)
        console.print(f"{directory} goes on after step {start_step}.")
        if start_step >= config.steps:
            finish(config, graphdef, state.parameters, console)
            return
    evaluation_step = make_evaluation_step(graphdef)
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(state.parameters))
    console.print(
        f"{num_parameters:,} parameters, {len(training_text):,} bytes to train on, "
        f"{len(validation_text):,} to validate on, {mesh.size} device(s)"
    )

    def batch_of(step: int) -> Batch:
        batch = training_batch(
            training_text,
            seed=config.seed,
            step=step,
            batch_size=config.batch_size,
            row_tokens=config.row_tokens,
        )
        return jax.device_put(batch, by_row(mesh))

    metrics = MetricsFile(directory / "metrics.jsonl", resume_step=start_step)
    progress = Progress(console, start_step=start_step, steps=config.steps)
    with jax.set_mesh(mesh), StopSignals() as signals, progress:
        train_step = make_train_step(graphdef, optimizer, config.seed)
        train_step = train_step.lower(state, batch_of(start_step + 1), start_step + 1).compile()
        progress.begin()
        clock = TokenClock()
        step = start_step
        for step in range(start_step + 1, config.steps + 1):
            batch = batch_of(step)
            state, step_metrics = train_step(state, batch, step)
            clock.count(batch.inputs.size)

            is_last = step == config.steps
            evaluates = is_last or step % config.evaluation.every_steps == 0
            is_logged = evaluates or step % config.log_every_steps == 0
            if is_logged:
                record = {
                    "step": step,
                    "loss": float(step_metrics.loss),  # waits for the step
                    "grad_norm": float(step_metrics.grad_norm),
                    "tokens_per_s": clock.tokens_per_s(),
                }
                if evaluates:
                    max_tokens = None if is_last else config.evaluation.tokens
                    record["val_loss"] = validation_loss(
                        config, evaluation_step, state.parameters, validation_text, max_tokens, mesh
                    )
                wrong = [f"{name}={x}" for name, x in record.items() if not math.isfinite(x)]
                if wrong:
                    raise _diverged(checkpoints, step, ", ".join(wrong))
                metrics.append(record)
                progress.update(record)
            stops = signals.received != 0
            if is_last or stops or step % config.checkpoint.every_steps == 0:
                if not all_finite(state):
                    raise _diverged(checkpoints, step, "parameters that are not finite")
                checkpoints.save(step, state)
            if evaluates and not is_last:
                plot_loss(
                    metrics.read(),
                    directory / "loss.png",
                    title=config.name,
                    last_step=config.steps,
                )
            if is_logged:
                clock.restart()
            if stops:
                break
    checkpoints.wait()
    if signals.received:
        console.print(f"Stopped after step {step}; the same command continues from there.")
        raise Interrupted(signals.received)
    finish(config, graphdef, state.parameters, console)


def finish(
    config: TrainConfig, graphdef: nnx.GraphDef[GPT], parameters: Any, console: rich.console.Console
) -> None:
    """Draws the whole loss curve and a sample; the file with the sample says that all is done."""
    directory = config.run_directory
    plot_loss(
        read_metrics(directory / "metrics.jsonl"),
        directory / "loss.png",
        title=config.name,
        last_step=config.steps,
    )
    console.rule("sample")
    text = print_continuation(
        nnx.merge(graphdef, jax.device_put(parameters, jax.local_devices()[0])),
        config.sample.prompt,
        console,
        max_new_tokens=config.sample.new_tokens,
        sampling=config.sample.sampling(),
        seed=config.seed,
    )
    console.rule()
    _write(directory / SAMPLE_FILE, text + "\n")
    print_result(config, console)


@contextlib.contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a run; its directory is created if need be.

    The lock goes with the process, whichever way that ends.

    Raises:
      InputError: Another process has it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / "lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise InputError(
                f"another process is training {directory}; wait until it ends or stop it, or "
                "start another run with --name."
            ) from error
        yield


def open_run(config: TrainConfig, *, is_begun: bool) -> None:
    """Writes the settings and texts of a new run; compares them with what an old one began with.

    Args:
      config: Of the run.
      is_begun: Whether it has a checkpoint: without one, settings that were there count for
        nothing.

    Raises:
      InputError: They differ; names the first few that do. Or the file of settings is damaged.
    """
    file = config.run_directory / "config.json"
    now = config.to_json() | {"text": describe_files(config.data)}
    if not (is_begun and file.exists()):
        _write(file, json.dumps(now, indent=2) + "\n")
        return
    now, then = dict(_flat(now)), dict(_flat(_read_settings(file)))
    differences = [
        f"{name}: {then.get(name, 'absent')} then, {now.get(name, 'absent')} now"
        for name in now | then
        if now.get(name) != then.get(name) and name not in ("name", "runs_directory")
    ]
    if differences:
        shown = "\n  ".join(differences[:8])
        raise InputError(
            f"{config.run_directory} was begun with other settings or texts:\n  {shown}\n"
            "Continue it with those, or start another run with --name."
        )


def _read_settings(file: Path) -> dict:
    try:
        settings = json.loads(file.read_bytes())
    except ValueError:
        settings = None
    if not isinstance(settings, dict):
        raise InputError(
            f"{file} is damaged: it holds no settings. Delete it to continue the run with those "
            "given now, or start another run with --name."
        )
    return settings


def _write(file: Path, text: str) -> None:
    """All of it or nothing."""
    partial = file.with_suffix(".partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, file)


def _diverged(checkpoints: Checkpoints, step: int, what: str) -> Diverged:
    checkpoints.wait()
    last = checkpoints.latest_step()
    kept = "there is no checkpoint yet" if last is None else f"that of step {last} is the last kept"
    return Diverged(
        f"step {step}: {what}. The run stops and saves nothing of it; {kept}.\n"
        "The same settings come to the same end. Start another run with --name and, for one, a "
        "lower --optimizer.learning-rate."
    )


def validation_loss(
    config: TrainConfig,
    evaluation_step: EvaluationStep,
    parameters: Any,
    text: np.ndarray,
    max_tokens: int | None,
    mesh: Mesh,
) -> float:
    """Mean loss in nats per token; at most `max_tokens` are looked at, None for all."""
    batches = validation_batches(
        text,
        batch_size=config.batch_size,
        row_tokens=config.row_tokens,
        max_tokens=max_tokens,
    )
    sums = [evaluation_step(parameters, jax.device_put(batch, by_row(mesh))) for batch in batches]
    total, count = np.sum(jax.device_get(sums), axis=0, dtype=np.float64)
    return float(total / count)


def print_result(config: TrainConfig, console: rich.console.Console) -> None:
    """What a finished run has come to, and how to use its model."""
    directory = config.run_directory
    records = read_metrics(directory / "metrics.jsonl")
    if records and "val_loss" in records[-1]:
        console.print(
            f"Validation loss {records[-1]['val_loss']:.3f} nats per byte, on all of "
            f"{config.data.validation_file}; the curve is in {directory / 'loss.png'}."
        )
    console.print(
        f"To continue a text of yours: python -m train.sample {directory} --prompt 'She had '",
        markup=False,
    )


class TokenClock:
    """Tokens per second since the last restart."""

    def __init__(self):
        self.restart()

    def restart(self) -> None:
        """Counts from here."""
        self._tokens = 0
        self._start = time.monotonic()

    def count(self, tokens: int) -> None:
        """Adds tokens."""
        self._tokens += tokens

    def tokens_per_s(self) -> float:
        """So far."""
        return self._tokens / (time.monotonic() - self._start)


class StopSignals:
    """While in use, notes SIGINT or SIGTERM instead of dying of it; a second one is obeyed."""

    def __init__(self):
        self.received = 0
        """The number of the signal that came; 0 for none."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "StopSignals":
        self._previous = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        self.received = number
        self.__exit__()


def _flat(settings: dict, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
