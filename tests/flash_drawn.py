"""Drawn combinations through the flash kernels, in the plain interpreter.

The TPU interpreter, which every other test of the kernels runs in, simulates the memory; this one
does not, and takes half the time. A failure here prints its combination: paste it into
`@hypothesis.example(...)`.
"""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import flash
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.tiles import Tiles
from tests.drawn import combinations

# A unit each; several units; a tile that walks along larger ones. Units cost time to compile.
UNITS, SEVERAL, UNEVEN = (
    Tiles(
        query=query,
        key=key,
        key_chunk=chunk,
        backward_key=query,
        backward_query=key,
        backward_query_chunk=chunk,
    )
    for query, key, chunk in ((128, 128, 256), (512, 256, 512), (128, 256, 512))
)
TILES = st.sampled_from([UNITS] * 9 + [None, SEVERAL, UNEVEN])

none, no = st.none(), st.just(False)
MASKS = {
    # Known while tracing: what a band does to each unit is, too.
    "band": {"rule": no, "rows": none, "positions": none, "dense": none},
    # The tiles that are visited are read from memory.
    "data": {"rows": st.sampled_from(["segments", "lengths"])},
    "any": {},
}


def check_drawn(masks: str, dtype: str) -> None:
    @hypothesis.given(
        combinations(most=300, **MASKS[masks]),
        TILES,
        st.booleans(),
    )
    def run(combination, tiles, key_gradients_in_hbm):
        try:
            with pytest.MonkeyPatch.context() as patch, pltpu.force_tpu_interpret_mode(True):
                if key_gradients_in_hbm:
                    patch.setattr(tiles_lib, "key_gradients_fit", lambda tiles, shape: False)
                combination.check(functools.partial(flash.attend, tiles=tiles), dtype)
        finally:
            # What is patched is not among what jax knows a program by; and thousands of programs
            # would fill the memory.
            jax.clear_caches()

    run()
