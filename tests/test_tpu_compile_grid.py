"""200 drawn calls, forward and backward, compiled for all five TPU generations.

Mosaic refuses what the interpreter accepts, and what it refuses depends on sizes and on what
stands beside what: so no list of cases is long enough. The seed is fixed, so a case keeps its name.
"""

import functools
import random

import jax
import jax.numpy as jnp
import pytest

from flax_pallas_attn import Alibi, Dropout, Positions, SegmentIds, aot, dot_product_attention
from tests.conformance import prefix

pytestmark = pytest.mark.tpu_compile

GENERATIONS = tuple(aot.TOPOLOGIES)
CALLS = 200
QUICK = range(6)


def compile_call(seed: int, topology: str) -> None:
    """Draws a call and compiles it, with the tiles that the package chooses.

    Args:
      seed: Of the call: sizes, dtype, and each option or none.
      topology: TPU generation.
    """
    choose = random.Random(seed)
    has = {
        name: choose.random() < share
        for name, share in {
            "causal": 0.5,
            "window": 0.3,
            "rule": 0.15,
            "segments": 0.3,
            "lengths": 0.15,
            "positions": 0.2,
            "offset": 0.2,
            "bias": 0.2,
            "alibi": 0.2,
            "soft_cap": 0.2,
            "sinks": 0.2,
            "dropout": 0.2,
        }.items()
    }
    mask = "rule" if has["rule"] else choose.choice([None, None, None, "dense"])
    # Arrays of all pairs fill a chip's memory sooner than others do.
    most_bits = 11 if has["bias"] or mask == "dense" else 14

    def size():
        return choose.choice([1, 2 ** choose.randint(7, most_bits), 0]) or int(
            2 ** choose.uniform(0, most_bits)
        )

    B, K, G = choose.randint(1, 4), choose.randint(1, 4), choose.choice([1, 1, 2, 3, 8])
    T, S = size(), size()
    H, Hv = (choose.choice([8, 16, 40, 64, 80, 96, 128, 128, 192, 256]) for _ in range(2))
    N, dtype = K * G, choose.choice([jnp.bfloat16, jnp.bfloat16, jnp.float32])

    def pairs():
        axes = {"B": B, "N": N, "T": T, "S": S}
        return tuple(choose.choice([1, size, size]) for size in axes.values())

    integers = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    like_input = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    arrays = {
        "query": like_input((B, N, T, H)),
        "key": like_input((B, K, S, H)),
        "value": like_input((B, K, S, Hv)),
    }
    static = {"is_causal": has["causal"]} | ({"mask": prefix} if mask == "rule" else {})
    traced = {}
    if has["window"]:
        static["local_window_size"] = (choose.randint(0, T), choose.randint(0, S))
    if mask == "dense":
        traced["mask"] = jax.ShapeDtypeStruct(pairs(), choose.choice([jnp.bool, jnp.int8]))
    if has["segments"]:
        traced["segment_ids"] = SegmentIds(integers((B, T)), integers((B, S)))
    if has["lengths"]:
        traced["query_seq_lengths"] = traced["key_value_seq_lengths"] = integers((B,))
    if has["positions"]:
        traced["positions"] = Positions(integers((B, T)), integers((B, S)))
    elif has["offset"]:
        offset = choose.choice([S - T, integers((B,))])
        (static if isinstance(offset, int) else traced)["query_offset"] = offset
    if has["soft_cap"]:
        static["logits_soft_cap"] = 30.0
    if has["bias"]:
        arrays["bias"] = jax.ShapeDtypeStruct(pairs(), choose.choice([dtype, jnp.float32]))
    elif has["alibi"]:
        traced["bias"] = Alibi(floats((N,)))
    if has["sinks"]:
        arrays["sinks"] = floats((N,))
    if has["dropout"]:
        key = jax.eval_shape(lambda: jax.random.key(0))
        traced["dropout"] = Dropout(rate=0.1, key=key, broadcast=choose.random() < 0.5)

    def step(arrays, traced, cotangents):
        def attend(arrays):
            return dot_product_attention(
                **arrays,
                **traced,
                **static,
                layout="BNTH",
                implementation="pallas",
                return_residual=True,
            )

        results, pullback = jax.vjp(attend, arrays)
        return results, pullback(cotangents)

    cotangents = (like_input((B, N, T, Hv)), floats((B, N, T)))
    program = aot.compile_for_tpu(step, arrays, traced, cotangents, topology=topology)
    kernels = {"flash_forward", "flash_backward"} | (
        {"flash_bias_gradient"} if has["bias"] else set()
    )
    assert set(program.kernels) == kernels


@pytest.mark.parametrize("seed", QUICK)
def test_compiles(seed):
    compile_call(seed, GENERATIONS[seed % len(GENERATIONS)])


@pytest.mark.slow
@pytest.mark.parametrize("topology", GENERATIONS)
@pytest.mark.parametrize("seed", range(CALLS))
def test_compiles_for_every_generation(seed, topology):
    compile_call(seed, topology)
