"""The flash kernels in the interpreter: the conformance suite, and what is their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from flax_pallas_attn.kernels import flash
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.flash_forward import flash_forward
from flax_pallas_attn.kernels.score_tiles import ScoreOptions
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask
from tests import conformance
from tests.conformance import Case

# Small enough that a few hundred tokens are several tiles, and two chunks of them.
TILES = Tiles(
    query=128,
    key=128,
    key_chunk=256,
    backward_key=128,
    backward_query=128,
    backward_query_chunk=256,
)
QUERIES, KEYS = 300, 333

attend = functools.partial(flash.attend, tiles=TILES)

# A case takes some 4 s to compile for the interpreter: these meet each branch of the kernels.
QUICK = {
    "every option, segments, causal, float32",
    "bias, of keys, a third -inf, float32",
    "bias, of queries, most -inf, float32",
    "causal, aligned at the end, shared by a group of two, float32",
    "window, float32",
    "segments, causal, window, bfloat16",
    "positions, segments, causal, rule, float32",
    "dense, causal, segments, float32",
    "dense, of keys, float32",
    "six heads, three KV heads, sizes 40 and 24, float32",
    "129 queries, 127 keys, float32",
    "one of each, float32",
    "half a row and a whole row of padding, float32",
    "nan in keys left of the window",
    "nan in a query",
    "nan in another document, causal",
}


CHECKS = conformance.checks(queries=QUERIES, keys=KEYS)
assert {str(check) for check in CHECKS} >= QUICK


@pytest.mark.parametrize(
    "check",
    [
        pytest.param(check, marks=() if str(check) in QUICK else pytest.mark.slow, id=str(check))
        for check in CHECKS
    ],
)
def test_conforms(check, interpret):
    check(attend)


FOLDED = {case.name: case for case in conformance.cases(queries=21, keys=KEYS)}


@pytest.mark.parametrize(
    "name",
    [
        "every option, segments, causal",
        "causal, aligned at the end, shared by a group of two",
        pytest.param("dense, causal, segments", marks=pytest.mark.slow),
        pytest.param("ALiBi, positions", marks=pytest.mark.slow),
        pytest.param("bias, of queries, most -inf", marks=pytest.mark.slow),
        pytest.param("six heads, three KV heads, sizes 40 and 24", marks=pytest.mark.slow),
    ],
)
def test_few_queries_of_a_group_are_one_tile(name, interpret):
    case = FOLDED[name]
    assert case.heads > case.kv_heads
    conformance.check_case(attend, case, "float32")


CAUSAL = Case(
    name="causal, two chunks, a group of two",
    batch=1,
    heads=2,
    kv_heads=1,
    queries=QUERIES,
    keys=KEYS,
    mask=lambda case, random: Mask(lower=0, query_offset=20),
)


@pytest.mark.parametrize(
    "changes",
    [{}, {"heads": 1}, {"heads": 4, "kv_heads": 2, "queries": 200, "keys": 100}],
    ids=["2", "1", "short, of two heads in a grid step"],
)
def test_key_gradients_summed_in_hbm(changes, interpret, monkeypatch):
    """As where the gradients of all keys do not fit in VMEM: very long sequences."""
    monkeypatch.setattr(tiles_lib, "key_gradients_fit", lambda tiles, shape: False)
    case = dataclasses.replace(CAUSAL, **changes)
    conformance.check_case(functools.partial(flash.attend, tiles=TILES), case)


BANDS = {
    "nothing hidden": Mask(),
    "causal": Mask(lower=0),
    "causal, queries ahead": Mask(lower=0, query_offset=333),
    "causal, queries behind": Mask(lower=0, query_offset=-150),
    "window": Mask(lower=-90, upper=170, query_offset=100),
    "wide window": Mask(lower=-300, upper=400),
    "narrow window": Mask(lower=0, upper=60, query_offset=150),
    "no keys far back": Mask(upper=200),
    "the future alone": Mask(upper=-30),
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=() if name in ("causal", "window", "no keys far back") else pytest.mark.slow
        )
        for name in BANDS
    ],
)
def test_tiles_of_several_units(name, interpret, monkeypatch):
    """Units that a band hides, cuts or leaves whole, in tiles of which the last run over."""
    monkeypatch.setattr(tiles_lib, "unit", lambda: 128)
    monkeypatch.setattr(tiles_lib, "BACKWARD_UNIT", 128)
    tiles = Tiles(
        query=512,
        key=256,
        key_chunk=512,
        backward_key=512,
        backward_query=256,
        backward_query_chunk=512,
    )
    case = Case(
        name=name,
        batch=1,
        heads=1,
        kv_heads=1,
        queries=700,
        keys=900,
        mask=lambda case, random: BANDS[name],
    )
    conformance.check_case(functools.partial(flash.attend, tiles=tiles), case)


WIDE_TILES = Tiles(
    query=512,
    key=256,
    key_chunk=512,
    backward_key=256,
    backward_query=256,
    backward_query_chunk=512,
)


WIDE_MASKS = {
    "nothing hidden": Mask(),
    "causal": Mask(lower=0),
    "rule": Mask(rule=lambda i, j: (i // 90) == (j // 90)),
}


@pytest.mark.parametrize(
    ("name", "heads", "in_hbm", "dtype"),
    [
        ("causal", 2, False, "float32"),
        ("rule", 2, True, "float32"),
        pytest.param("nothing hidden", 1, False, "float32", marks=pytest.mark.slow),
        pytest.param("causal", 1, False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("causal", 1, False, "float32", marks=pytest.mark.slow),
        pytest.param("causal", 2, True, "bfloat16", marks=pytest.mark.slow),
        pytest.param("rule", 1, False, "bfloat16", marks=pytest.mark.slow),
        pytest.param("rule", 2, False, "float32", marks=pytest.mark.slow),
    ],
)
def test_heads_as_wide_as_a_matrix_unit(name, heads, in_hbm, dtype, interpret, monkeypatch):
    """Of them the backward kernel does not turn what it multiplies."""
    monkeypatch.setattr(tiles_lib, "unit", lambda: 128)
    monkeypatch.setattr(tiles_lib, "BACKWARD_UNIT", 128)
    if in_hbm:
        monkeypatch.setattr(tiles_lib, "key_gradients_fit", lambda tiles, shape: False)
    case = Case(
        name=name,
        batch=1,
        heads=heads,
        kv_heads=1,
        queries=512,
        keys=512,
        head_size=128,
        value_size=128,
        mask=lambda case, random: WIDE_MASKS[name],
    )
    conformance.check_case(functools.partial(flash.attend, tiles=WIDE_TILES), case, dtype)


@pytest.mark.parametrize(
    "mask",
    [
        lambda case, random: Mask(rule=lambda i, j: i + j < 300),
        lambda case, random: Mask(positions=conformance.positions(case, random)),
    ],
    ids=["rule", "positions"],
)
def test_whole_tiles_in_a_chunk_beyond_the_end(mask, interpret):
    """A list of units is filled up with those beyond the end, in memory that nobody wrote."""
    tiles = dataclasses.replace(TILES, key_chunk=512, backward_query_chunk=512)
    case = Case(name="128", batch=1, heads=1, kv_heads=1, queries=128, keys=128, mask=mask)
    conformance.check_case(functools.partial(flash.attend, tiles=tiles), case)


def test_no_races():
    """Two chunks of keys and of queries, whose sums pass from one grid step to the next."""
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        conformance.check_case(functools.partial(flash.attend, tiles=TILES), CAUSAL)
    assert not interpret_pallas_call.races.races_found


def test_output_in_the_query_s_memory(interpret):
    """By value: the race detector does not see that two names are one buffer."""
    query, key, value = (
        jnp.asarray(np.random.default_rng(i).standard_normal((1, 2, 256, 16)), jnp.float32)
        for i in range(3)
    )
    forward = functools.partial(
        flash_forward, scale=0.25, precision=None, tiles=dataclasses.replace(TILES, key_chunk=128)
    )
    mask = Mask(lower=0)
    arrays = (query, key, value, mask, ScoreOptions.of(Logits(), mask, 1, 2, 256))
    fresh = forward(*arrays, reuse_query=False)
    reused = forward(*arrays, reuse_query=True)
    jax.tree.map(np.testing.assert_array_equal, reused, fresh)


@pytest.mark.parametrize("queries", [40, 300])
def test_any_length_without_gradients(queries, interpret):
    """The forward pass by itself, value as large as key: what may reuse the query's memory."""
    case = Case(name="forward", batch=1, queries=queries, keys=150)
    call = conformance.make_call(case, "float32")
    output, logsumexp = jax.jit(
        lambda arrays: attend(**arrays, mask=call.mask, logits=call.logits, scale=0.25)
    )(call.arrays)
    expected = conformance.truth(case, "float32")
    tolerance = conformance.TOLERANCE["float32"]
    conformance.assert_close(np.asarray(output), expected["output"], tolerance, "output")
    conformance.assert_close(np.asarray(logsumexp), expected["logsumexp"], tolerance, "logsumexp")


def test_default_tiles(interpret):
    """Those that are chosen where no TPU is known of."""
    conformance.check_case(
        flash.attend, dataclasses.replace(CAUSAL, heads=1, queries=150, keys=600)
    )
