"""What libtpu's files say: of files written here, and of kernels whose answer is known."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from flax_pallas_attn import aot
from flax_pallas_attn.tpu_profile import OperationProfile, read_profiles

UTILIZATION = """== CAPACTIY:
MXU, VALU, VLOAD:FILL
    2     4     3
== UTILIZATION:
0 1 0
2 0 0
1 4 3
"""
SCHEDULE = """LH: loop header

     0   :  { %s1_s0 = inlined_call_operand.hbm [shape: f32[8]] /* of { two
lines } */  ;;  %7 = vadd.f32 %v9_v1, %v9_v2 }
   0x1 LB: > { %vm55_vm3 = vmatmul.f32 (!%p5_p2), %v8_v3 /* why */ } /* Start region 85 */
   0x2   : > { %v56_v4 = vld [vmem:%s1_s0]  ;;  %v57_v5 = vadd.f32 %v56_v4, 0.0 }
"""
BODY = """  %vm{0}_vm3 = vmatmul.f32 %v10_v3


0x{1}: bundle slots:
  %v12_v5 = vadd.f32 %v11_v4, 0.0 /* two
lines */
  %v11_v4 = vld [vmem:%s2_s0]


"""
CRITICAL_PATH = """Length to end: 20, %1 = vadd.f32 %v9_v1, %v9_v2
Length to end: 19, %2 = dma.hbm_to_vmem [thread:$0] /*
element_size_in_bytes: 2048 */
Length to end: 12, %3 = vmatmul.f32, %v10_v3
Length to end: 5, %4 = vld [vmem:%s2_s0]
"""


def write_profile(directory, name="double.5", cycles=20, calls=1):
    (directory / f"{name}_TPU v5 lite_static_llo_profile.textproto").write_text(
        f'hlo_op_estimate {{\n  hlo_op_name: "{name}"\n  estimated_cycles: {cycles}\n'
        f"  num_equivalent_hlos: {calls}\n  scalar_inputs: 0\n}}\n"
    )


def write_schedule(directory, *, executed):
    (directory / "17-double.5-00-final_hlo-static-per-bundle-utilization.txt").write_text(
        UTILIZATION
    )
    (directory / "17-double.5-01-final_bundles.txt").write_text(SCHEDULE)
    (directory / "double.5_bundles.txt").write_text(executed)
    (directory / "double.5_critical_path.txt").write_text(CRITICAL_PATH)


def test_equal_operations_are_summed(tmp_path):
    write_profile(tmp_path, "fusion", 419)
    write_profile(tmp_path, "double.5", 159, calls=3)
    double, fusion = read_profiles(tmp_path)
    assert (double.name, double.calls, double.cycles) == ("double.5", 3, 477)
    assert (fusion.name, fusion.calls, fusion.cycles) == ("fusion", 1, 419)
    assert (fusion.unit_use, fusion.transfer_wait, fusion.bound_by) == ({}, None, None)


def test_bundles_in_a_loop_count_as_often_as_they_run(tmp_path):
    write_profile(tmp_path, cycles=20)
    body = "".join(f"0x{2 * i + 1}: bundle slots:\n" + BODY.format(i, 2 * i + 2) for i in range(3))
    write_schedule(
        tmp_path, executed=f"0x0: bundle slots:\n  %3 = vadd.f32 %v4_v1, %v4_v2\n\n\n{body}"
    )
    (double,) = read_profiles(tmp_path)
    # The first bundle once and the loop's two three times, of 20 cycles.
    assert double.unit_use == pytest.approx(
        {"MXU": 3 * (2 + 1) / 2 / 20, "VALU": (1 + 3 * 4) / 4 / 20, "VLOAD:FILL": 3 / 20}
    )
    assert list(double.unit_use) == ["MXU", "VALU", "VLOAD:FILL"]
    assert double.transfer_wait == pytest.approx(6 / 20)
    assert double.result_wait == pytest.approx((20 - 7 - 6) / 20)


def test_a_schedule_that_is_not_understood_gives_no_use(tmp_path):
    write_profile(tmp_path)
    write_schedule(tmp_path, executed="0x0: bundle slots:\n  %3 = vnew.f32 %v4_v1\n\n\n")
    (double,) = read_profiles(tmp_path)
    assert (double.unit_use, double.result_wait, double.cycles) == ({}, None, 20)


@pytest.mark.parametrize(
    ("use", "transfer_wait", "result_wait", "bound_by"),
    [
        (0.7, 0.0, 0.2, "MXU"),
        (0.7, 0.0, 0.0, "order"),
        (0.5, 0.4, 0.0, "MXU"),
        (0.4, 0.5, 0.0, "transfers"),
    ],
)
def test_what_binds(use, transfer_wait, result_wait, bound_by):
    profile = OperationProfile(
        name="kernel",
        calls=1,
        cycles=100,
        unit_use={"MXU": use, "VALU": 0.1},
        transfer_wait=transfer_wait,
        result_wait=result_wait,
    )
    assert profile.bound_by == bound_by


def products(x, y, *, count):
    """`count` products, one after the other, in a loop of the kernel."""

    def kernel(x_ref, y_ref, out_ref):
        out_ref[...] = jnp.zeros_like(out_ref)

        @pl.loop(0, count)
        def _(_):
            out_ref[...] += jnp.dot(x_ref[...], y_ref[...], preferred_element_type=jnp.float32)

    out_shape = jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), jnp.float32)
    return pl.pallas_call(kernel, out_shape=out_shape, name="products")(x, y)


@pytest.mark.tpu_compile
def test_a_loop_of_products_uses_the_matrix_unit_as_often_as_it_runs():
    operand = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    used = []
    for count in (8, 24):
        call = functools.partial(products, count=count)
        (profile,) = aot.profile_for_tpu(call, operand, operand, topology="v5e")
        used.append(profile.unit_use["MXU"] * profile.cycles)
    assert used[1] == pytest.approx(3 * used[0], rel=0.02)
    assert list(aot.estimate_cycles(call, operand, operand, topology="v5e").values()) == [
        profile.cycles
    ]


@pytest.mark.tpu_compile
@pytest.mark.parametrize("topology", ["v5e", "v5p", "v6e", "tpu7x"])
def test_a_large_product_is_bound_by_the_matrix_unit(topology):
    operand = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)
    (profile,) = aot.profile_for_tpu(jnp.matmul, operand, operand, topology=topology)
    assert profile.bound_by == "MXU"


@pytest.mark.tpu_compile
def test_a_copy_is_bound_by_transfers():
    x = jax.ShapeDtypeStruct((8192, 2048), jnp.float32)
    (profile,) = aot.profile_for_tpu(lambda x: x + 1, x, topology="v6e")
    assert profile.bound_by == "transfers"
    assert profile.transfer_wait > 0.5
