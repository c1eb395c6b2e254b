"""Wrong implementations of attention, each a right one with one thing broken.

What is listed in `ALL` must fail the conformance suite; that is how we know that it can fail.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from flax_pallas_attn import reference
from flax_pallas_attn.masking import Positions, SegmentIds

ALL: dict[str, tuple[Callable, str]] = {}
"""By name: the function, and what the checks that notice first have in their names."""


def _wrong(look_first: str = ""):
    def register(function):
        ALL[function.__name__] = (function, look_first)
        return function

    return register


def _replaced(mask, **changes):
    return dataclasses.replace(mask, **changes)


# Gradients.


@_wrong()
def zero_query_gradient(query, key, value, mask, logits, **options):
    return reference.attend(jax.lax.stop_gradient(query), key, value, mask, logits, **options)


@_wrong()
def zero_key_gradient(query, key, value, mask, logits, **options):
    return reference.attend(query, jax.lax.stop_gradient(key), value, mask, logits, **options)


@_wrong()
def zero_value_gradient(query, key, value, mask, logits, **options):
    return reference.attend(query, key, jax.lax.stop_gradient(value), mask, logits, **options)


@_wrong("bias")
def zero_bias_gradient(query, key, value, mask, logits, **options):
    logits = _replaced(logits, bias=jax.lax.stop_gradient(logits.bias))
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("sink")
def zero_sinks_gradient(query, key, value, mask, logits, **options):
    logits = _replaced(logits, sinks=jax.lax.stop_gradient(logits.sinks))
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong()
def logsumexp_without_gradient(query, key, value, mask, logits, **options):
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    return output, jax.lax.stop_gradient(logsumexp)


@_wrong()
def query_gradient_without_scale(query, key, value, mask, logits, *, scale, **options):
    query = _gradient_times(query, 1 / scale)
    return reference.attend(query, key, value, mask, logits, scale=scale, **options)


@_wrong()
def key_gradient_of_one_head_of_the_group(query, key, value, mask, logits, **options):
    group = query.shape[1] // key.shape[1]
    first = jnp.arange(query.shape[1]) % group == 0

    def repeated(x):
        x = jnp.repeat(x, group, axis=1)
        return jnp.where(first[:, None, None], x, jax.lax.stop_gradient(x))

    return reference.attend(query, repeated(key), repeated(value), mask, logits, **options)


@_wrong("soft cap")
def soft_cap_derivative_off_by_two_percent(query, key, value, mask, logits, **options):
    if logits.soft_cap is not None:
        query = _gradient_times(query, 1.02)
    return reference.attend(query, key, value, mask, logits, **options)


@jax.custom_vjp
def _gradient_times(x, factor):
    return x


_gradient_times.defvjp(
    lambda x, factor: (x, factor), lambda factor, gradient: (gradient * factor, None)
)


# Masks.


@_wrong("causal")
def causal_sees_one_key_more(query, key, value, mask, logits, **options):
    lower = None if mask.lower is None else mask.lower - 1
    return reference.attend(query, key, value, _replaced(mask, lower=lower), logits, **options)


@_wrong("causal")
def causal_sees_one_key_less(query, key, value, mask, logits, **options):
    lower = None if mask.lower is None else mask.lower + 1
    return reference.attend(query, key, value, _replaced(mask, lower=lower), logits, **options)


@_wrong("window")
def window_sees_one_key_more(query, key, value, mask, logits, **options):
    upper = None if mask.upper is None else mask.upper + 1
    return reference.attend(query, key, value, _replaced(mask, upper=upper), logits, **options)


@_wrong("window")
def window_sees_one_key_less(query, key, value, mask, logits, **options):
    upper = None if mask.upper is None else mask.upper - 1
    return reference.attend(query, key, value, _replaced(mask, upper=upper), logits, **options)


@_wrong()
def last_key_dropped(query, key, value, mask, logits, **options):
    seen = jnp.arange(key.shape[2]) < key.shape[2] - 1
    dense = seen if mask.dense is None else seen & (mask.dense != 0)
    dense = jnp.broadcast_to(dense, (1,) * (4 - dense.ndim) + dense.shape)
    return reference.attend(query, key, value, _replaced(mask, dense=dense), logits, **options)


@_wrong("aligned")
def query_offset_ignored(query, key, value, mask, logits, **options):
    return reference.attend(query, key, value, _replaced(mask, query_offset=0), logits, **options)


@_wrong("positions")
def positions_ignored(query, key, value, mask, logits, **options):
    return reference.attend(query, key, value, _replaced(mask, positions=None), logits, **options)


@_wrong("positions")
def positions_of_the_first_row_for_all(query, key, value, mask, logits, **options):
    positions = mask.positions
    if positions is not None:
        positions = Positions(*(x[:1].repeat(len(x), 0) for x in (positions.query, positions.key)))
    mask = _replaced(mask, positions=positions)
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("rule")
def rule_ignored(query, key, value, mask, logits, **options):
    return reference.attend(query, key, value, _replaced(mask, rule=None), logits, **options)


@_wrong("segments")
def segments_ignored(query, key, value, mask, logits, **options):
    mask = _replaced(mask, segment_ids=None)
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("lengths")
def leaked_padding(query, key, value, mask, logits, **options):
    """Padding as one more document."""
    ids = mask.segment_ids
    if ids is not None:
        ids = SegmentIds(*(jnp.where(x < 0, 999, x) for x in (ids.query, ids.key)))
    mask = _replaced(mask, segment_ids=ids)
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("dense")
def dense_mask_of_the_first_head_for_all(query, key, value, mask, logits, **options):
    dense = None if mask.dense is None else mask.dense[:, :1]
    return reference.attend(query, key, value, _replaced(mask, dense=dense), logits, **options)


@_wrong("rows without")
def rows_without_keys_see_all(query, key, value, mask, logits, **options):
    """What a large negative number in place of -inf does."""
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    mean = jnp.repeat(value.mean(2, keepdims=True), query.shape[1] // value.shape[1], axis=1)
    return jnp.where(logsumexp[..., None] == -jnp.inf, mean, output), logsumexp


# Heads, scale and options.


@_wrong()
def no_scale(query, key, value, mask, logits, *, scale, **options):
    return reference.attend(query, key, value, mask, logits, scale=1.0, **options)


@_wrong()
def groups_interleaved(query, key, value, mask, logits, **options):
    """Query head n takes KV head n % K, not n // (N / K)."""
    times = query.shape[1] // key.shape[1]
    key, value = jnp.tile(key, (1, times, 1, 1)), jnp.tile(value, (1, times, 1, 1))
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("soft cap")
def soft_cap_ignored(query, key, value, mask, logits, **options):
    return reference.attend(query, key, value, mask, _replaced(logits, soft_cap=None), **options)


