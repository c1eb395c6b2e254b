"""The command `python -m flax_pallas_attn.aot`: what the compiler says of a function on TPU."""

import argparse
import collections
import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from flax_pallas_attn import aot

CALIBRATION = (
    "44 times published for hardware were simulated as 0.92 of them\n    in the median, half of "
    "them as 0.80 to 1.01, all as 0.46 to 1.31 (benchmarks/calibration.md)"
)
"""How far the simulation is off, as `benchmarks/calibration.md` says."""

_SHORT_DTYPES = {
    "bf16": "bfloat16",
    "f16": "float16",
    "f32": "float32",
    "f8e4m3fn": "float8_e4m3fn",
    "f8e5m2": "float8_e5m2",
    "s8": "int8",
    "s32": "int32",
    "u32": "uint32",
}


def _parse_argument(text: str) -> jax.ShapeDtypeStruct:
    """`bf16[8,4096,16,128]` as XLA writes it, or with a numpy dtype: `bfloat16[8]`, `bool[]`."""
    match = re.fullmatch(r"(\w+)\[([\d, ]*)\]", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not like bf16[8,4096,16,128]")
    dtype, shape = match.groups()
    try:
        dtype = jnp.dtype(_SHORT_DTYPES.get(dtype, dtype))
    except TypeError as error:
        known = ", ".join(_SHORT_DTYPES)
        raise argparse.ArgumentTypeError(
            f"{text!r} has no dtype that numpy or this list knows: {known}"
        ) from error
    return jax.ShapeDtypeStruct(tuple(int(size) for size in shape.split(",") if size), dtype)


def _parse_function(text: str) -> Callable[..., Any]:
    module, _, path = text.partition(":")
    try:
        return functools.reduce(getattr, path.split("."), importlib.import_module(module))
    except (ImportError, AttributeError, ValueError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not like my_package.my_module:my_function: {error}"
        ) from error


def _print_program(program: aot.TpuProgram) -> None:
    print(f"  memory per device ({program.device_kind})")
    for part in ("argument", "output", "alias", "temporary", "total"):
        size_bytes = getattr(program, f"{part}_bytes")
        print(f"    {part:<10}{size_bytes:>17,} B {size_bytes / 2**20:>10,.1f} MiB")
    print("  Mosaic kernels")
    for name, count in collections.Counter(program.kernels).items() or [("none", 0)]:
        print(f"    {name}" + (f" x {count}" if count > 1 else ""))


def _print_profiles(profiles: Sequence[aot.OperationProfile]) -> None:
    print(f"  cycles, simulated and not measured: {CALIBRATION}")
    for operation in sorted(profiles, key=lambda operation: -operation.cycles):
        print(f"    {operation.cycles:>17,} {operation.name}")
        if operation.unit_use:
            units = [f"{unit} {use:.0%}" for unit, use in operation.unit_use.items() if use > 0.05]
            waits = f"{operation.transfer_wait:.0%} transfers, {operation.result_wait:.0%} results"
            print(f"{'':22}bound by {operation.bound_by}: {', '.join(units)}; waits for {waits}")
    print(f"    {sum(operation.cycles for operation in profiles):>17,} in all")


def _print_error(error: Exception) -> None:
    print(f"  {type(error).__name__}: {error}")
    for note in getattr(error, "__notes__", ()):
        if "JAX has removed its internal frames" not in note:  # from the traceback, not shown here
            print(f"  {note}")


def _function_first(argv: Sequence[str]) -> list[str]:
    """Puts MODULE:FUNCTION first: an option takes all words that follow it, up to the next option.

    A topology is never taken for one, as what follows its colon is a number.
    """
    return sorted(argv, key=lambda word: not re.fullmatch(r"[\w.]+:[^\W\d][\w.]*", word))


def main(argv: Sequence[str] | None = None) -> int:
    """Compiles a function named on the command line; returns 1 if anything failed."""
    parser = argparse.ArgumentParser(
        prog="python -m flax_pallas_attn.aot",
        description="Compile a function for TPU on a machine without one, and print the "
        "compiler's error, or memory, kernels and simulated cycles. --arg and --topology take "
        "several values and may be repeated.",
    )
    parser.add_argument(
        "function",
        type=_parse_function,
        metavar="MODULE:FUNCTION",
        help="what to compile: my_package.my_module:my_function",
    )
    parser.add_argument(
        "--arg",
        type=_parse_argument,
        nargs="+",
        action="extend",
        default=[],
        metavar="DTYPE[SHAPE]",
        help="the array arguments in the function's order: bf16[8,4096,16,128]",
    )
    parser.add_argument(
        "--topology",
        nargs="+",
        action="extend",
        metavar="NAME",
        help=f"any of {', '.join(aot.TOPOLOGIES)}, or larger ones: v5e:16x16 (default: v5e:2x2)",
    )
    parser.add_argument(
        "--donate",
        type=int,
        nargs="+",
        action="extend",
        default=[],
        metavar="INDEX",
        help="arguments to donate",
    )
    parser.add_argument(
        "--cycles",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="simulate the program too, which may take minutes (default: --cycles)",
    )
    parser.add_argument(
        "--units",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="say which unit binds, for which the simulation writes about 500 bytes a cycle to a "
        "temporary file (default: --units)",
    )
    options = parser.parse_args(_function_first(sys.argv[1:] if argv is None else argv))
    fn = options.function
    if options.donate:
        fn = jax.jit(fn, donate_argnums=tuple(options.donate))

    failures = 0
    for topology in options.topology or ["v5e:2x2"]:
        print(topology, flush=True)
        try:
            _print_program(aot.compile_for_tpu(fn, *options.arg, topology=topology))
            if options.cycles and not aot.has_cycles(topology):
                print("  cycles: not available on v4")
            elif options.cycles:
                sys.stdout.flush()
                print(
                    f"Simulating {aot.function_name(fn)} on {topology}, which may take minutes; "
                    "--no-cycles leaves it out.",
                    file=sys.stderr,
                )
                _print_profiles(aot.simulate(fn, options.arg, topology, units=options.units))
        except BrokenPipeError:
            raise
        except Exception as error:  # whatever the compiler says is what was asked for
            failures += 1
            _print_error(error)
    return 1 if failures else 0


def run() -> NoReturn:
    """Runs `main` as a program, which ends quietly when nobody reads its output."""
    try:
        sys.exit(main())
    except BrokenPipeError:  # as of `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
