"""Attention on CPU beside jax.nn's: `python -m benchmarks.cpu`.

A causal forward and backward pass of each in turn, in one process. Each pair of runs gives one
ratio of times; the median over the pairs is free of what slows the machine for longer than a pair.
"""

import functools
import statistics
import time

import jax
import jax.numpy as jnp

from benchmarks.results_file import write_results
from flax_pallas_attn import dot_product_attention

HEADS, HEAD_SIZE = 8, 64
PAIRS = {256: 60, 1024: 30, 4096: 10}
TARGET_RATIO = {1024: 1.03, 4096: 1 / 1.5}


def compiled_step(attention, arrays):
    def step(query, key, value, gradient):
        output, pullback = jax.vjp(functools.partial(attention, is_causal=True), query, key, value)
        return output, pullback(gradient)

    step = jax.jit(step).lower(*arrays).compile()
    jax.block_until_ready(step(*arrays))
    return step


def milliseconds(step, arrays) -> float:
    start = time.perf_counter()
    jax.block_until_ready(step(*arrays))
    return 1e3 * (time.perf_counter() - start)


def measure(tokens: int, dtype) -> dict:
    keys = jax.random.split(jax.random.key(0), 4)
    arrays = [jax.random.normal(key, (1, tokens, HEADS, HEAD_SIZE), dtype) for key in keys]
    ours = compiled_step(functools.partial(dot_product_attention, implementation="xla"), arrays)
    theirs = compiled_step(jax.nn.dot_product_attention, arrays)
    times = [
        (milliseconds(ours, arrays), milliseconds(theirs, arrays)) for _ in range(PAIRS[tokens])
    ]
    return {
        "shape": arrays[0].shape,
        "dtype": jnp.dtype(dtype).name,
        "pairs": len(times),
        "ours_milliseconds": round(statistics.median(time for time, _ in times), 2),
        "jax_nn_milliseconds": round(statistics.median(time for _, time in times), 2),
        "ratio": round(statistics.median(ours / theirs for ours, theirs in times), 4),
        "target_ratio": TARGET_RATIO.get(tokens),
    }


def main() -> None:
    jax.config.update("jax_platforms", "cpu")
    rows = []
    for dtype in (jnp.float32, jnp.bfloat16):
        for tokens in PAIRS:
            row = measure(tokens, dtype)
            print(
                f"S={tokens:5d} {row['dtype']:9s} {row['ours_milliseconds']:9.2f} ms, jax.nn"
                f" {row['jax_nn_milliseconds']:9.2f} ms, ratio {row['ratio']:.3f}",
                flush=True,
            )
            rows.append(row)
    print(write_results("cpu", "python -m benchmarks.cpu", rows))


if __name__ == "__main__":
    main()
