"""Choosing the next token from logits."""

import dataclasses
import math
import numbers

import jax
import jax.numpy as jnp

LOWEST_TEMPERATURE = 1e-30  # float32 logits divided by it are finite


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the next token is drawn: temperature first, then top-k, then top-p.

    Raises:
      ValueError: A value is out of range.
    """

    temperature: float = 1.0
    """Logits are divided by it; 0 takes the likeliest token (greedy)."""
    top_k: int | None = None
    """Draw from the k likeliest tokens only; None for all."""
    top_p: float | None = None
    """Draw from the fewest likeliest tokens whose probabilities sum to at least p; None for all."""

    def __post_init__(self):
        if self.temperature != 0 and not LOWEST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature={self.temperature} must be 0, which takes the likeliest token, or a "
                f"finite number of at least {LOWEST_TEMPERATURE}."
            )
        if self.top_k is not None and (
            not isinstance(self.top_k, numbers.Integral)
            or isinstance(self.top_k, bool)
            or self.top_k < 1
        ):
            raise ValueError(
                f"top_k={self.top_k} must be a whole number of at least 1, or None for all tokens."
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p={self.top_p} must be in (0, 1], or None for all tokens.")


GREEDY = Sampling(temperature=0.0)


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Draws a token from each row of logits.

    Args:
      logits: `[..., V]` float32.
      key: A random key; unused when greedy.
      sampling: How to draw; static under `jit`.

    Returns:
      int32 `[...]`.

    >>> import jax, jax.numpy as jnp
    >>> sample(jnp.array([0.0, 2.0, 1.0]), jax.random.key(0), GREEDY).item()
    1
    """
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    logits = keep_likeliest(logits / sampling.temperature, sampling.top_k, sampling.top_p)
    return jax.random.categorical(key, logits).astype(jnp.int32)


def keep_likeliest(logits: jax.Array, top_k: int | None, top_p: float | None) -> jax.Array:
    """Sets to -inf the logits of tokens that top-k or top-p excludes.

    Of tokens with equal logits, those with the lower ids are kept first. Top-p looks at the
    probabilities of what top-k has kept (Holtzman et al., 2020, arXiv 1904.09751).

    Args:
      logits: `[..., V]`.
      top_k: Tokens to keep; None, or V and more, for all.
      top_p: Probability to keep; None for all.

    Returns:
      As `logits`.
    """
    if top_k is None and top_p is None:
        return logits
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    ranked = jnp.take_along_axis(logits, order, axis=-1)
    if top_k is not None:
        vocab_size = logits.shape[-1]
        ranked = jnp.where(jnp.arange(vocab_size) < min(top_k, vocab_size), ranked, -jnp.inf)
    if top_p is not None:
        probabilities = jax.nn.softmax(ranked, axis=-1)
        before = jnp.cumsum(probabilities, axis=-1) - probabilities
        # The likeliest token stays for any p; rounding could put its "before" at p.
        keep = (before < top_p).at[..., 0].set(True)
        ranked = jnp.where(keep, ranked, -jnp.inf)
    return jnp.put_along_axis(logits, order, ranked, axis=-1, inplace=False)
