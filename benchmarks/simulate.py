"""Simulated cycles for benchmarks: what failed is told apart; nothing is above the peak."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from flax_pallas_attn.aot import compile_for_tpu, estimate_cycles

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
    try:
        cycles = estimate_cycles(fn, *args, topology=topology)
    except RuntimeError as error:
        compile_for_tpu(fn, *args, topology=topology)
        said = str(error).partition("The process said:\n")[2] or str(error)
        exception = re.search(r"^[\w.]+(?:Error|Exception): .*", said, re.MULTILINE)
        return Cycles(error=exception[0] if exception else said.strip().partition("\n")[0])
    count = sum(n for name, n in cycles.items() if not name.startswith(leave_out))
    if count < least:
        return Cycles(error=f"{count:,} cycles are less than the peak allows ({least:,.0f})")
    return Cycles(count=count)
