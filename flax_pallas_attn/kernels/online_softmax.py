"""What the attention kernels share.

Scores stand transposed, keys along sublanes and queries along lanes, so that the maximum and the
sum of a softmax row are elementwise operations between registers, and what belongs to a query is
one lane of a `[1, queries]` row. They are in base 2: the factor log2(e) is folded into the query.
"""

import math

import jax
import jax.numpy as jnp

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)


def dot(lhs, rhs, contract: tuple[int, int], precision) -> jax.Array:
    """Matrix product over one axis of each, summed in float32.

    float32 operands get full precision unless `precision` says otherwise: a TPU's default is a
    single bfloat16 pass.
    """
    if lhs.dtype != jnp.float32:
        precision = None
    elif precision is None:
        precision = jax.lax.Precision.HIGHEST
    return jax.lax.dot_general(
        lhs,
        rhs,
        (((contract[0],), (contract[1],)), ((), ())),
        precision=precision,
        preferred_element_type=jnp.float32,
    )


def finite(x: jax.Array) -> jax.Array:
    """`x` with zeros for NaN and inf: a probability of zero times NaN would be NaN."""
    return jnp.where(jnp.abs(x.astype(jnp.float32)) < jnp.inf, x, jnp.zeros_like(x))


def softmax_step(scores, maximum):
    """Takes one more tile of scores into a running softmax.

    Args:
      scores: `[keys, queries]` float32, base 2.
      maximum: `[1, queries]`, of the scores so far, -inf where there were none.

    Returns:
      The tile's unnormalised probabilities, the factor by which what was summed so far shrinks,
      and the new maximum.
    """
    highest = jnp.maximum(maximum, jnp.max(scores, axis=0, keepdims=True))
    # A query that has seen nothing yet keeps -inf, which must not be subtracted from itself.
    shift = jnp.where(highest == -jnp.inf, 0.0, highest)
    return jnp.exp2(scores - shift), jnp.exp2(maximum - shift), highest
