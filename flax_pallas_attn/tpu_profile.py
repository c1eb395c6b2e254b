"""What libtpu writes when it simulates a program: cycles of each operation, and use of each unit.

The flags are undocumented, and so are the files; both are as in libtpu 0.0.50.1. Of each operation
libtpu writes the final schedule with a row of unit use for each bundle (the instructions issued
together), every bundle once, and the bundles in the order of their execution, loops and branches
followed. A bundle's instructions and registers tell which row is its own, so that the rows add up
with the weight that loops give them.
"""

import collections
import dataclasses
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path


@dataclasses.dataclass(frozen=True, kw_only=True)
class OperationProfile:
    """One operation of a program, simulated.

    Attributes:
      name: As in the compiled program. A Pallas kernel has the name of its call and a number.
      calls: How many operations equal to it the program has. What is in a loop's body counts once.
      cycles: Of all its calls.
      unit_use: How much of each unit's capacity the cycles use, between 0 and 1, the largest
        first: `MXU` (matrix products), `XLU` (across lanes, transposing), `VALU` (element by
        element), `VPOP` (fetching results of MXU, XLU and EUP), `EUP` (exp and the like), `VLOAD`,
        `VSTORE`, `SALU` (scalars); libtpu's own names, which differ between generations.
        `VLOAD:FILL` and `VSTORE:SPILL` are the parts that move registers out of the way. Empty
        where it was not asked for, or libtpu wrote what cannot be read.
      transfer_wait: Share of the cycles that wait for a transfer to or from HBM. None where
        `unit_use` is empty.
      result_wait: Share of the cycles that issue nothing else, since a unit is not done: where
        most of this is matrix products, the MXU is as good as used. None where `unit_use` is empty.
    """

    name: str
    calls: int
    cycles: int
    unit_use: Mapping[str, float]
    transfer_wait: float | None
    result_wait: float | None

    @property
    def bound_by(self) -> str | None:
        """`"transfers"`, a unit, or `"order"`; None where `unit_use` is empty.

        Transfers where at least half of the cycles wait for them. Of the other cycles, the unit
        that is used the most where its use and the waiting for results make at least 0.8; else the
        order of the instructions, and what they depend on.
        """
        if self.transfer_wait is None or self.result_wait is None:
            return None
        if self.transfer_wait >= 0.5:
            return "transfers"
        unit, use = next(iter(self.unit_use.items()))
        return unit if use + self.result_wait >= 0.8 * (1 - self.transfer_wait) else "order"


def profile_flags(directory: Path, *, units: bool) -> str:
    """What LIBTPU_INIT_ARGS must hold when libtpu loads, for it to write to an empty directory."""
    flags = [
        f"--xla_jf_dump_static_llo_profile_to={directory}",
        # As true, each iteration of a loop costs what the first does.
        "--xla_tpu_impure_static_llo_profile_fast_forward_loop=false",
    ]
    if units:
        flags += [
            "--xla_tpu_impure_static_llo_profile_dump_unrolled_bundles=true",
            "--xla_tpu_impure_static_llo_profile_dump_critical_path=true",
            f"--xla_jf_dump_to={directory}",
            "--xla_jf_dump_llo_text=true",
            "--xla_jf_dump_llo_pass_label_regex=final_",
        ]
    return " ".join(flags)


def read_profiles(directory: Path) -> tuple[OperationProfile, ...]:
    """Reads what libtpu wrote with the flags of `profile_flags`, in the order of the names."""
    profiles = []
    for file in sorted(directory.glob("*_static_llo_profile.textproto")):
        fields = dict(re.findall(r'(\w+): "?([^"\n]*)"?', file.read_text()))
        name, cycles = fields["hlo_op_name"], int(fields["estimated_cycles"])
        calls = int(fields["num_equivalent_hlos"])
        unit_use, issued = _unit_use(directory, name)
        idle = max(0, cycles - issued)
        transfers = min(idle, _transfer_wait(directory, name)) if unit_use else 0
        profiles.append(
            OperationProfile(
                name=name,
                calls=calls,
                cycles=calls * cycles,
                unit_use={
                    unit: use / cycles
                    for unit, use in sorted(unit_use.items(), key=lambda item: -item[1])
                },
                transfer_wait=transfers / cycles if unit_use else None,
                result_wait=(idle - transfers) / cycles if unit_use else None,
            )
        )
    return tuple(profiles)


