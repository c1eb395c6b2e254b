"""Searches the flash kernels' tile sizes by simulated cycles: `python -m benchmarks.tune`.

For each generation, dtype, head size and length, all pairs of tile sizes are simulated, forward and
backward, causal and without a mask. The pair with the least product of both masks' cycles is put
into `flax_pallas_attn/kernels/tile_table.py`, from which the package chooses. Pairs that the
compiler refuses or its simulator fails on count as not measured, and the result file keeps what was
said. Each pair is written to `benchmarks/results/tune.json` as soon as it is there: a run that was
stopped goes on, and pairs of other kernels than the present ones are simulated again. A length of
one generation, dtype and head size takes about half an hour.
"""

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.results_file import kernels_hash, read_results, write_results
from benchmarks.simulate import FLOP_PER_CYCLE, GENERATIONS, Cycles, simulate
from flax_pallas_attn import dot_product_attention
from flax_pallas_attn.kernels.tiles import Tiles

SIZES = (256, 512, 1024, 2048)
LENGTHS = (1024, 4096)
"""Each stands for lengths up to itself and beyond the one before; the last for all above too."""
HEAD_SIZES = (64, 128, 256)
DTYPES = ("bfloat16", "float32")
HEADS = 2
STEPS = ("forward", "backward")
MASKS = ("causal", "full")
TABLE = Path(__file__).parent.parent / "flax_pallas_attn" / "kernels" / "tile_table.py"

HEADER = '''"""Tile sizes with the least simulated cycles; written by `python -m benchmarks.tune`.

Keys are generation, dtype, head size, and the longest length that the entry was simulated for.
"""

'''
COMMENTS = {"forward": "# (query, key)", "backward": "# (backward_key, backward_query)"}


def main() -> None:
    """Simulates the pairs that are missing, then writes the table of all that are known."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", nargs="*", choices=GENERATIONS, default=GENERATIONS)
    parser.add_argument("--dtype", nargs="*", choices=DTYPES, default=DTYPES)
    parser.add_argument("--head-size", nargs="*", type=int, choices=HEAD_SIZES, default=HEAD_SIZES)
    parser.add_argument("--length", nargs="*", type=int, choices=LENGTHS, default=LENGTHS)
    parser.add_argument("--step", nargs="*", choices=STEPS, default=STEPS)
    parser.add_argument(
        "--write", action="store_true", help="only write the table of the pairs already simulated"
    )
    arguments = parser.parse_args()
    kernels = kernels_hash(leave_out=TABLE.name)
    rows = read_results("tune")
    cases = itertools.product(
        arguments.topology, arguments.dtype, arguments.head_size, arguments.length, arguments.step
    )
    for topology, dtype, head_size, length, step in () if arguments.write else cases:
        case = {"topology": topology, "dtype": dtype, "head_size": head_size}
        case |= {"length": length, "step": step}
        for pair, mask in itertools.product(pairs(length), MASKS):
            key = case | {"mask": mask, "tiles": list(pair)}
            if any((key | {"kernels": kernels}).items() <= row.items() for row in rows):
                continue
            cycles = measure(**key)
            rows = [row for row in rows if not key.items() <= row.items()]
            rows.append(key | dataclasses.asdict(cycles) | {"kernels": kernels})
            write_results("tune", "python -m benchmarks.tune", rows)
            print(*key.values(), cycles.error or f"{cycles.count:,}", flush=True)
        print(topology, dtype, head_size, length, step, "best:", best(select(rows, case)))
    TABLE.write_text(table(rows))
    print(TABLE)


def pairs(length: int) -> list[tuple[int, int]]:
    """Tile sizes to try: of the grid's axis, of the loop's. None is longer than the sequence."""
    sizes = [size for size in SIZES if size <= length]
    return list(itertools.product(sizes, sizes))


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
    """Cycles with one pair of tile sizes. A refusal of the compiler is an error here too."""
    own, other = tiles
    forward = step == "forward"
    attend = functools.partial(
        dot_product_attention,
        layout="BNTH",
        is_causal=mask == "causal",
        tiles=Tiles(
            query=own if forward else 512,
            key=other if forward else 512,
            key_chunk=length,
            backward_key=512 if forward else own,
            backward_query=512 if forward else other,
            backward_query_chunk=length,
        ),
    )

    def gradients(query, key, value, output_gradient):
        output, vjp = jax.vjp(attend, query, key, value)
        return output, vjp(output_gradient)

    array = jax.ShapeDtypeStruct((1, HEADS, length, head_size), jnp.dtype(dtype))
    flop = 4 * HEADS * length**2 * head_size / (2 if mask == "causal" else 1)
    call = functools.partial(simulate, topology=topology)
    try:
        if forward:
            return call(attend, *[array] * 3, least=flop / FLOP_PER_CYCLE[topology])
        return call(
            gradients,
            *[array] * 4,
            leave_out=("flash_forward",),
            least=2.5 * flop / FLOP_PER_CYCLE[topology],
        )
    except jax.errors.JaxRuntimeError as error:
        return Cycles(error="refused: " + str(error).partition("\n")[0])


def select(rows: Iterable[dict[str, Any]], case: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of one case: they differ in mask and tiles alone."""
    return [row for row in rows if case.items() <= row.items()]


def best(rows: Iterable[dict[str, Any]]) -> tuple[int, int] | None:
    """The pair with the least product of all masks' cycles; None if none has them all."""
    counts: dict[tuple[int, int], dict[str, int]] = {}
    for row in rows:
        if row["count"] is not None:
            own, other = row["tiles"]
            counts.setdefault((own, other), {})[row["mask"]] = row["count"]
    whole = {
        pair: math.prod(of_mask.values())
        for pair, of_mask in counts.items()
        if set(of_mask) == set(MASKS)
    }
    return min(whole, key=lambda pair: (whole[pair], pair)) if whole else None


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The text of `tile_table.py`. A case of which no pair was simulated is not in it."""
    text = HEADER
    for step in STEPS:
        cases = {
            (row["topology"], row["dtype"], row["head_size"], row["length"])
            for row in rows
            if row["step"] == step
        }
        text += f"{step.upper()}: dict[tuple[str, str, int, int], tuple[int, int]] = {{"
        text += f"  {COMMENTS[step]}\n"
        for key in sorted(cases, key=lambda key: (GENERATIONS.index(key[0]), *key[1:])):
            topology, dtype, head_size, length = key
            case = {"topology": topology, "dtype": dtype, "head_size": head_size}
            pair = best(select(rows, case | {"length": length, "step": step}))
            if pair is not None:
                text += f'    ("{topology}", "{dtype}", {head_size}, {length}): {pair},\n'
        text += "}\n"
    return text


if __name__ == "__main__":
    main()
