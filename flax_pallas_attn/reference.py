"""Plain attention: the definition of right, in as few steps as it takes.

Memory and time grow with T * S. It runs in float64 when its inputs do. Imports nothing from the
kernels and differentiates itself.
"""

import jax
import jax.numpy as jnp

from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    scale: float | jax.Array,
    precision: jax.lax.PrecisionLike = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * query key^T, masked) value, heads first.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`, K divides N.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: Soft cap, bias, ALiBi, sinks, dropout.
      scale: Factor on the scores.
      precision: Of both products.

    Returns:
      Output `[B, N, T, Hv]` in the query's dtype and logsumexp `[B, N, T]` in float32 (float64
      for float64 inputs). A row that sees nothing is zero and -inf; one whose query, or a key or
      value that it sees, is not finite is NaN (the kernels let a score of -inf, of an infinite
      query or key, hide its key); neither touches another row.
    """
    batch, heads, queries, _ = query.shape
    kv_heads, keys = key.shape[1:3]
    grouped = (batch, kv_heads, heads // kv_heads, queries)
    query_tokens = mask.query_tokens(jnp.arange(queries), axis=0)
    key_tokens = mask.key_tokens(jnp.arange(keys), axis=1)

    # A zero probability times NaN is NaN: what is not finite is taken out of the products and put
    # back as a NaN score, which the mask can hide.
    bad = (
        _not_finite(query)[..., :, None]
        | jnp.repeat(_not_finite(key) | _not_finite(value), heads // kv_heads, axis=1)[..., None, :]
    )
    query, key, value = (jnp.where(jnp.isfinite(x), x, 0) for x in (query, key, value))

    accumulator = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum(
        "bkgth,bksh->bkgts",
        query.reshape(*grouped, -1),
        key,
        precision=precision,
        preferred_element_type=accumulator,
    ).reshape(batch, heads, queries, keys)
    scores = jnp.where(bad, jnp.nan, scores * scale)
    if logits.soft_cap is not None:
        scores = logits_lib.cap(scores, logits.soft_cap)
    visible = mask.visible(_per_head(query_tokens), _per_head(key_tokens), mask.dense)
    if logits.bias is not None:
        scores += logits.bias.astype(scores.dtype)
        visible = (logits.bias != -jnp.inf) & (True if visible is None else visible)
    if logits.slopes is not None:
        slopes = jax.lax.stop_gradient(logits.slopes)[:, None, None]
        scores += logits_lib.alibi(
            slopes, *(_per_head(tokens) for tokens in (query_tokens, key_tokens))
        )

    visible = True if visible is None else visible
    scores = jnp.where(visible, scores, -jnp.inf)
    # Not by the greatest score: XLA's maximum on CPU may pass over a NaN.
    empty = (scores == -jnp.inf).all(axis=-1, keepdims=True)
    greatest = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if logits.sinks is None else logits.sinks.astype(scores.dtype)[:, None, None]
    if sinks is not None:
        greatest = jnp.maximum(greatest, sinks)
    greatest = jax.lax.stop_gradient(jnp.where(greatest == -jnp.inf, 0, greatest))
    weights = jnp.exp(scores - greatest)
    total = weights.sum(axis=-1, keepdims=True)
    if sinks is not None:
        total += jnp.exp(sinks - greatest)
    total = jnp.where(empty, 1, total)
    # A row that is NaN gives NaN to the keys that it sees, and to no other.
    probabilities = jnp.where(visible, weights / total, 0)
    logsumexp = jnp.where(empty, -jnp.inf, greatest + jnp.log(total))[..., 0]

    if logits.dropout_seed is not None:
        rows, columns = logits.dropout_indices(batch, heads)
        dropout_rows = logits_lib.dropout_rows(
            logits.dropout_seed,
            rows[:, None, None, None],
            columns[:, None, None],
            _per_head(query_tokens).position,
        )
        keep = logits_lib.dropout_keep(
            dropout_rows, logits.dropout_rate, _per_head(key_tokens).position
        )
        probabilities = jnp.where(keep, probabilities / (1 - logits.dropout_rate), 0)
    output = jnp.einsum(
        "bkgts,bksh->bkgth",
        probabilities.astype(value.dtype).reshape(*grouped, keys),
        value,
        precision=precision,
        preferred_element_type=accumulator,
    )
    return output.reshape(batch, heads, queries, -1).astype(query.dtype), logsumexp


def _not_finite(x: jax.Array) -> jax.Array:
    return ~jnp.isfinite(x).all(axis=-1)


def _per_head(tokens):
    """Gives fields with a batch axis (`[B, n, 1]`) one for heads (`[B, 1, n, 1]`)."""
    return tokens.map(lambda x: x[:, None] if x.ndim == 3 else x)
