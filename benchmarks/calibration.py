"""How far simulated cycles are off against hardware: `python -m benchmarks.calibration`.

Simulates what others have measured on TPUs and published (`benchmarks/published.json`), the same
kernel with the same tiles, and writes `benchmarks/calibration.md`. Needs `.venv-peers` (`make
peers`). Points that `benchmarks/results/calibration.json` has under the same versions are kept:
delete it to simulate all of them again, which takes about half an hour.
"""

import argparse
import functools
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from benchmarks import peers
from benchmarks.results_file import read_results, write_results
from benchmarks.simulate import FLOP_PER_CYCLE, GIGAHERTZ, HBM_GIGABYTES, Cycles, simulate

HERE = Path(__file__).parent
TOKENS = 8192  # of all heads simulated together, so that starting up counts for little

TEXT = """# How far the simulation is off

Written by `python -m benchmarks.calibration`; the rows are in `benchmarks/results/calibration.json`, with versions.

{source}

Simulated is the same kernel with the same tiles on some of the heads; the transposes around it that the measured operation does are added as bytes over the bandwidth of HBM, as the simulator has no cost for them; of a matmul, a plain Pallas kernel with the same tiles. Shares are useful operations over the peak of one device (v5e 197, v5p 459, v6e 918, tpu7x 1153 Tflop/s in bfloat16; a device of tpu7x is one of two cores). The ratio is simulated time over measured time: below 1, the simulation is too optimistic by so much.

**{summary}** A failed simulation is in the list with what the simulator said: it is libtpu's simulator that fails, not the kernel.

| | points | median | lowest | highest | half of them within |
|---|---|---|---|---|---|
{groups}

What it is good for: to compare kernels for one generation and pass under it, where the ratios lie close together. What it is not: a time. It knows nothing of launches, of clocks that throttle, and of the traffic of other programs. At 512 and 1024 tokens the transposes, which are not simulated, are a large part. The matmul measured on v5p has 43% of the peak of both cores, and XLA's own in the same files has 47%, as if one core did the work: that one ratio says little. Paged attention has no point: the published figures (arXiv 2604.15464: up to 86% of memory bandwidth in decoding and 73% of the peak in prefill, Llama 3 8B on TPU7x) come without the shapes and lengths that a simulation needs.

| | operation | B | length | heads | head size | measured ms | share of peak | simulated share | of it transposes | ratio |
|---|---|---|---|---|---|---|---|---|---|---|
{rows}
"""  # noqa: E501


def main() -> None:
    """Simulates the points that are missing, one after the other, and writes the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", choices=["matmul", "forward", "backward"], help="these points")
    parser.add_argument("--longest", type=int, default=16384, help="no longer sequences than this")
    arguments = parser.parse_args()
    published = json.loads((HERE / "published.json").read_text())
    rows = read_results("calibration")
    for point in published["points"]:
        if any(row["point"] == point for row in rows) or point["length"] > arguments.longest:
            continue
        if arguments.only in (None, point["operation"]):
            rows.append(measure(point))
            print(line(rows[-1]), flush=True)
            write_results("calibration", "python -m benchmarks.calibration", rows)
    order = {json.dumps(point): i for i, point in enumerate(published["points"])}
    rows.sort(key=lambda row: order.get(json.dumps(row["point"]), -1))
    text = TEXT.format(
        source=published["source"],
        summary=summary(rows),
        groups="\n".join(group_lines(rows)),
        rows="\n".join(line(row) for row in rows),
    )
    (HERE / "calibration.md").write_text(text)
    print(summary(rows))


def measure(point: dict[str, Any]) -> dict[str, Any]:
    """One row: the point, and its simulation or why there is none."""
    topology, size = point["topology"], point["head_size"]
    share = flop(point) / (point["milliseconds"] * 1e6 * GIGAHERTZ[topology])
    row = {"point": point, "measured_share": round(share / FLOP_PER_CYCLE[topology], 4)}
    if point["operation"] == "matmul":
        array = jax.ShapeDtypeStruct((size, size), jnp.bfloat16)
        multiply = functools.partial(matmul, **point["config"])
        least = flop(point) / FLOP_PER_CYCLE[topology]
        return row | compare(
            point, simulate(multiply, array, array, topology=topology, least=least)
        )
    heads = max(2, min(point["heads"], TOKENS // point["length"]))
    kernel = peers.measure(
        peers.Job(
            peer="tokamax",
            step=point["operation"],
            topology=topology,
            is_causal=False,
            length=point["length"],
            heads=heads,
            head_size=size,
            config=point["config"],
        )
    )
    if kernel.count is None:
        return row | compare(point, kernel)
    cycles = round(kernel.count * point["batch"] * point["heads"] / heads)
    return row | compare(point, Cycles(count=cycles))


def transpose_cycles(point: dict[str, Any]) -> int:
    """Of the transposes to the kernel's layout and back: bytes read and written, at HBM's rate.

    The simulator has no cost for large copies. Query, key and value go in, in the backward pass
    output and its gradient too, and output or gradients come out.
    """
    if point["operation"] == "matmul":
        return 0
    arrays = {"forward": 4, "backward": 8}[point["operation"]]
    elements = point["batch"] * point["length"] * point["heads"] * point["head_size"]
    moved_bytes = arrays * 2 * elements * 2
    topology = point["topology"]
    return round(moved_bytes / HBM_GIGABYTES[topology] * GIGAHERTZ[topology])


def compare(point: dict[str, Any], kernel: Cycles) -> dict[str, Any]:
    """What the simulation of a whole point's kernel says beside the measured time."""
    if kernel.count is None:
        return {"error": kernel.error}
    topology = point["topology"]
    around = transpose_cycles(point)
    cycles = kernel.count + around
    milliseconds = cycles / (GIGAHERTZ[topology] * 1e6)
    return {
        "kernel_cycles": kernel.count,
        "transpose_cycles": around,
        "simulated_share": round(flop(point) / cycles / FLOP_PER_CYCLE[topology], 4),
        "ratio": round(milliseconds / point["milliseconds"], 3),
    }


