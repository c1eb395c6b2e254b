"""What a run reports: metrics.jsonl, the loss curve, and progress on the terminal."""

import json
import math
import os
import statistics
import time
from pathlib import Path

import rich.console
import rich.progress

from train.config import InputError


class MetricsFile:
    """A file with one JSON object a line; `step` rises from line to line."""

    def __init__(self, path: Path, *, resume_step: int):
        """Opens the file to append, and drops what is later than a step or cut off.

        Args:
          path: Of the file.
          resume_step: Lines after this step will be written again.
        """
        self._path = path
        kept = [record for record in read_metrics(path) if record["step"] <= resume_step]
        partial = path.with_suffix(".partial")
        partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(partial, path)

    def append(self, record: dict) -> None:
        """Adds a line."""
        with self._path.open("a") as file:
            file.write(json.dumps(record, allow_nan=False) + "\n")

    def read(self) -> list[dict]:
        """All records so far."""
        return read_metrics(self._path)


def read_metrics(path: Path) -> list[dict]:
    """The records of a metrics file; none if there is no file.

    A last line that was cut off, as by a kill in the middle of a write, is left out.

    Raises:
      InputError: Another line is no record; names it.
    """
    if not path.exists():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [_parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1)]


def _parse(line: bytes, place: str) -> dict:
    try:
        record = json.loads(line)
        float(record["loss"])
        if not isinstance(record["step"], int):
            raise TypeError("its step is no whole number")
    except (ValueError, TypeError, LookupError) as error:
        shown = line[:60].decode(errors="replace")
        raise InputError(
            f"{place} is not a record with a step and a loss: {shown!r}\n"
            "Delete the line to go on without it."
        ) from error
    return record


class Progress:
    """A live bar on a terminal; plain lines elsewhere."""

    def __init__(self, console: rich.console.Console, *, start_step: int, steps: int):
        """Prepares; the display lasts as long as the `with` block.

        Args:
          console: Where to.
          start_step: Steps done before.
          steps: Of the whole run.
        """
        self._console = console
        self._start_step = start_step
        self._steps = steps
        self._start_time = math.nan
        self._validation_loss: float | None = None
        self._bar_is_shown = console.is_terminal
        self._bar = rich.progress.Progress(
            rich.progress.TextColumn("step {task.completed:,.0f}/{task.total:,.0f}"),
            rich.progress.BarColumn(bar_width=None),
            rich.progress.TextColumn("{task.fields[losses]}"),
            rich.progress.TextColumn("{task.fields[speed]}"),
            rich.progress.TextColumn("{task.fields[left]}"),
            console=console,
            disable=not self._bar_is_shown,
            expand=True,
        )
        self._task = self._bar.add_task(
            "", total=steps, completed=start_step, losses="compiling", speed="", left=""
        )

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_) -> None:
        self._bar.stop()

    def begin(self) -> None:
        """Says that compiling is over: the time left is told from here."""
        self._start_time = time.monotonic()

    def update(self, record: dict) -> None:
        """Shows a record of the metrics file."""
        step = record["step"]
        self._validation_loss = record.get("val_loss", self._validation_loss)
        # The bar is one line and keeps the last; a line of its own says what is new.
        validation = self._validation_loss if self._bar_is_shown else record.get("val_loss")
        losses = f"loss {record['loss']:.3f}"
        if validation is not None:
            losses += f"  validation {validation:.3f}"
        speed = f"{record['tokens_per_s']:,.0f} tokens/s"
        elapsed = time.monotonic() - self._start_time
        left = f"{_minutes(elapsed / (step - self._start_step) * (self._steps - step))} left"
        self._bar.update(self._task, completed=step, losses=losses, speed=speed, left=left)
        if not self._bar_is_shown:
            self._console.print(f"step {step}/{self._steps}  {losses}  {speed}  {left}")


def plot_loss(records: list[dict], path: Path, *, title: str, last_step: int) -> None:
    """Draws training and validation loss over steps as a PNG.

    Args:
      records: Of the metrics file, at least one.
      path: Of the picture.
      title: Above it.
      last_step: Of the run: validated on the whole file, and so drawn as a point apart.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    steps = [record["step"] for record in records]
    losses = [record["loss"] for record in records]
    validation = [(r["step"], r["val_loss"]) for r in records if "val_loss" in r]
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(steps, losses, color="tab:blue", alpha=0.25, linewidth=1)
    axes.plot(steps, _smooth(losses), color="tab:blue", linewidth=1.8, label="training, smoothed")
    if validation:
        sampled = [point for point in validation if point[0] < last_step]
        if sampled:
            axes.plot(*zip(*sampled, strict=True), "o-", color="tab:orange", label="validation")
        step, loss = validation[-1]
        if step == last_step:
            axes.plot(
                step, loss, "*", color="tab:orange", markersize=13, label="validation, whole file"
            )
        axes.annotate(
            f"{loss:.3f}",
            (step, loss),
            xytext=(0, 10),
            textcoords="offset points",
            ha="right",
            color="tab:orange",
        )
    axes.set(title=title, xlabel="step", ylabel="loss (nats per byte)")
    axes.set_xlim(left=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _smooth(values: list[float]) -> list[float]:
    """Each value's mean with as many neighbours on either side, so that it does not lag."""
    reach = len(values) // 40
    smoothed = []
    for index in range(len(values)):
        side = min(reach, index, len(values) - 1 - index)
        smoothed.append(statistics.fmean(values[index - side : index + side + 1]))
    return smoothed


def _minutes(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"
