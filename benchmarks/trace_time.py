"""Time to trace and lower attention for TPU: `python -m benchmarks.trace_time`.

Forward and backward, causal, bfloat16, of this package and of jax's splash attention, from the
function to the program that the compiler takes: what a user waits for before XLA begins. Splash's
preparation of the mask is included, as its user pays it. One process, alternating, medians of the
process's CPU time; the first round of each does not count.
"""

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
    splash_attention_mask_info,
)

from benchmarks.results_file import write_results
from flax_pallas_attn import dot_product_attention
from flax_pallas_attn.aot import topology_mesh

LENGTHS = (1024, 4096, 32768)
HEADS, HEAD_SIZE = 8, 128
SPLASH_TILES = {
    "block_q": 1024,
    "block_kv": 1024,
    "block_kv_compute": 512,
    "block_q_dkv": 1024,
    "block_kv_dkv": 1024,
    "block_kv_dkv_compute": 512,
    "use_fused_bwd_kernel": True,
}


def main() -> None:
    """Measures, prints a line for each length and writes the result file."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=9, help="of each that count")
    parser.add_argument("--topology", default="v6e")
    arguments = parser.parse_args()
    mesh = topology_mesh(arguments.topology, {"device": 1})
    seconds: dict[tuple[str, int], list[float]] = {
        (name, length): [] for length in LENGTHS for name in ("ours", "splash")
    }
    with jax.set_mesh(mesh):
        for _ in range(arguments.rounds + 1):
            for (name, length), measured in seconds.items():
                start = time.process_time()
                lower({"ours": ours, "splash": splash}[name], length)
                measured.append(time.process_time() - start)
    rows = []
    print(f"CPU seconds to trace and lower forward and backward, {HEADS} heads of {HEAD_SIZE}")
    for length in LENGTHS:
        times = {name: statistics.median(seconds[name, length][1:]) for name in ("ours", "splash")}
        row = {"topology": arguments.topology, "length": length, "rounds": arguments.rounds}
        row |= {f"{name}_seconds": round(value, 4) for name, value in times.items()}
        row["ratio"] = round(times["ours"] / times["splash"], 3)
        rows.append(row)
        print(
            f"  S={length:<6} ours {times['ours']:.3f}  splash {times['splash']:.3f}  "
            f"ratio {row['ratio']:.2f}"
        )
    growth = rows[-1]["ours_seconds"] / rows[0]["ours_seconds"]
    print(f"  ours at S={LENGTHS[-1]} over ours at S={LENGTHS[0]}: {growth:.2f}")
    print(write_results("trace_time", "python -m benchmarks.trace_time", rows))


def lower(attend: Callable[..., Any], length: int) -> None:
    """Traces and lowers value and gradients, with nothing kept from an earlier time."""
    jax.clear_caches()
    splash_attention_mask_info._process_mask.cache_clear()

    def loss(query, key, value):
        return jnp.sum(attend(query, key, value).astype(jnp.float32))

    array = jax.ShapeDtypeStruct((1, HEADS, length, HEAD_SIZE), jnp.bfloat16)
    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
    step.trace(array, array, array).lower(lowering_platforms=("tpu",))


ours = functools.partial(dot_product_attention, layout="BNTH", is_causal=True)


def splash(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Splash attention as its user writes it."""
    length = query.shape[2]
    mask = splash_attention_mask.CausalMask((length, length))
    attend = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask] * HEADS),
        block_sizes=splash_attention_kernel.BlockSizes(**SPLASH_TILES),
        head_shards=1,
        q_seq_shards=1,
    )
    return cast(jax.Array, jax.vmap(attend)(query, key, value))


if __name__ == "__main__":
    main()
