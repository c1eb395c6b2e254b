"""Simulated speed of the flash kernels: `python -m benchmarks.flash [--topology v6e] [--peers]`.

Useful operations per cycle by the TPU compiler's static profile (causal counts half, backward 2.5
times forward), as a share of what the matrix unit can issue at that head size, with the tiles that
the package chooses. The backward pass counts all that the gradient adds: the kernel, and the
reductions around it. Nothing here has run on a TPU: cycles are a simulation, and how far off it was
against hardware is in `benchmarks/calibration.md`. A dash stands where libtpu compiles the program
and its simulator fails; the result file says how.

`--peers` adds jax's splash attention and tokamax's (without a mask alone: its causal kernel reads
what to compute from memory), each with the best of some tile sizes; it needs `make peers`.
`--what shapes` takes other shapes, relative to one that they should keep up with.
Each row is written to `benchmarks/results/flash.json` as soon as it is there, and a program that
was simulated once is looked up (`benchmarks/results/simulated.json`), so that a run can be stopped.
At the end all rows are shown in `docs/flash.md` and its picture.
Takes some minutes for each generation, the peers and the shapes much longer.
"""

import argparse
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.experimental import pallas as pl

from benchmarks import peers
from benchmarks.results_file import installed_versions, read_results, write_results
from benchmarks.simulate import FLOP_PER_CYCLE, GENERATIONS, Cycles, simulate_once
from flax_pallas_attn import SegmentIds, dot_product_attention
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels import unit_lists
from flax_pallas_attn.masking import Mask

matplotlib.use("Agg")
import matplotlib.pyplot as plt

LENGTH, HEADS = 4096, 2
TILE = 256
"""Tokens along both sides of the tiles that shapes are compared by."""
HEAD_SIZES = (64, 128, 256)
STEPS = ("forward", "backward")
PEERS = ("splash", "tokamax")
# Floating point operations per cycle that the matrix units can issue at each head size: half of a
# 256-wide array idles at head size 128.
LIMITS = {
    "v5e": {64: 65_536, 128: 131_072, 256: 131_072},
    "v5p": {64: 131_072, 128: 262_144, 256: 262_144},
    "v6e": {64: 131_072, 128: 262_144, 256: 524_288},
    "tpu7x": {64: 131_072, 128: 262_144, 256: 524_288},
}
DOCUMENT = Path(__file__).parent.parent / "docs" / "flash.md"
PICTURE = DOCUMENT.with_name("flash_share.png")
COMMAND = "python -m benchmarks.flash --peers --what main shapes"


def _tiles(names: str, *settings: tuple[Any, ...], **others: Any) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), setting, strict=True), **others) for setting in settings]