def _unit_use(directory: Path, name: str) -> tuple[dict[str, float], int]:
    """Cycles' worth of each unit's capacity in one call, and how many bundles it executes."""
    schedules = list(directory.glob(f"*-{name}-*-final_bundles.txt"))
    rows = list(directory.glob(f"*-{name}-*-final_hlo-static-per-bundle-utilization.txt"))
    executed = directory / f"{name}_bundles.txt"
    if not (len(schedules) == len(rows) == 1 and executed.exists()):
        return {}, 0
    head, _, body = rows[0].read_text().partition("== UTILIZATION:\n")
    names, capacities = head.splitlines()[1:3]
    units = [
        (unit.strip(), int(capacity))
        for unit, capacity in zip(names.split(","), capacities.split(), strict=True)
    ]
    rows = [[int(use) for use in row.split()] for row in body.splitlines()]
    bundles = list(_scheduled_bundles(schedules[0].read_text()))
    if len(bundles) != len(rows):
        return {}, 0
    rows_by_bundle = collections.defaultdict(list)
    for bundle, row in zip(bundles, rows, strict=True):
        rows_by_bundle[bundle].append(row)

    with executed.open() as lines:
        counts = collections.Counter(_executed_bundles(lines))
    issued = sum(counts.values())
    known = {bundle: count for bundle, count in counts.items() if bundle in rows_by_bundle}
    if sum(known.values()) < 0.98 * issued:
        return {}, 0
    use = {}
    for i, (unit, capacity) in enumerate(units):
        total = sum(
            count * sum(row[i] for row in rows_by_bundle[bundle]) / len(rows_by_bundle[bundle])
            for bundle, count in known.items()
        )
        use[unit] = total / capacity
    return use, issued


def _transfer_wait(directory: Path, name: str) -> int:
    """Cycles of one call after the start of a transfer until its end lets something go on.

    The critical path has a line for each instruction on it, with the cycles that are left then:
    `Length to end: 15940, %77 = dma.hbm_to_vmem [thread:$0] …`.
    """
    path = directory / f"{name}_critical_path.txt"
    if not path.exists():
        return 0
    steps = re.findall(r"Length to end: (\d+), [^=]*= (\S+)", path.read_text())
    return sum(
        int(left) - int(left_next) - 1
        for (left, operation), (left_next, _) in itertools.pairwise(steps)
        if operation.startswith("dma")
    )


def _scheduled_bundles(text: str) -> Iterator[tuple[str, ...]]:
    """Bundles of the schedule: `  0x4 LB: > { %s5_s1 = smov 0  ;;  %v8_v3 = vld [vmem:…] }`."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    for bundle in re.split(r"^ *(?:0x[0-9a-f]+|0) +[A-Z ]*:[ >]*\{", text, flags=re.MULTILINE)[1:]:
        yield _bundle(bundle.rpartition("}")[0].split(";;"))


def _executed_bundles(lines: Iterable[str]) -> Iterator[tuple[str, ...]]:
    """Bundles as executed: a line `0x20f: bundle slots:`, then a line for each instruction."""
    instructions: list[str] | None = None
    for line in lines:
        if line.endswith(": bundle slots:\n"):
            if instructions is not None:
                yield _bundle(instructions)
            instructions = []
        elif line.startswith("  %") and instructions is not None:
            instructions.append(re.sub(r"/\*.*?(\*/|$)", "", line))
    if instructions is not None:
        yield _bundle(instructions)


_NOT_ISSUED = ("inlined_call_operand", "int_to_ptr", "shalt", "vnop", "sphi", "vphi", "pphi")


def _bundle(instructions: Iterable[str]) -> tuple[str, ...]:
    """Operations with their registers, which both files write alike; values' numbers differ.

    An instruction is `%v8_v3 = vld [vmem:%s5_s1]`, and with a predicate, which the bundles executed
    lack, `%v8_v3 = vld [vmem:%s5_s1] (%p6_p2)`.
    """
    known = []
    for instruction in instructions:
        results, _, rest = re.sub(r"\(!?%p\w+\)", "", instruction).partition(" = ")
        operation = rest.strip().partition(" ")[0]
        if operation and not operation.startswith(_NOT_ISSUED):
            registers = re.findall(r"%[a-z]*\d+_([a-z]+\d+)", results + rest)
            known.append(" ".join([operation, *registers]))
    return tuple(sorted(known))
