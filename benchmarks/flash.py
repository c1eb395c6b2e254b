"""Simulated speed of the flash kernels: `python -m benchmarks.flash [--topology v6e]`.

Useful operations per cycle by the TPU compiler's static profile (causal counts half, backward 2.5
times forward), as a share of what the matrix unit can issue at that head size, with the tiles that
the package chooses. The backward pass counts all that the gradient adds: the kernel, and the
reductions around it. Nothing here has run on a TPU, and the profile is up to 30% optimistic
against hardware (docs/TPU_WITHOUT_TPU.md). Takes some minutes for each generation. A dash stands
where libtpu compiles the program and its simulator crashes.
"""

import argparse
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

from benchmarks.results_file import RESULTS, write_results
from flax_pallas_attn import dot_product_attention
from flax_pallas_attn.aot import estimate_cycles

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, HEADS = 4096, 2
HEAD_SIZES = (64, 128, 256)
# Floating point operations per cycle that the matrix units can issue at each head size: half of a
# 256-wide array idles at head size 128.
LIMITS = {
    "v5e": {64: 65_536, 128: 131_072, 256: 131_072},
    "v5p": {64: 131_072, 128: 262_144, 256: 262_144},
    "v6e": {64: 131_072, 128: 262_144, 256: 524_288},
    "tpu7x": {64: 131_072, 128: 262_144, 256: 524_288},
}
PICTURE = Path(__file__).parent.parent / "docs" / "flash_share.png"


def main() -> None:
    """Simulates, prints a table, writes the result file and draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", nargs="*", choices=LIMITS, default=list(LIMITS))
    parser.add_argument("--head-size", nargs="*", type=int, choices=HEAD_SIZES, default=HEAD_SIZES)
    arguments = parser.parse_args()
    rows = []
    print(f"bfloat16, {HEADS} heads, T = S = {LENGTH}; share of the matrix unit's issue limit")
    print(f"{'':8}{'head size':>10}{'mask':>8}{'forward':>10}{'backward':>10}")
    for topology in arguments.topology:
        for head_size in arguments.head_size:
            for is_causal in (False, True):
                row = measure(topology, head_size, is_causal)
                rows.append(row)
                shares = "".join(
                    f"{'-' if row[share] is None else format(row[share], '.2f'):>10}"
                    for share in ("forward_share", "backward_share")
                )
                print(f"{topology:8}{head_size:10}{row['mask']:>8}{shares}", flush=True)
    whole = list(arguments.topology) == list(LIMITS) and tuple(arguments.head_size) == HEAD_SIZES
    if whole:  # a part does not replace the committed file and picture
        print(write_results("flash", "python -m benchmarks.flash", rows))
        draw(rows)
        print(PICTURE)
    else:
        print(f"{RESULTS / 'flash.json'} is written by a run over everything alone")


def measure(topology: str, head_size: int, is_causal: bool) -> dict:
    """One row of the table."""
    attend = functools.partial(dot_product_attention, layout="BNTH", is_causal=is_causal)
    array = jax.ShapeDtypeStruct((1, HEADS, LENGTH, head_size), jnp.bfloat16)

    def gradients(query, key, value, output_gradient):
        output, vjp = jax.vjp(attend, query, key, value)
        return output, vjp(output_gradient)

    useful = 4 * HEADS * LENGTH**2 * head_size / (2 if is_causal else 1)
    limit = LIMITS[topology][head_size]
    row: dict = {
        "topology": topology,
        "head_size": head_size,
        "mask": "causal" if is_causal else "full",
    }
    for step, function, arrays, times in (
        ("forward", attend, [array] * 3, 1),
        ("backward", gradients, [array] * 4, 2.5),
    ):
        cycles = share = None
        try:
            counts = estimate_cycles(function, *arrays, topology=topology)
        except RuntimeError as error:
            row[f"{step}_error"] = str(error).splitlines()[0]
        else:
            cycles = sum(
                count
                for name, count in counts.items()
                if step == "forward" or not name.startswith("flash_forward")
            )
            share = round(times * useful / cycles / limit, 3)
        row |= {f"{step}_cycles": cycles, f"{step}_share": share}
    return row


def draw(rows: list[dict]) -> None:
    """One panel a pass and mask, one group of bars a generation, one bar a head size."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, sharey=True)
    colours = ("#9ecae1", "#4292c6", "#08519c")
    for column, mask in zip(axes.T, ("full", "causal"), strict=True):
        for panel, step in zip(column, ("forward", "backward"), strict=True):
            for i, head_size in enumerate(HEAD_SIZES):
                shares = [
                    row[f"{step}_share"] or 0
                    for row in rows
                    if row["mask"] == mask and row["head_size"] == head_size
                ]
                places = [generation + (i - 1) * 0.27 for generation in range(len(shares))]
                bars = panel.bar(
                    places, shares, 0.25, color=colours[i], label=f"head size {head_size}"
                )
                panel.bar_label(bars, fmt="%.2f", fontsize=7)
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_title(f"{mask} mask, {step}", fontsize=10)
            panel.set_xticks(range(len(LIMITS)), list(LIMITS))
            panel.set_ylim(0, 1.3)
    for panel in axes[:, 0]:
        panel.set_ylabel("share of issue limit")
    axes[0, 0].legend(fontsize=8, loc="upper right", ncols=3)
    figure.suptitle(f"Flash attention, T = S = {LENGTH}, bfloat16: simulated, not measured")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120)


if __name__ == "__main__":
    main()
