"""Memory of attention beside the plain form: `python -m benchmarks.memory`.

What XLA plans for temporaries of a causal forward and backward pass on CPU; nothing is run.
"""

import functools

import jax
import jax.numpy as jnp

from benchmarks.results_file import write_results
from flax_pallas_attn import dot_product_attention

SHAPE = (1, 8192, 4, 64)  # [B, T, N, H]


def temporary_bytes(attention) -> int:
    def step(query, key, value, gradient):
        output, pullback = jax.vjp(attention, query, key, value)
        return output, pullback(gradient)

    array = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    compiled = jax.jit(step).lower(*[array] * 4).compile()
    analysis = compiled.memory_analysis()
    assert analysis is not None, "XLA on CPU analyses memory"
    return analysis.temp_size_in_bytes


def main() -> None:
    causal = functools.partial(dot_product_attention, is_causal=True)
    attentions = {
        "flax_pallas_attn, xla": functools.partial(causal, implementation="xla"),
        "flax_pallas_attn, reference": functools.partial(causal, implementation="reference"),
        "jax.nn, xla": functools.partial(
            jax.nn.dot_product_attention, is_causal=True, implementation="xla"
        ),
    }
    found = {name: temporary_bytes(attention) for name, attention in attentions.items()}
    ours = found["flax_pallas_attn, xla"]
    rows = [
        {
            "attention": name,
            "shape": SHAPE,
            "dtype": "float32",
            "temporary_bytes": temporary,
            "xla_as_share_of_it": round(ours / temporary, 4),
        }
        for name, temporary in found.items()
    ]
    for row in rows:
        print(
            f"{row['attention']:30s} {row['temporary_bytes'] / 2**20:9.1f} MiB"
            f"   xla takes {row['xla_as_share_of_it']:.4f} of it"
        )
    print(write_results("memory", "python -m benchmarks.memory", rows))


if __name__ == "__main__":
    main()
