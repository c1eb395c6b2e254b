"""Searches the flash kernels' tile sizes by simulated cycles: `python -m benchmarks.tune`.

For each length, dtype, head size and generation, pairs of tile sizes are simulated, forward and
backward, causal and without a mask, from the largest tile down until one costs a tenth more than
the best. The pair with the least product of both masks' cycles is put into
`flax_pallas_attn/kernels/tile_table.py`, from which the package chooses. Pairs that the compiler
refuses or its simulator fails on count as not measured, and the result file keeps what was said; a
case of which none is measured takes the pair of the generation with the same matrix units.

A run that was stopped goes on where it was, and one of other kernels simulates what they change.
A case takes some minutes, all of them hours.
"""

import argparse
import dataclasses
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import flash
from benchmarks.results_file import read_results, write_results
from benchmarks.simulate import GENERATIONS, Cycles

SIZES = (2048, 1024, 512, 256)
LENGTHS = (4096, 1024)
HEAD_SIZES = (128, 64, 256)
DTYPES = ("bfloat16", "float32")
HEADS = 2
STEPS = ("forward", "backward")
MASKS = ("causal", "full")
SLOW = 1.1
"""Cycles of the larger tile, over those of the best so far, from which on smaller are not tried."""
MOST_TO_COMPILE = {
    ("bfloat16", "forward"): 2048 * 2048 * 256,
    ("bfloat16", "backward"): 2048 * 1024 * 256,
    ("float32", "forward"): 512 * 512 * 128,  # in six passes, of operands that are split before
    ("float32", "backward"): 512 * 512 * 128,
}
"""Products of a tile: beyond, the compiler takes minutes."""
ALIKE = {"v5e": "v5p", "v5p": "v5e", "v6e": "tpu7x", "tpu7x": "v6e"}
"""Generations whose matrix units are as wide."""
TABLE = Path(__file__).parent.parent / "flax_pallas_attn" / "kernels" / "tile_table.py"

HEADER = '''"""Tile sizes with the least simulated cycles; written by `python -m benchmarks.tune`.

Keys are generation, dtype, head size, and the length that the entry was simulated for.
"""

Table = dict[tuple[str, str, int, int], tuple[int, int]]
'''
FIELDS = {
    "forward": ("query", "key", "key_chunk"),
    "backward": ("backward_key", "backward_query", "backward_query_chunk"),
}
"""Of `Tiles`: a pair, and the chunk, which is the whole sequence."""


def main() -> None:
    """Searches the cases asked for, then writes the table of all that are known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", nargs="*", choices=GENERATIONS, default=GENERATIONS)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--head-size", nargs="*", type=int, choices=HEAD_SIZES, default=HEAD_SIZES)
    parser.add_argument("--length", nargs="*", type=int, choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--step", nargs="*", choices=STEPS, default=STEPS)
    arguments = parser.parse_args()
    for length, dtype, head_size, topology, step in itertools.product(
        arguments.length,
        arguments.dtype,
        arguments.head_size,
        arguments.topology,
        arguments.step,
    ):
        case = {"topology": topology, "dtype": dtype, "head_size": head_size}
        case |= {"length": length, "step": step}
        found = search(case)
        # Read again: another process may have added to it.
        others = [row for row in read_results("tune") if not case.items() <= row.items()]
        write_results("tune", "python -m benchmarks.tune", sorted(others + found, key=_order))
        print(*case.values(), "best:", best(found), flush=True)
    TABLE.write_text(table(read_results("tune")))
    print(TABLE)


def search(case: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of the pairs tried, from the largest tile down until one is much slower than the best.

    Args:
      case: Generation, dtype, head size, length and step.
    """
    rows: list[dict[str, Any]] = []
    for pair in pairs(case):
        of_pair = [
            {**case, "mask": mask, "tiles": list(pair)}
            | dataclasses.asdict(measure(**case, mask=mask, tiles=pair))
            for mask in MASKS
        ]
        rows += of_pair
        costs = cost(rows)
        if pair in costs and costs[pair] > SLOW * min(costs.values()):
            break
    return rows


def pairs(case: dict[str, Any]) -> list[tuple[int, int]]:
    """Tile sizes to try, the largest first: of the axis that walks, of the other.

    None is longer than the sequence, or takes the compiler many minutes.
    """
    tried = [(size, other) for size in SIZES for other in (size, size // 2)]
    return [
        (size, other)
        for size, other in tried
        if size <= case["length"]
        and other >= SIZES[-1]
        and size * other * case["head_size"] <= MOST_TO_COMPILE[case["dtype"], case["step"]]
    ]


def measure(
    *,
    topology: str,
    dtype: str,
    head_size: int,
    length: int,
    step: str,
    mask: str,
    tiles: Sequence[int],
) -> Cycles:
    """Cycles with one pair of tile sizes, and of the other pass those that the package chooses.

    A refusal of the compiler is an error here too.
    """
    names = FIELDS[step]
    flop = 4 * HEADS * length**2 * head_size / (2 if mask == "causal" else 1)
    try:
        return flash.measure(
            flash.Shape(length=length, heads=HEADS, kv_heads=HEADS),
            step,
            topology,
            head_size,
            mask == "causal",
            flop=flop * (2.5 if step == "backward" else 1),
            dtype=dtype,
            sizes=dict(zip(names, (*tiles, length), strict=True)),
        )
    except jax.errors.JaxRuntimeError as error:
        return Cycles(error="refused: " + str(error).partition("\n")[0])


def cost(rows: Iterable[dict[str, Any]]) -> dict[tuple[int, int], int]:
    """Product of all masks' cycles, of the pairs that have them all."""
    counts: dict[tuple[int, int], dict[str, int]] = {}
    for row in rows:
        if row["count"] is not None:
            own, other = row["tiles"]
            counts.setdefault((own, other), {})[row["mask"]] = row["count"]
    return {
        pair: math.prod(of_mask.values())
        for pair, of_mask in counts.items()
        if set(of_mask) == set(MASKS)
    }


def best(rows: Iterable[dict[str, Any]]) -> tuple[int, int] | None:
    """The pair with the least cost, or the smaller of equal ones; None if none has one."""
    costs = cost(rows)
    return min(costs, key=lambda pair: (costs[pair], pair)) if costs else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The text of `tile_table.py`. A case of which no pair was simulated, not even on the
    generation alike, is not in it."""
    text = HEADER
    for step in STEPS:
        text += f"\n{step.upper()}: Table = {{\n"
        of_step = [row for row in rows if row["step"] == step]
        for case, of_case in itertools.groupby(sorted(of_step, key=_order), key=_order):
            _, generation, *others = case
            topology, (dtype, head_size, length) = GENERATIONS[generation], others
            alike = {"topology": ALIKE[topology], "dtype": dtype, "head_size": head_size}
            alike |= {"length": length}
            pair = best(of_case) or best(row for row in of_step if alike.items() <= row.items())
            if pair is not None:
                text += f'    ("{topology}", "{dtype}", {head_size}, {length}): {pair},\n'
        own, other, _ = FIELDS[step]
        text += f'}}\n"""Sizes of `Tiles.{own}` and `Tiles.{other}`."""\n'
    return text


def _order(row: dict[str, Any]) -> tuple[Any, ...]:
    generation = GENERATIONS.index(row["topology"])
    return STEPS.index(row["step"]), generation, row["dtype"], row["head_size"], row["length"]


if __name__ == "__main__":
    main()
