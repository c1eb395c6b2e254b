"""The race detector of the TPU interpreter, over every kernel, on a chip of two cores.

The "parallel" axes of a grid are split between them (as on v4 and v5p): what is summed along such
an axis is a race, beside what copies that run meanwhile may be.
"""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import flash
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.masking import Mask
from tests import conformance, paged_conformance
from tests.conformance import Case
from tests.flash_drawn import UNITS
from tests.test_paged_kernel import RAGGED, traced
from tests.test_paged_kernel import attend as attend_paged

# Two chunks, and a group of two: sums of keys pass from one grid step to the next.
sizes = functools.partial(Case, batch=1, heads=2, kv_heads=1, queries=300, keys=290)
CASES = {
    "static mask": sizes(name="static", mask=lambda c, r: Mask(lower=0, query_offset=20)),
    "mask in memory": sizes(
        name="memory",
        mask=lambda c, r: Mask(lower=0, segment_ids=conformance.segments(c, r)),
        logits=conformance.everything,
    ),
    "bias of keys": sizes(name="bias", heads=1, logits=conformance.bias("S")),
}


TWO_CORES = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)


@pytest.mark.parametrize("name", CASES)
def test_flash(name):
    """Forward, gradients of query, key and value, and of the bias where there is one."""
    with pltpu.force_tpu_interpret_mode(TWO_CORES):
        conformance.check_case(functools.partial(flash.attend, tiles=UNITS), CASES[name])
    assert not interpret_pallas_call.races.races_found


def test_flash_with_key_gradients_summed_in_hbm(monkeypatch):
    monkeypatch.setattr(tiles_lib, "key_gradients_fit", lambda tiles, shape: False)
    with pltpu.force_tpu_interpret_mode(TWO_CORES):
        attend = functools.partial(flash.attend, tiles=UNITS)
        conformance.check_case(attend, CASES["static mask"])
    assert not interpret_pallas_call.races.races_found


def test_paged():
    call, expected = paged_conformance.make_call(RAGGED)
    with pltpu.force_tpu_interpret_mode(TWO_CORES):
        output = attend_paged(traced(call))
    paged_conformance.assert_close(output, expected, "float32")
    assert not interpret_pallas_call.races.races_found


def test_a_sum_along_a_parallel_axis_is_seen():
    def kernel(x_ref, sum_ref):
        sum_ref[...] += x_ref[...]

    total = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((8, 128), jnp.float32),
        grid=(4,),
        in_specs=[pl.BlockSpec((8, 128), lambda i: (i, 0))],
        out_specs=pl.BlockSpec((8, 128), lambda i: (0, 0)),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",)),
    )
    with pltpu.force_tpu_interpret_mode(TWO_CORES), pytest.raises(Exception, match="race"):
        total(jnp.ones((32, 128)))
