"""`python -m train`: parses the command line, trains, and turns errors into messages."""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

if __name__ == "__main__":
    # The imports below take seconds; ended in them by Ctrl-C, the program prints no traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import jax
import rich.console
import tyro

from train.checkpoint import CheckpointError
from train.config import RECIPES, InputError, TrainConfig
from train.loop import Diverged, Interrupted, train
from train.mesh import quiet_libtpu


def parse(arguments: Sequence[str]) -> TrainConfig:
    """The settings of a command line: the preset's, but for what the flags say."""
    preset = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset.add_argument("--preset", nargs="?")
    chosen, _ = preset.parse_known_args(arguments)
    return tyro.cli(
        TrainConfig,
        args=arguments,
        prog="python -m train",
        default=RECIPES.get(chosen.preset, RECIPES["tiny"]),
        config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
    )


def main(arguments: Sequence[str]) -> int:
    """Runs the program.

    Args:
      arguments: Of the command line.

    Returns:
      The exit code: 0 when the run is finished, 1 after an error, 2 for a wrong command line, 130
      and 143 after SIGINT and SIGTERM, 141 when nobody reads the output any more.
    """
    try:
        try:
            train(parse(arguments), rich.console.Console(soft_wrap=True, highlight=False))
        finally:
            sys.stdout.flush()
    except BrokenPipeError:  # as of `| head`: an OSError that has nothing to do with files
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except (InputError, CheckpointError, Diverged) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:  # of the text, metrics.jsonl or loss.png
        print(
            f"error: {error}\nComplete checkpoints are untouched; mend the cause and run the same "
            "command again to continue from the last one.",
            file=sys.stderr,
        )
        return 1
    except (MemoryError, jax.errors.JaxRuntimeError) as error:
        if not isinstance(error, MemoryError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(
            f"error: out of memory: {str(error).splitlines()[0]}\n"
            "Lower --batch-size or --row-tokens, or choose a smaller model.",
            file=sys.stderr,
        )
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number
    except KeyboardInterrupt:  # before the first step, after the last, or for the second time
        print(
            "\nInterrupted; the same command continues from the last complete checkpoint, if any.",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT
    return 0


def _report_unraisable(unraisable) -> None:
    """Prints what Python could not raise, but for the echo of a checkpoint that failed.

    When one write fails, orbax raises and closes its event loop; the other writes fail too, and
    report it to the loop that is gone.
    """
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


if __name__ == "__main__":
    quiet_libtpu()
    sys.unraisablehook = _report_unraisable
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
