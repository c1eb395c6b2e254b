"""What stands between the product of query and key and the softmax, written once.

Order: scale, soft cap, bias, ALiBi, mask, softmax (with its sink), dropout.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flax_pallas_attn.masking import Tokens


@functools.partial(jax.tree_util.register_dataclass, data_fields=["slopes"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Alibi:
    """Attention with linear biases: adds `-slope * |query position - key position|`.

    Source: Press et al., 2021 (arXiv 2108.12409), section 3.

    Attributes:
      slopes: `[N]`, one per query head; not trained (its gradient is zero).
    """

    slopes: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["key"], meta_fields=["rate", "broadcast"]
)
@dataclasses.dataclass(frozen=True)
class Dropout:
    """Dropout of attention probabilities.

    What is dropped is a function of key, batch, head, query position and key position alone: not
    of tiles, sharding or implementation.

    Attributes:
      rate: Share that is dropped, in `[0, 1)`; what is kept is divided by `1 - rate`.
      key: A `jax.random` key; may be None where nothing is dropped.
      broadcast: Whether all batch rows and heads drop the same pairs, as flax's modules do by
        default.
    """

    rate: float
    key: jax.Array | None
    broadcast: bool = False


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["bias", "slopes", "sinks", "dropout_seed", "first_batch", "first_head"],
    meta_fields=["soft_cap", "dropout_rate", "dropout_broadcast"],
)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Logits:
    """The options of a call that change scores or probabilities.

    Attributes:
      soft_cap: Scores become `soft_cap * tanh(scores / soft_cap)`; None for none.
      bias: `[B or 1, N or 1, T or 1, S or 1]` or None.
      slopes: ALiBi's, `[N]` float32, or None.
      sinks: `[N]` float32, a logit per head that takes part in the softmax and has no value, or
        None.
      dropout_seed: uint32 `[2]`, or None for no dropout.
      dropout_rate: In `[0, 1)`.
      dropout_broadcast: Share the pattern over batch and heads.
      first_batch: Index of the first batch row in the whole batch, int32, where a device holds a
        part of it; None is 0.
      first_head: Likewise of the first query head.
    """

    soft_cap: float | None = None
    bias: jax.Array | None = None
    slopes: jax.Array | None = None
    sinks: jax.Array | None = None
    dropout_seed: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_broadcast: bool = False
    first_batch: jax.Array | None = None
    first_head: jax.Array | None = None

    def dropout_indices(self, batch: int, heads: int) -> tuple[jax.Array, jax.Array]:
        """Batch rows `[batch]` and query heads `[heads]` as dropout counts them.

        One zero each where the pattern is shared.
        """
        if self.dropout_broadcast:
            return jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)
        rows, columns = jnp.arange(batch), jnp.arange(heads)
        return (
            rows if self.first_batch is None else rows + self.first_batch,
            columns if self.first_head is None else columns + self.first_head,
        )

    @property
    def used(self) -> tuple[str, ...]:
        """Names of the public arguments that are in use."""
        names = []
        if self.soft_cap is not None:
            names.append("logits_soft_cap")
        if self.bias is not None:
            names.append("bias")
        if self.slopes is not None:
            names.append("bias=Alibi")
        if self.sinks is not None:
            names.append("sinks")
        if self.dropout_seed is not None:
            names.append("dropout")
        return tuple(names)


def cap(scores: jax.Array, soft_cap: float) -> jax.Array:
    """`soft_cap * tanh(scores / soft_cap)`; its derivative is `1 - (result / soft_cap) ** 2`."""
    return soft_cap * jnp.tanh(scores / soft_cap)


def alibi(slope: jax.Array, query: Tokens, key: Tokens) -> jax.Array:
    """ALiBi's bias, float32, of the shape in which `slope`, `query` and `key` meet."""
    return -slope * jnp.abs(query.position - key.position).astype(jnp.float32)


def sinks_gradient(sinks: jax.Array, logsumexp: jax.Array, offset: jax.Array) -> jax.Array:
    """What each row adds to the gradient of its sink.

    Args:
      sinks: Broadcasts against the rows.
      logsumexp: Of the rows, -inf where a row sees nothing.
      offset: Sum over Hv of output times its gradient, less the gradient of the logsumexp.
    """
    return jnp.where(logsumexp == -jnp.inf, 0, -jnp.exp(sinks - logsumexp) * offset)


def dropout_rows(
    seed: jax.Array,
    batch_index: jax.Array | int,
    head_index: jax.Array | int,
    query_position: jax.Array,
) -> jax.Array:
    """What `dropout_keep` has to know of a query: uint32 of the arguments' broadcast shape.

    A counter-based hash: the words are mixed in one after another, each followed by the 32-bit
    finaliser "lowbias32", whose avalanche bias is published in its source. Only 32-bit integer
    multiplication, xor and shift, so that it is the same on every device.

    Args:
      seed: uint32 `[2]`.
      batch_index: Row of the batch (0 when the pattern is shared).
      head_index: Query head (0 when the pattern is shared).
      query_position: Integers.

    Source: Wellons, "Prospecting for Hash Functions", 2018.
    """
    state = _mix(seed[0] ^ _mix(_word(batch_index) ^ _mix(seed[1] ^ _word(head_index))))
    return _mix(state ^ _word(query_position))


def dropout_keep(rows: jax.Array, rate: float, key_position: jax.Array) -> jax.Array:
    """Which pairs survive dropout: bool of the arguments' broadcast shape.

    Args:
      rows: Of `dropout_rows`.
      rate: In `[0, 1)`: what is hashed to less than `rate * 2**32` is dropped.
      key_position: Integers.
    """
    # Compared as signed, which is all that a TPU's vector unit has: the first bit is turned.
    turned = jax.lax.bitcast_convert_type(
        _mix(rows ^ _word(key_position)) ^ jnp.uint32(2**31), jnp.int32
    )
    return turned >= min(round(rate * 2**32), 2**32 - 1) - 2**31


def _mix(x: jax.Array) -> jax.Array:
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _word(x: jax.Array | int) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)
