"""What the TPU compiler says of the kernels' memory: `python -m benchmarks.tpu_compile`.

Compiles, without a TPU, the shape at which attention kernels have run out of memory (jax issue
24539), and training with it. Nothing here has run on a TPU.
"""

import functools
import time

import jax
import jax.numpy as jnp

from benchmarks.results_file import write_results
from flax_pallas_attn import dot_product_attention
from flax_pallas_attn.aot import compile_for_tpu

SHAPE = (18, 32, 16384, 256)
TRAINING_SHAPE = (4, *SHAPE[1:])
TOPOLOGY = "v5e"
MIB = 1 << 20


def main() -> None:
    """Compiles, prints a table and writes the result file."""
    rows = []
    for is_causal in (False, True):
        attend = functools.partial(dot_product_attention, layout="BNTH", is_causal=is_causal)

        def loss(query, key, value, attend=attend):
            return jnp.sum(jnp.asarray(attend(query, key, value), jnp.float32) ** 2)

        forward = jax.jit(attend, donate_argnums=0)
        gradient = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
        rows.append(_row("forward, query donated", is_causal, forward, SHAPE))
        rows.append(_row("value and gradients", is_causal, gradient, TRAINING_SHAPE))
    print(f"query, key, value bfloat16, heads first; one {TOPOLOGY} device; MiB")
    print(
        f"{'program':24}{'shape':22}{'causal':8}{'arguments':>11}{'temporaries':>13}{'aliased':>9}"
    )
    for row in rows:
        print(
            f"{row['program']:24}{row['shape']!s:22}{row['is_causal']!s:8}"
            f"{row['argument_bytes'] / MIB:11.0f}{row['temporary_bytes'] / MIB:13.1f}"
            f"{row['alias_bytes'] / MIB:9.0f}"
        )
    print(write_results("tpu_compile", "python -m benchmarks.tpu_compile", rows))


def _row(program: str, is_causal: bool, function, shape: tuple[int, ...]) -> dict:
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16)] * 3
    start = time.perf_counter()
    function.trace(*arrays)
    trace_seconds = time.perf_counter() - start
    compiled = compile_for_tpu(function, *arrays, topology=TOPOLOGY)
    return {
        "program": program,
        "topology": TOPOLOGY,
        "shape": list(shape),
        "is_causal": is_causal,
        "argument_bytes": compiled.argument_bytes,
        "temporary_bytes": compiled.temporary_bytes,
        "alias_bytes": compiled.alias_bytes,
        "trace_seconds": round(trace_seconds, 3),
    }


if __name__ == "__main__":
    main()
