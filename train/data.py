"""Text as bytes, and batches that are a function of seed and step alone.

So nothing about the data has to be saved: a run that resumes at step n asks for batch n.
"""

import functools
import hashlib
from typing import NamedTuple

import numpy as np

from train.config import DataConfig, InputError
from train.loss import IGNORED


class Batch(NamedTuple):
    """Rows of tokens and what follows each token."""

    inputs: np.ndarray
    """int32 `[B, T]`."""
    targets: np.ndarray
    """int32 `[B, T]`; `IGNORED` where there is nothing to predict."""


def read_text(config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    """Reads the text to train on, file after file by name, and the text to validate on.

    Returns:
      Both as uint8 `[bytes]`, at least two.

    Raises:
      InputError: The directory or the validation file is missing, there is no other file, or the
        text of one side is empty.
    """
    if not config.directory.is_dir():
        raise InputError(
            f"data.directory={str(config.directory)!r} is not a directory; "
            "give one with .txt files."
        )
    files = sorted(config.directory.glob("*.txt"))
    names = [file.name for file in files]
    if config.validation_file not in names:
        raise InputError(
            f"data.validation_file={config.validation_file!r} is not in {config.directory}; "
            f"choose one of: {', '.join(names) or '(no .txt file there)'}."
        )
    validation = [file for file in files if file.name == config.validation_file]
    training = [file for file in files if file.name != config.validation_file]
    if not training:
        raise InputError(
            f"{config.directory} has no .txt file besides the validation file "
            f"{config.validation_file!r}; add the text to train on."
        )
    texts = _read(training), _read(validation)
    for files, text in zip((training, validation), texts, strict=True):
        if len(text) < 2:
            raise InputError(
                f"{', '.join(map(str, files))}: {len(text)} bytes, too few to predict one from "
                "another; put text there."
            )
    return texts


def describe_files(config: DataConfig) -> dict[str, dict[str, int | str]]:
    """Size in bytes and SHA-256 of each file that `read_text` reads, by name."""
    described = {}
    for file in sorted(config.directory.glob("*.txt")):
        content = file.read_bytes()
        described[file.name] = {
            "bytes": len(content),
            "sha256": hashlib.sha256(content).hexdigest(),
        }
    return described


def check_length(text: np.ndarray, row_tokens: int) -> None:
    """Checks that the text to train on fills at least one row and its last target.

    Raises:
      InputError: It does not.
    """
    if len(text) <= row_tokens:
        raise InputError(
            f"the training text has {len(text)} bytes, too few for one row of "
            f"row_tokens={row_tokens} and its last target; add text or lower row_tokens."
        )


def training_batch(
    text: np.ndarray, *, seed: int, step: int, batch_size: int, row_tokens: int
) -> Batch:
    """The batch of a step.

    Each epoch cuts the text into rows from a start of its own and goes through them in an order of
    its own: every byte is seen once per epoch, but for at most two rows' worth at the ends.

    Args:
      text: uint8 `[bytes]`, more than `row_tokens`.
      seed: Of starts and orders.
      step: From 1.
      batch_size: B, rows.
      row_tokens: T, tokens per row.
    """
    # One row less than fits, so that there is a row's length of places to start from.
    num_rows = max(1, (len(text) - 1) // row_tokens - 1)
    num_starts = len(text) - num_rows * row_tokens
    windows = np.empty((batch_size, row_tokens + 1), np.int32)
    for window, row in zip(windows, range((step - 1) * batch_size, step * batch_size), strict=True):
        epoch, index = divmod(row, num_rows)
        first, order = _epoch(num_starts, num_rows, seed, epoch)
        start = first + order[index] * row_tokens
        window[:] = text[start : start + row_tokens + 1]
    return Batch(inputs=windows[:, :-1], targets=windows[:, 1:])


@functools.lru_cache(maxsize=2)  # most batches lie in one epoch, some in two
def _epoch(num_starts: int, num_rows: int, seed: int, epoch: int) -> tuple[int, np.ndarray]:
    generator = np.random.default_rng((seed, epoch))
    return int(generator.integers(num_starts)), generator.permutation(num_rows)


def validation_batches(
    text: np.ndarray, *, batch_size: int, row_tokens: int, max_tokens: int | None
) -> list[Batch]:
    """The text in consecutive rows; each byte but the first is a target once.

    Args:
      text: uint8 `[bytes]`.
      batch_size: B, rows; the last batch is filled up with rows of `IGNORED` targets.
      row_tokens: T, tokens per row.
      max_tokens: Take only so many tokens' worth of rows, at least one, spread evenly over the
        text; None for all.
    """
    num_targets = len(text) - 1
    num_rows = -(-num_targets // row_tokens)
    chosen = np.arange(num_rows)
    if max_tokens is not None and max_tokens < num_targets:
        chosen = np.linspace(0, num_rows - 1, max(1, max_tokens // row_tokens)).astype(int)
    rows = -(-len(chosen) // batch_size) * batch_size
    inputs = np.zeros((rows, row_tokens), np.int32)
    targets = np.full((rows, row_tokens), IGNORED, np.int32)
    for row, index in enumerate(chosen):
        window = text[index * row_tokens : (index + 1) * row_tokens + 1]
        inputs[row, : len(window) - 1] = window[:-1]
        targets[row, : len(window) - 1] = window[1:]
    return [
        Batch(inputs=inputs[row : row + batch_size], targets=targets[row : row + batch_size])
        for row in range(0, rows, batch_size)
    ]


def _read(files) -> np.ndarray:
    return np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8)