_FORWARD_TILES = "block_q block_kv block_kv_compute"
_BACKWARD_TILES = "block_q_dkv block_kv_dkv block_kv_dkv_compute"
# The best of these counts. Among them are those that tokamax's authors found the fastest.
SETTINGS: dict[tuple[str, str], list[dict[str, Any]]] = {
    ("splash", "forward"): _tiles(
        _FORWARD_TILES,
        (512, 1024, 512),
        (1024, 1024, 512),
        (1024, 2048, 512),
        (2048, 1024, 512),
        (2048, 2048, 512),
    ),
    ("splash", "backward"): _tiles(
        _BACKWARD_TILES,
        (512, 1024, 512),
        (1024, 1024, 512),
        (1024, 2048, 512),
        (2048, 1024, 512),
        use_fused_bwd_kernel=True,
    ),
    ("tokamax", "forward"): _tiles(
        f"{_FORWARD_TILES} q_layout k_layout v_layout use_experimental_scheduler",
        (1024, 1024, 512, 1, 1, 1, False),
        (1024, 1024, 512, 1, 1, 1, True),
        (2048, 2048, 512, 1, 2, 1, True),
        (2048, 2048, 512, 2, 1, 1, True),
        (1024, 4096, 256, 1, 2, 1, True),
        (2048, 2048, 256, 1, 2, 1, False),
    ),
    ("tokamax", "backward"): _tiles(
        _BACKWARD_TILES,
        (1024, 1024, 512),
        (1024, 1024, 1024),
        (2048, 2048, 512),
        (1024, 4096, 512),
    ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """A causal shape at head size 128, beside the one that it should keep up with.

    Attributes:
      beside: Name of the other one.
      by_time: Relative is the time, over the other's times the share that this one has of its tiles
        that hold anything; else the rate, useful operations per cycle.
      batch: B.
      length: T and S.
      heads: N.
      kv_heads: K.
      window: Keys that a query sees, itself included.
      documents: Documents of equal length that a sequence is packed of.
    """

    beside: str = "S=4096"
    by_time: bool = False
    batch: int = 1
    length: int = LENGTH
    heads: int = HEADS
    kv_heads: int = HEADS
    window: int | None = None
    documents: int = 1

    @property
    def pairs(self) -> int:
        """Pairs of a query and a key that it may attend to, of all sequences and heads."""
        size = self.length // self.documents
        queries = np.arange(size)
        keys = np.minimum(queries + 1, self.window or size)
        return self.batch * self.heads * self.documents * int(keys.sum())

    @property
    def tiles(self) -> int:
        """Tiles of `TILE` by `TILE` that hold such a pair, of all sequences and heads."""
        tiles = np.arange(pl.cdiv(self.length, TILE)) * TILE
        last = np.minimum(tiles + TILE, self.length) - 1
        document = self.length // self.documents
        # The first key that any query of a tile sees, and the last: causality and window.
        first_seen = tiles // document * document
        if self.window is not None:
            first_seen = np.maximum(first_seen, tiles - self.window + 1)
        is_met = (last >= first_seen[:, None]) & (tiles <= last[:, None])
        return self.batch * self.heads * int(is_met.sum())


SHAPES = {
    "S=4096": Shape(),
    "S=512": Shape(length=512),
    "S=512, 64 heads": Shape(length=512, heads=64),
    "S=1024": Shape(length=1024),
    "S=8192": Shape(length=8192),
    "S=16384": Shape(length=16384),
    "S=32768": Shape(length=32768),
    "GQA 8:1": Shape(heads=8, kv_heads=1),
    "batch 4": Shape(batch=4),
    "8 documents in 4096": Shape(documents=8, by_time=True),
    "window 512 in 8192": Shape(length=8192, window=512, beside="S=8192", by_time=True),
    "S=1000": Shape(length=1000, beside="S=1024", by_time=True),
    "S=4092": Shape(length=4092, by_time=True),
}


def main() -> None:
    """Simulates, prints the tables, and draws the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--topology", nargs="*", choices=GENERATIONS, default=GENERATIONS)
    parser.add_argument("--head-size", nargs="*", type=int, choices=HEAD_SIZES, default=HEAD_SIZES)
    parser.add_argument("--mask", nargs="*", choices=("full", "causal"), default=("full", "causal"))
    parser.add_argument("--what", nargs="*", choices=("main", "shapes"), default=("main",))
    parser.add_argument("--shape", nargs="*", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--peers", action="store_true", help="splash attention and tokamax too")
    parser.add_argument("--print", action="store_true", help="show what is there, and draw it")
    arguments = parser.parse_args()
    results = Results()
    for topology in arguments.topology:
        if "main" in arguments.what:
            print(f"{topology}: {HEADS} heads, T = S = {LENGTH}; share of the issue limit")
            print(f"{'':10}{'head size':>10}{'mask':>8}{'ours':>8}{'splash':>8}{'tokamax':>8}")
            for head_size in arguments.head_size:
                for mask in arguments.mask:
                    if not arguments.print:
                        measure_row(results, topology, head_size, mask, arguments.peers)
                    for step in STEPS:
                        print(line(results, topology, head_size, mask, step), flush=True)
        if "shapes" in arguments.what:
            print(f"{topology}: causal, head size 128; forward and backward relative to …")
            for name in arguments.shape:
                if not arguments.print:
                    measure_shape(results, topology, name)
                print(shape_line(results, topology, name), flush=True)
    draw(results)
    DOCUMENT.write_text(document(results))
    print(DOCUMENT, PICTURE)


class Results:
    """Rows of the result file. A row that is added is written at once."""

    def __init__(self) -> None:
        self.rows = read_results("flash")

    def find(self, **key: Any) -> dict[str, Any] | None:
        """The row with these entries."""
        found = [row for row in self.rows if key.items() <= row.items()]
        return found[0] if found else None

    def add(self, key: dict[str, Any], figures: dict[str, Any]) -> None:
        """Puts a row in the place of that with the same key."""
        self.rows = [row for row in self.rows if not key.items() <= row.items()]
        self.rows.append(key | figures)
        self.rows.sort(key=_order)
        write_results("flash", COMMAND, self.rows)


def _order(row: dict[str, Any]) -> tuple:
    what = (row["what"], row.get("peer", ""), GENERATIONS.index(row["topology"]))
    shape = list(SHAPES).index(row["shape"]) if "shape" in row else 0
    return *what, shape, row.get("head_size", 0), row.get("mask", ""), row.get("step", "")


def measure_row(
    results: Results, topology: str, head_size: int, mask: str, with_peers: bool
) -> None:
    """One head size and mask, forward and backward."""
    useful = 4 * HEADS * LENGTH**2 * head_size / (2 if mask == "causal" else 1)
    for step in STEPS:
        flop = useful * (2.5 if step == "backward" else 1)
        key = {"topology": topology, "head_size": head_size, "mask": mask, "step": step}
        shape = Shape(heads=HEADS, kv_heads=HEADS)
        cycles = measure(shape, step, topology, head_size, mask == "causal", flop)
        share = cycles.count and round(flop / cycles.count / LIMITS[topology][head_size], 3)
        results.add({"what": "main", **key}, dataclasses.asdict(cycles) | {"share": share})
        for peer in PEERS if with_peers else ():
            if (peer, mask) == ("tokamax", "causal"):
                continue  # reads from scalar memory what to compute, which is not simulated
            theirs = {"what": "peers", "peer": peer, **key}
            old = results.find(**theirs)
            settings = SETTINGS[peer, step]
            if old is None or [tried["config"] for tried in old["tried"]] != settings:
                results.add(theirs, measure_peer(peer, step, topology, head_size, mask, settings))


def measure(
    shape: Shape,
    step: str,
    topology: str,
    head_size: int,
    is_causal: bool,
    flop: float,
    dtype: str = "bfloat16",
    sizes: dict[str, int] | None = None,
) -> Cycles:
    """Cycles of the package's forward pass, or of what the gradient adds to it.

    Args:
      shape: What is attended.
      step: "forward" or "backward".
      topology: For which generation.
      head_size: H.
      is_causal: Whether there is a causal mask.
      flop: Useful operations, which the peak must allow in the cycles found.
      dtype: Of all arrays.
      sizes: Fields of `Tiles` in place of those that the package chooses.
    """
    documents = np.repeat(np.arange(shape.documents), shape.length // shape.documents)
    segments = jnp.broadcast_to(documents, (shape.batch, shape.length))

    def attend(query, key, value):
        tiles = None
        if sizes is not None:
            arrays = tiles_lib.shape_of(query, key, value, Mask())
            tiles = dataclasses.replace(tiles_lib.default_tiles(arrays), **sizes)
        return dot_product_attention(
            query,
            key,
            value,
            layout="BNTH",
            is_causal=is_causal,
            local_window_size=None if shape.window is None else (shape.window - 1, 0),
            segment_ids=SegmentIds(segments, segments) if shape.documents > 1 else None,
            tiles=tiles,
        )

    def gradients(query, key, value, output_gradient):
        output, vjp = jax.vjp(attend, query, key, value)
        return output, vjp(output_gradient)

    array = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.dtype(dtype))
    query = array((shape.batch, shape.heads, shape.length, head_size))
    key = array((shape.batch, shape.kv_heads, shape.length, head_size))
    counts = static_counts(documents) if shape.documents > 1 else contextlib.nullcontext()
    call: tuple[Callable[..., Any], list[jax.ShapeDtypeStruct], tuple[str, ...]]
    call = (attend, [query, key, key], ())
    if step == "backward":
        call = (gradients, [query, key, key, query], ("flash_forward",))
    fn, arrays, leave_out = call
    least = flop / FLOP_PER_CYCLE[topology]
    with counts:
        return simulate_once(fn, *arrays, topology=topology, leave_out=leave_out, least=least)


@contextlib.contextmanager
def static_counts(documents: np.ndarray) -> Iterator[None]:
    """Has the kernels compute how many units they visit from the place in the grid.

    Otherwise they read it from scalar memory, which the simulator takes for zeros. The counts are
    the same: of units in which a causal query meets a key of its document.

    Args:
      documents: `[T]`, the document of each token, known while tracing.
    """
    visible = (documents[:, None] == documents) & np.tri(len(documents), dtype=bool)
    was_asked = False

    def counts(walk, tile, list_ref):
        del list_ref
        nonlocal was_asked
        was_asked = True
        sizes, units = (walk.query_size, walk.key_size), (walk.unit_queries, walk.unit_keys)
        rows, columns = (tiles_lib.pad_to(len(documents), size) for size in sizes)
        padded = np.zeros((rows, columns), bool)
        padded[: len(documents), : len(documents)] = visible
        blocks = padded.reshape(rows // units[0], units[0], columns // units[1], units[1])
        numbers = []
        for is_met in (blocks.all((1, 3)), blocks.any((1, 3))):
            own = is_met if walk.by_query else is_met.T
            size = sizes[0] // units[0] if walk.by_query else sizes[1] // units[1]
            numbers.append(own.reshape(len(own) // size, -1).sum(1))
        whole, met = numbers
        group = unit_lists.at_a_time(walk)
        return tuple(
            sum(jnp.where(tile == i, int(n), 0) for i, n in enumerate(of_tiles))
            for of_tiles in (whole // group, -(met // -group))
        )

    with mock.patch.object(unit_lists, "counts", counts):
        yield
    assert was_asked, "the kernels no longer ask unit_lists.counts how much they visit"


def measure_peer(
    peer: str,
    step: str,
    topology: str,
    head_size: int,
    mask: str,
    settings: Sequence[dict[str, Any]],
) -> dict[str, Any]:
    """The best of a peer's settings, and what became of each."""
    tried, best, flop = [], None, 0.0
    for config in settings:
        job = peers.Job(
            peer=peer,
            step=step,
            topology=topology,
            is_causal=mask == "causal",
            length=LENGTH,
            heads=HEADS,
            head_size=head_size,
            config=config,
        )
        cycles, flop = peers.measure(job), job.flop
        tried.append({"config": config, **dataclasses.asdict(cycles)})
        if cycles.count is not None and (best is None or cycles.count < best):
            best = cycles.count
    share = best and round(flop / best / LIMITS[topology][head_size], 3)
    return {"package": peers.package(peer), "count": best, "share": share, "tried": tried}


def measure_shape(results: Results, topology: str, name: str) -> None:
    """A shape, and the one beside it."""
    for each in dict.fromkeys((SHAPES[name].beside, name)):
        shape = SHAPES[each]
        for step in STEPS:
            key = {"what": "shapes", "topology": topology, "shape": each, "step": step}
            flop = 4 * 128 * shape.pairs * (2.5 if step == "backward" else 1)
            cycles = measure(shape, step, topology, 128, True, flop)
            figures = {"pairs": shape.pairs, "tiles": shape.tiles}
            results.add(key, dataclasses.asdict(cycles) | figures)


def relative(results: Results, topology: str, name: str, step: str) -> float | None:
    """Rate or time of a shape relative to the one beside it, as its definition says."""
    shape = SHAPES[name]
    key = {"what": "shapes", "topology": topology, "step": step}
    own, other = (results.find(**key, shape=each) for each in (name, shape.beside))
    if own is None or other is None or own["count"] is None or other["count"] is None:
        return None
    if shape.by_time:
        return own["count"] / (other["count"] * own["tiles"] / other["tiles"])
    return other["count"] * own["pairs"] / other["pairs"] / own["count"]


def shares(results: Results, topology: str, head_size: int, mask: str, step: str) -> list[str]:
    """Shares of the issue limit: ours, then those of the peers."""
    key = {"topology": topology, "head_size": head_size, "mask": mask, "step": step}
    rows = [results.find(what="main", **key)]
    rows += [results.find(what="peers", peer=peer, **key) for peer in PEERS]
    return ["-" if row is None or row["share"] is None else f"{row['share']:.2f}" for row in rows]


def line(results: Results, topology: str, head_size: int, mask: str, step: str) -> str:
    """A line of the table: shares of the issue limit."""
    cells = shares(results, topology, head_size, mask, step)
    return f"{step:10}{head_size:10}{mask:>8}" + "".join(f"{cell:>8}" for cell in cells)


def shape_line(results: Results, topology: str, name: str) -> str:
    """A line of the shapes: relative time or rate, forward and backward."""
    shown = "".join(f"{cell:>8}" for cell in relatives(results, topology, name))
    return f"  {name:22}{shown}  {kind(name)}"


def relatives(results: Results, topology: str, name: str) -> list[str]:
    """Relative time or rate, forward and backward."""
    values = [relative(results, topology, name, step) for step in STEPS]
    return ["-" if value is None else f"{value:.2f}" for value in values]


def kind(name: str) -> str:
    """What the figures of a shape are relative to."""
    return f"{'time' if SHAPES[name].by_time else 'rate'} of {SHAPES[name].beside}"


def document(results: Results) -> str:
    """All figures, as Markdown."""
    versions = ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    generations = f"{' | '.join(GENERATIONS)} |"
    lines = [
        "# Simulated speed of the flash kernels",
        "",
        f"Written by `{COMMAND}`, with {versions}.",
        "**Nothing here has run on a TPU.** Cycles are those of the TPU compiler's static profile;",
        "how far off it was against hardware is in",
        "[benchmarks/calibration.md](../benchmarks/calibration.md).",
        "",
        f"![Shares of the issue limit]({PICTURE.name})",
        "",
        f"## T = S = {LENGTH:,}, {HEADS} heads, bfloat16",
        "",
        "Useful operations per cycle (causal counts half, backward 2.5 times forward), as a share",
        "of what the matrix units can issue at that head size. The backward pass counts all that",
        "the gradient adds. In parentheses jax's splash attention and tokamax's, each with the",
        "best of some tile sizes. A dash: no figure yet, or the program compiles and the simulator",
        "fails, with what `benchmarks/results/flash.json` quotes.",
        "",
        f"| pass | mask | head size | {generations}",
        "|---|---|---:|" + "---|" * len(GENERATIONS),
    ]
    for step in STEPS:
        for mask in ("full", "causal"):
            for size in HEAD_SIZES:
                cells = []
                for topology in GENERATIONS:
                    ours, *theirs = shares(results, topology, size, mask, step)
                    has_peers = any(cell != "-" for cell in theirs)
                    cells.append(f"{ours} ({', '.join(theirs)})" if has_peers else ours)
                lines.append(f"| {step} | {mask} | {size} | {' | '.join(cells)} |")
    lines += [
        "",
        "## Other shapes",
        "",
        "Causal, head size 128, two heads unless said; forward / backward. A rate is useful",
        "operations per cycle relative to the shape named. A time is relative to that shape's,",
        f"times the share that this one has of its tiles of {TILE} by {TILE} that hold anything.",
        "",
        f"| shape | relative | {generations}",
        "|---|---|" + "---|" * len(GENERATIONS),
    ]
    for name in list(SHAPES)[1:]:
        cells = (" / ".join(relatives(results, topology, name)) for topology in GENERATIONS)
        lines.append(f"| {name} | {kind(name)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(results: Results) -> None:
    """One panel a pass and mask, one group of bars a generation, one bar a head size."""
    figure, axes = plt.subplots(2, 2, figsize=(9, 5.5), sharex=True, sharey=True)
    colours = ("#9ecae1", "#4292c6", "#08519c")
    markers = {"splash": "_", "tokamax": "x"}
    for column, mask in zip(axes.T, ("full", "causal"), strict=True):
        for panel, step in zip(column, STEPS, strict=True):
            for i, head_size in enumerate(HEAD_SIZES):
                places = [generation + (i - 1) * 0.27 for generation in range(len(GENERATIONS))]
                rows = {
                    who: [
                        results.find(
                            topology=topology, head_size=head_size, mask=mask, step=step, **who_key
                        )
                        for topology in GENERATIONS
                    ]
                    for who, who_key in (
                        ("ours", {"what": "main"}),
                        *((peer, {"what": "peers", "peer": peer}) for peer in PEERS),
                    )
                }
                by_who = {
                    who: [(row and row["share"]) or 0 for row in of_who]
                    for who, of_who in rows.items()
                }
                bars = panel.bar(
                    places, by_who["ours"], 0.25, color=colours[i], label=f"head size {head_size}"
                )
                labels = [format(share, ".2f") if share else "-" for share in by_who["ours"]]
                panel.bar_label(
                    bars, labels, fontsize=7, bbox={"facecolor": "white", "lw": 0, "pad": 0.3}
                )
                for peer, marker in markers.items():
                    known = [(x, y) for x, y in zip(places, by_who[peer], strict=True) if y]
                    panel.scatter(
                        [x for x, _ in known],
                        [y for _, y in known],
                        marker=marker,
                        color="#d62728",
                        linewidths=1.5,
                        zorder=3,
                        label=peer if i == len(HEAD_SIZES) - 1 else None,
                    )
            panel.axhline(1, color="black", linewidth=0.8)
            panel.set_title(f"{mask} mask, {step}", fontsize=10)
            panel.set_xticks(range(len(GENERATIONS)), GENERATIONS)
            panel.set_ylim(0, 1.4)
    for panel in axes[:, 0]:
        panel.set_ylabel("share of issue limit")
    figure.suptitle(f"Flash attention, T = S = {LENGTH}, bfloat16: simulated, not measured")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize=8, loc="lower center", ncols=5)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(PICTURE, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    main()
