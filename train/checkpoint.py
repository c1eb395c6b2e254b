"""Checkpoints of a run, with orbax: written aside and renamed when complete."""

import errno
import logging
import shutil
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import InputError


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read; others are untouched."""


class Checkpoints:
    """The checkpoints in a directory, named by the number of steps done.

    A checkpoint is written to a temporary directory, which is renamed when all of it is on disk;
    only then are the oldest ones deleted. So whenever the process dies, or the disk is full, the
    last complete checkpoint stays. What an interrupted write left behind is removed on opening.
    """

    def __init__(self, directory: Path, *, keep: int, asynchronous: bool):
        """Opens a directory, which is created if need be.

        Args:
          directory: Of the checkpoints alone.
          keep: How many of the latest to keep.
          asynchronous: Whether `save` returns before everything is written.

        Raises:
          CheckpointError: There is a file of that name.
        """
        _quiet_orbax()
        if directory.exists() and not directory.is_dir():
            raise CheckpointError(f"{directory} is not a directory; move it out of the way.")
        self._directory = directory.absolute()
        self._manager = ocp.CheckpointManager(
            self._directory,
            item_handlers=ocp.StandardCheckpointHandler(),
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                cleanup_tmp_directories=True,
                enable_async_checkpointing=asynchronous,
            ),
        )

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def latest_step(self) -> int | None:
        """Of the last complete checkpoint; None if there is none."""
        return max(self._manager.all_steps(read=True), default=None)

    def save(self, step: int, state: Any) -> None:
        """Writes a checkpoint, after the one before is complete.

        Args:
          step: Steps done.
          state: A tree of arrays; they may be donated as soon as this returns.

        Raises:
          CheckpointError: This one, or the one before, could not be written.
        """
        self._guard(lambda: self._save(step, state))

    def wait(self) -> None:
        """Returns when everything is written.

        Raises:
          CheckpointError: The last checkpoint could not be written.
        """
        self._guard(self._manager.wait_until_finished)

    def restore(self, step: int, like: Any) -> Any:
        """Reads a checkpoint.

        Args:
          step: Which.
          like: A tree of arrays with the structure, shapes, dtypes and shardings to restore to.

        Raises:
          InputError: The checkpoint has other arrays; names the first few.
          CheckpointError: It cannot be read.
        """
        path = self._directory / str(step)
        _check_arrays(path, self._arrays(step), like)
        try:
            return self._manager.restore(step, args=ocp.args.StandardRestore(like))
        except Exception as error:
            raise _unreadable(path, _first_line(error)) from error

    def check(self, step: int) -> None:
        """Sees that a checkpoint is there, without reading its arrays.

        Raises:
          CheckpointError: It is not, or is incomplete.
        """
        self._arrays(step)

    def close(self) -> None:
        """Waits for what is being written, and lets go of the directory.

        Raises:
          CheckpointError: The last checkpoint could not be written.
        """
        self.wait()
        self._manager.close()

    def _arrays(self, step: int) -> Any:
        """The tree of a checkpoint, with shapes and dtypes in place of its arrays."""
        path = self._directory / str(step)
        if not (path / "default").is_dir():
            raise _unreadable(path, "it is incomplete")
        try:
            return self._manager.item_metadata(step).tree
        except Exception as error:
            raise _unreadable(path, _first_line(error)) from error

    def _save(self, step: int, state: Any) -> None:
        size_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        free_bytes = shutil.disk_usage(self._directory).free
        if free_bytes < size_bytes:
            raise OSError(
                errno.ENOSPC,
                f"it needs {size_bytes:,} bytes and the disk has {free_bytes:,} left",
            )
        self._manager.save(step, args=ocp.args.StandardSave(state))

    def _guard(self, write) -> None:
        try:
            write()
        except Exception as error:  # orbax, tensorstore and the file system each have their own
            step = self.latest_step()
            kept = "no complete checkpoint yet" if step is None else f"step {step} is complete"
            raise CheckpointError(
                f"a checkpoint could not be written to {self._directory}, or an old one deleted "
                f"there: {_first_line(error)}\n"
                f"Nothing that was there is lost ({kept}). Make room, or mend the cause, and run "
                "the same command again to continue from there."
            ) from error


def restore_parameters(directory: Path, like: Any) -> Any:
    """Reads the model's parameters alone, from the last complete checkpoint; writes nothing.

    Args:
      directory: Of the checkpoints, which a run may be writing to.
      like: The parameters' shapes, dtypes and shardings.

    Raises:
      InputError: There is no checkpoint, or it has other arrays; names the first few.
      CheckpointError: It cannot be read.
    """
    _quiet_orbax()
    names = [path.name for path in directory.iterdir()] if directory.exists() else []
    steps = [int(name) for name in names if name.isdigit()]
    if not steps:
        raise InputError(f"{directory} has no complete checkpoint yet; let the run write one.")
    path = directory.absolute() / str(max(steps))
    like = {"parameters": like}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            saved = checkpointer.metadata(path / "default").item_metadata.tree
        except Exception as error:
            raise _unreadable(path, _first_line(error)) from error
        _check_arrays(path, {"parameters": saved["parameters"]}, like)
        arguments = ocp.args.PyTreeRestore(
            like,
            restore_args=ocp.checkpoint_utils.construct_restore_args(like),
            partial_restore=True,
        )
        try:
            return checkpointer.restore(path / "default", args=arguments)["parameters"]
        except Exception as error:
            raise _unreadable(path, _first_line(error)) from error


def _quiet_orbax() -> None:
    for name in ("absl", "asyncio"):  # errors are raised as well
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _check_arrays(path: Path, saved: Any, like: Any) -> None:
    saved, expected = _arrays_by_name(saved), _arrays_by_name(like)
    differences = [
        f"{name}: {_describe(saved.get(name))} in the checkpoint, "
        f"{_describe(expected.get(name))} in this run"
        for name in expected | saved
        if _describe(saved.get(name)) != _describe(expected.get(name))
    ]
    if differences:
        shown = "\n  ".join(differences[:8])
        raise InputError(
            f"the checkpoint {path} is of another model or optimizer; "
            f"arrays that differ: {len(differences)}\n  {shown}\n"
            "Use the settings it was made with, or start another run with --name."
        )


def _arrays_by_name(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _describe(array: Any) -> str:
    return "absent" if array is None else f"{array.dtype}{list(array.shape)}"


def _unreadable(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} cannot be read: {reason}\n"
        "Delete it to continue from the one before."
    )


def _first_line(error: Exception) -> str:
    """Without the specification of the file that tensorstore appends."""
    return f"{type(error).__name__}: {error}".splitlines()[0].partition(" [tensorstore_spec")[0]