@_wrong("bias")
def bias_of_another_head(query, key, value, mask, logits, **options):
    if logits.bias is not None and logits.bias.shape[1] > 1:
        logits = _replaced(logits, bias=logits.bias[:, ::-1])
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("ALiBi")
def alibi_by_place_not_position(query, key, value, mask, logits, **options):
    if logits.slopes is not None and mask.positions is not None:
        distance = jnp.abs(jnp.arange(query.shape[2])[:, None] - jnp.arange(key.shape[2]))
        logits = _replaced(logits, bias=-logits.slopes[:, None, None] * distance, slopes=None)
    return reference.attend(query, key, value, mask, logits, **options)


@_wrong("sink")
def sink_not_in_logsumexp(query, key, value, mask, logits, **options):
    output, _ = reference.attend(query, key, value, mask, logits, **options)
    without = _replaced(logits, sinks=None)
    return output, reference.attend(query, key, value, mask, without, **options)[1]


@_wrong("dropout")
def dropout_not_rescaled(query, key, value, mask, logits, **options):
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    return output * (1 - logits.dropout_rate), logsumexp


@_wrong("dropout")
def dropout_shared_by_heads(query, key, value, mask, logits, **options):
    logits = _replaced(logits, dropout_broadcast=True)
    return reference.attend(query, key, value, mask, logits, **options)


# Rounding, and what must not be read.


@_wrong()
def logsumexp_in_bfloat16(query, key, value, mask, logits, **options):
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    return output, logsumexp.astype(jnp.bfloat16).astype(logsumexp.dtype)


@_wrong()
def products_in_bfloat16(query, key, value, mask, logits, **options):
    arrays = (x.astype(jnp.bfloat16).astype(x.dtype) for x in (query, key, value))
    return reference.attend(*arrays, mask, logits, **options)


@_wrong("nan")
def values_of_hidden_keys_times_zero(query, key, value, mask, logits, **options):
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    return output + 0 * value.sum(axis=(1, 2), keepdims=True)[..., : output.shape[-1]], logsumexp


@_wrong("thousand")
def wrong_far_from_the_start(query, key, value, mask, logits, **options):
    """A counter that overflows at 512: right on every small array."""
    seen = (jnp.arange(query.shape[2]) < 512)[:, None]
    output, logsumexp = reference.attend(query, key, value, mask, logits, **options)
    return jnp.where(seen, output, output[:, :, :1]), logsumexp
