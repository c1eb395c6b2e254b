"""Cross entropy of the next token."""

import jax
import jax.numpy as jnp
import optax

IGNORED = -1  # a target that counts for nothing


def cross_entropy(logits: jax.Array, targets: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sum of `-log softmax(logits)[target]` over the targets that are not `IGNORED`.

    Args:
      logits: `[..., V]` float32.
      targets: `[...]` int32.

    Returns:
      The sum, in nats, and the number of targets in it, both float32 `[]`.

    >>> import jax.numpy as jnp
    >>> total, count = cross_entropy(jnp.zeros((3, 8)), jnp.array([1, 7, IGNORED]))
    >>> round(total.item() / count.item(), 4) == round(jnp.log(8).item(), 4)
    True
    """
    counts = targets != IGNORED
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(targets, 0))
    return jnp.where(counts, losses, 0).sum(), counts.sum(dtype=jnp.float32)
