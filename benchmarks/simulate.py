"""Simulated cycles for benchmarks: what failed is told apart; nothing is above the peak."""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import Any

import jax

from benchmarks.results_file import read_results, write_results
from flax_pallas_attn.aot import compile_for_tpu, estimate_cycles, export

GENERATIONS = ("v5e", "v5p", "v6e", "tpu7x")
"""Those that libtpu simulates."""

FLOP_PER_CYCLE = {"v5e": 131_072, "v5p": 262_144, "v6e": 524_288, "tpu7x": 524_288}
"""Peak of one device in bfloat16: v5p's two cores together, one of tpu7x's two."""

GIGAHERTZ = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 2.2}
"""Clocks that the published peaks (197, 459, 918 and 2 x 1153 Tflop/s) and the above make."""

HBM_GIGABYTES = {"v5e": 819, "v5p": 2765, "v6e": 1640, "tpu7x": 3690}
"""Published bandwidth of HBM of one device, a second; of tpu7x half of the chip's."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cycles:
    """Simulated cycles, or why there are none.

    Attributes:
      count: Cycles; None where the simulation failed.
      error: First line of what the simulator said; None where it did not fail.
    """

    count: int | None = None
    error: str | None = None


def simulate(
    fn: Callable[..., Any],
    *args: Any,
    topology: str,
    leave_out: tuple[str, ...] = (),
    least: float = 0,
) -> Cycles:
    """Simulates `fn(*args)` and sums the cycles of its operations.

    Args:
      fn: What to simulate, as in `estimate_cycles`.
      *args: Arrays or `jax.ShapeDtypeStruct`.
      topology: For which generation.
      leave_out: Operations whose names begin so do not count, such as the forward pass beside a
        backward pass.
      least: Cycles that the device needs at its peak. A figure below it comes of work that the
        simulator did not see, and is an error.

    Returns:
      The cycles, or what the simulator failed with.

    Raises:
      Exception: What the compiler refuses, which is no failure of the simulator.
    """
    return _sum(_by_operation(fn, args, topology), leave_out, least)


def simulate_once(
    fn: Callable[..., Any],
    *args: Any,
    topology: str,
    leave_out: tuple[str, ...] = (),
    least: float = 0,
) -> Cycles:
    """As `simulate`; what became of a program is looked up where the same one was simulated before.

    It stands in `benchmarks/results/simulated.json`, by a hash of the lowered program.
    """
    limit = jax.config.jax_traceback_in_locations_limit
    jax.config.update("jax_traceback_in_locations_limit", 0)
    try:
        program, _ = export(fn, args, topology)
    finally:
        jax.config.update("jax_traceback_in_locations_limit", limit)
    key = {"topology": topology, "program": hashlib.sha256(program).hexdigest()[:16]}
    known = [row for row in read_results("simulated") if key.items() <= row.items()]
    if not known:
        known = [key | {"found": _by_operation(fn, args, topology)}]
        # Read again: another process may have added to it.
        write_results(
            "simulated",
            "python -m benchmarks.tune; python -m benchmarks.flash",
            sorted(read_results("simulated") + known, key=lambda row: row["program"]),
        )
    return _sum(known[0]["found"], leave_out, least)


def _by_operation(fn, args, topology: str) -> dict[str, int] | str:
    """Cycles of each operation, or what the simulator failed with."""
    try:
        return estimate_cycles(fn, *args, topology=topology)
    except RuntimeError as error:
        compile_for_tpu(fn, *args, topology=topology)
        said = str(error).partition("The process said:\n")[2] or str(error)
        exception = re.search(r"^[\w.]+(?:Error|Exception): .*", said, re.MULTILINE)
        return exception[0] if exception else said.strip().partition("\n")[0]


def _sum(found: dict[str, int] | str, leave_out: tuple[str, ...], least: float) -> Cycles:
    if isinstance(found, str):
        return Cycles(error=found)
    count = sum(n for name, n in found.items() if not name.startswith(leave_out))
    if count < least:
        return Cycles(error=f"{count:,} cycles are less than the peak allows ({least:,.0f})")
    return Cycles(count=count)
