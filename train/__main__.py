"""`python -m train`: parses the command line, trains, and turns errors into messages."""

import argparse
import sys
from collections.abc import Sequence

import rich.console
import tyro

from train.checkpoint import CheckpointError
from train.config import RECIPES, InputError, TrainConfig
from train.loop import Interrupted, train


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
      and 143 after SIGINT and SIGTERM.
    """
    try:
        train(parse(arguments), rich.console.Console(soft_wrap=True, highlight=False))
    except (InputError, CheckpointError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except Interrupted as interrupted:
        return 128 + interrupted.signal_number
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
