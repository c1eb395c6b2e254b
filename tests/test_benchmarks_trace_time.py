"""The trace-time benchmark measures what a user pays the first time."""

import jax
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info

from benchmarks import trace_time
from flax_pallas_attn import aot


@pytest.mark.tpu_compile
@pytest.mark.parametrize("attend", [trace_time.ours, trace_time.splash])
def test_every_round_traces_anew(attend):
    calls = 0

    def counted(*arrays):
        nonlocal calls
        calls += 1
        return attend(*arrays)

    with jax.set_mesh(aot.topology_mesh("v6e", {"device": 1})):
        for _ in range(2):
            trace_time.lower(counted, 1024)
            prepared = splash_attention_mask_info._process_mask.cache_info().misses
            assert (prepared > 0) == (attend is trace_time.splash)
    assert calls == 2
