"""The reference against things that share no code with it: loops, jax.nn, finite differences."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from flax_pallas_attn import reference
from flax_pallas_attn.logits import Logits, dropout_keep, dropout_rows
from flax_pallas_attn.masking import Mask
from tests import conformance
from tests.conformance import Case
from tests.test_masking import brute_force


def by_hand(call, case):
    """Output and logsumexp, a row at a time, in float64."""
    query, key, value = (call.arrays[name].astype(float) for name in ("query", "key", "value"))
    bias, sinks = call.arrays.get("bias"), call.arrays.get("sinks")
    logits = call.logits
    pairs = (case.batch, case.heads, case.queries, case.keys)
    allowed = np.broadcast_to(
        brute_force(call.mask, case.batch, case.queries, case.keys)[:, None], pairs
    )
    if call.mask.dense is not None:
        allowed = allowed & (np.broadcast_to(call.mask.dense, pairs) != 0)
    at, key_at = np.arange(case.queries) + call.mask.query_offset, np.arange(case.keys)
    output = np.zeros((*pairs[:3], case.value_size))
    logsumexp = np.full(pairs[:3], -np.inf)
    for b, n, i in np.ndindex(*pairs[:3]):
        kv_head = n // (case.heads // case.kv_heads)
        scores = key[b, kv_head] @ query[b, n, i] / np.sqrt(case.head_size)
        if logits.soft_cap is not None:
            scores = logits.soft_cap * np.tanh(scores / logits.soft_cap)
        if bias is not None:
            scores = scores + np.broadcast_to(bias, pairs)[b, n, i]
        if logits.slopes is not None:
            scores = scores - float(logits.slopes[n]) * abs(at[i] - key_at)
        seen = allowed[b, n, i] & (scores > -np.inf)
        if not seen.any():
            continue
        weights = np.where(seen, np.exp(scores), 0)
        total = weights.sum() + (0 if sinks is None else np.exp(float(sinks[n])))
        probabilities = weights / total
        if logits.dropout_seed is not None:
            who = (0, 0) if logits.dropout_broadcast else (b, n)
            row = dropout_rows(jnp.asarray(logits.dropout_seed), *who, at[i])
            kept = dropout_keep(row, logits.dropout_rate, jnp.asarray(key_at))
            probabilities = np.where(kept, probabilities / (1 - logits.dropout_rate), 0)
        output[b, n, i] = probabilities @ value[b, kv_head]
        logsumexp[b, n, i] = np.log(total)
    return output, logsumexp


SMALL = [
    dataclasses.replace(case, queries=9, keys=12, heads=4, kv_heads=2, dtypes=("float32",))
    for case in conformance.cases()
    if case.name
    in (
        "nothing hidden",
        "causal, aligned at the end, shared by a group of two",
        "window",
        "segments, causal, window",
        "lengths, causal",
        "dense, causal, segments",
        "rule, window, offset",
        "bias, of keys, a third -inf",
        "sinks, rows without keys",
        "dropout, offset",
        "every option, segments, causal",
    )
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_is_the_formula(case):
    call = conformance.make_call(case, "float32")
    output, logsumexp = by_hand(call, case)
    actual = conformance.truth(case, "float32")
    np.testing.assert_allclose(actual["output"], output, rtol=1e-12, atol=1e-12)
    np.testing.assert_allclose(actual["logsumexp"], logsumexp, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("mask", "logits"),
    [
        (Mask(lower=0), Logits()),
        (Mask(lower=-1, upper=2, query_offset=2), Logits(soft_cap=1.5)),
        (
            Mask(dense=np.array([[1, 0, 1, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 1, 1]])[None, None]),
            Logits(**conformance.dropout(0.4)),
        ),
    ],
    ids=["causal", "window, soft cap", "an empty row, dropout"],
)
def test_gradients_are_differences(x64, mask, logits):
    random = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(random.standard_normal(shape))
        for shape in ((1, 4, 3, 6), (1, 2, 5, 6), (1, 2, 5, 4))
    )
    bias, sinks = jnp.asarray(random.standard_normal((4, 1, 5))[None]), jnp.arange(4.0)

    def attend(query, key, value, bias, sinks):
        options = dataclasses.replace(logits, bias=bias, sinks=sinks)
        output, logsumexp = reference.attend(query, key, value, mask, options, scale=0.4)
        return output, jnp.where(jnp.isfinite(logsumexp), logsumexp, 0)

    check_grads(attend, (query, key, value, bias, sinks), order=1, modes=["rev"], rtol=1e-6)


@pytest.mark.parametrize(
    ("mask", "options"),
    [
        (Mask(), {}),
        (Mask(lower=0), {"is_causal": True}),
        (Mask(lower=-3, upper=4), {"local_window_size": (4, 3)}),
        (Mask(lower=0, upper=6), {"is_causal": True, "local_window_size": (6, 0)}),
    ],
    ids=["plain", "causal", "window", "causal window"],
)
def test_equals_jax(mask, options):
    case = Case(name="as jax.nn", queries=20, keys=20)
    arrays = [
        jnp.asarray(conformance.make_call(case, "float32").arrays[n])
        for n in ("query", "key", "value")
    ]
    expected = jax.nn.dot_product_attention(*(x.swapaxes(1, 2) for x in arrays), **options)
    output, _ = reference.attend(*arrays, mask, Logits(), scale=case.head_size**-0.5)
    np.testing.assert_allclose(output, expected.swapaxes(1, 2), atol=2e-6)


PROMISES = [check for check in conformance.checks() if "float" not in check.name]


@pytest.mark.parametrize("check", PROMISES, ids=str)
def test_keeps_the_promises(check):
    check(reference.attend)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_rounding(dtype):
    """That the reference itself is within the suite's tolerance in every dtype."""
    conformance.check_case(reference.attend, Case(name="rounding"), dtype)
