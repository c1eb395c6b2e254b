"""What the attention kernels share.

Scores stand transposed, keys along sublanes and queries along lanes, so that the maximum and the
sum of a softmax row are elementwise operations between registers, and what belongs to a query is
one lane of a `[1, queries]` row. They are in base 2: the factor log2(e) is folded into the query.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LOG2_E = math.log2(math.e)
LN_2 = math.log(2.0)
SUBLANES = 8
"""Rows of 32 bits in a register."""


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


def finite_columns(x) -> tuple[jax.Array, jax.Array]:
    """`x` with zeros for each column that holds NaN or inf, and which those are.

    Args:
      x: `[rows, columns]`, bfloat16 or float32.

    Returns:
      `[rows, columns]`, and `[1, columns]` bool.
    """
    rows, dtype = x.shape[0], x.dtype
    if rows % (SUBLANES * 4 // dtype.itemsize):  # rows that do not fill registers
        x = jnp.pad(x.astype(jnp.float32), ((0, -rows % SUBLANES), (0, 0)))
    bits = pltpu.bitcast(x, jnp.int32)
    # Where the exponent is all ones, one more reaches the sign. Of two bfloat16 in 32 bits neither
    # carries into the other.
    if x.dtype == jnp.bfloat16:
        exponent, one, sign = 0x7F807F80, 0x00800080, -0x7FFF8000
    else:
        exponent, one, sign = 0x7F800000, 0x00800000, -0x80000000
    signs = (bits & exponent) + one
    blocks = [signs[i : i + SUBLANES] for i in range(0, len(signs), SUBLANES)]
    signs = functools.reduce(jnp.bitwise_or, blocks)
    for half in (4, 2, 1):
        signs = signs[:half] | signs[half:]
    is_bad = (signs & sign) != 0
    return pltpu.bitcast(jnp.where(is_bad, 0, bits), x.dtype)[:rows].astype(dtype), is_bad


@dataclasses.dataclass(frozen=True)
class Stand:
    """How arrays of a token's heads stand: tokens first, or turned to have them last.

    Turned, products stream the rows of a head instead of those of tokens. Where a head is as wide
    as the matrix unit that saves nothing, and turning costs.

    Attributes:
      is_turned: Whether tokens come last.
    """

    is_turned: bool

    def __call__(self, tokens, dim):
        """A shape, or an index."""
        return (dim, tokens) if self.is_turned else (tokens, dim)

    def turn(self, x: jax.Array) -> jax.Array:
        """Of `[tokens, dim]`, or back to it."""
        return x.T if self.is_turned else x

    def finite(self, x: jax.Array) -> jax.Array:
        """What stands so with zeros for what is not finite, or for all of a token that has any."""
        return finite_columns(x)[0] if self.is_turned else finite(x)

    def with_queries(self, keys: jax.Array, queries: jax.Array, precision) -> jax.Array:
        """`[keys, queries]`, of `[keys, dim]` and what stands so of queries."""
        return dot(keys, queries, (1, 0 if self.is_turned else 1), precision)

    def sum_of_keys(self, pairs: jax.Array, queries: jax.Array, precision) -> jax.Array:
        """What stands so of keys, of `[keys, queries]` and what stands so of queries."""
        if self.is_turned:
            return dot(queries, pairs, (1, 1), precision)
        return dot(pairs, queries, (1, 0), precision)


@functools.partial(jax.jit, inline=True)
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