def flop(point: dict[str, Any]) -> float:
    """Useful operations of a point."""
    size = point["head_size"]
    if point["operation"] == "matmul":
        return 2 * point["length"] * size * size
    times = 2.5 if point["operation"] == "backward" else 1
    return times * 4 * point["batch"] * point["heads"] * point["length"] ** 2 * size


def matmul(x: jax.Array, y: jax.Array, *, tile_m: int, tile_k: int, tile_n: int) -> jax.Array:
    """`x @ y` in bfloat16, summed in float32."""

    def kernel(x_ref, y_ref, out_ref, sum_ref):
        step = pl.program_id(2)

        @pl.when(step == 0)
        def _():
            sum_ref[...] = jnp.zeros_like(sum_ref)

        sum_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

        @pl.when(step == pl.num_programs(2) - 1)
        def _():
            out_ref[...] = sum_ref[...].astype(out_ref.dtype)

    m, k = x.shape
    n = y.shape[1]
    return pl.pallas_call(
        kernel,
        grid=(n // tile_n, m // tile_m, k // tile_k),
        in_specs=[
            pl.BlockSpec((tile_m, tile_k), lambda j, i, step: (i, step)),
            pl.BlockSpec((tile_k, tile_n), lambda j, i, step: (step, j)),
        ],
        out_specs=pl.BlockSpec((tile_m, tile_n), lambda j, i, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        scratch_shapes=[pltpu.VMEM((tile_m, tile_n), jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=60 * 2**20,
        ),
        name="matmul",
    )(x, y)


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """One sentence: how many points, how far off."""
    ratios = [row["ratio"] for row in rows if "ratio" in row]
    if not ratios:
        return f"0 of {len(rows)} points simulated."
    low, high = spread(ratios)
    return (
        f"{len(ratios)} of {len(rows)} points simulated: simulated time over measured time has the "
        f"median {statistics.median(ratios):.2f}, half of the points lie between {low:.2f} and "
        f"{high:.2f}, all between {min(ratios):.2f} and {max(ratios):.2f}."
    )


def spread(ratios: Sequence[float]) -> tuple[float, float]:
    """Lower and upper quartile."""
    if len(ratios) < 2:
        return ratios[0], ratios[0]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return low, high


def group_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The table's lines for each operation and generation."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        point = row["point"]
        group = "matmul" if point["operation"] == "matmul" else f"{point['operation']}, "
        if point["operation"] != "matmul":
            group += point["topology"]
        groups.setdefault(group, [])
        if "ratio" in row:
            groups[group].append(row["ratio"])
    lines = []
    for group, ratios in groups.items():
        figures = "| - | - | - | -"
        if ratios:
            low, high = spread(ratios)
            figures = (
                f"| {statistics.median(ratios):.2f} | {min(ratios):.2f} | {max(ratios):.2f} | "
                f"{low:.2f} to {high:.2f}"
            )
        lines.append(f"| {group} | {len(ratios)} {figures} |")
    return lines


def line(row: dict[str, Any]) -> str:
    """The table's line of a point."""
    point = row["point"]
    if "ratio" in row:
        transposes = row["transpose_cycles"] / (row["kernel_cycles"] + row["transpose_cycles"])
        simulated = f"{row['simulated_share']:.3f} | {transposes:.0%} | {row['ratio']:.2f}"
    else:
        simulated = f"- | - | failed: {row['error'][:120].replace('|', '/')}"
    return (
        f"| {point['topology']} | {point['operation']} | {point['batch']} | {point['length']} | "
        f"{point['heads']} | {point['head_size']} | {point['milliseconds']} | "
        f"{row['measured_share']:.3f} | {simulated} |"
    )


if __name__ == "__main__":
    main()
