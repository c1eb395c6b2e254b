"""Rotary position embedding: queries and keys are turned by angles that grow with position.

The score of a query at position m and a key at position n then depends on m - n alone. Feature i
is paired with feature i + dims / 2 (the half-split convention of GPT-NeoX, Llama and Hugging
Face); weights made for the interleaved convention have to be permuted first.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Slows the low frequencies down, as Llama 3.1 does to reach longer contexts.

    A frequency that turns fewer than `low_frequency_factor` times in `original_max_positions` is
    divided by `factor`, one that turns more than `high_frequency_factor` times is kept, and those
    between are interpolated.

    Source: `rope_scaling` of the published Llama 3.1 configurations (`rope_type` "llama3") and
    `apply_scaling` in Meta's reference code.

    Attributes:
      factor: What low frequencies are divided by, at least 1.
      low_frequency_factor: Turns below which a frequency is low.
      high_frequency_factor: Turns above which a frequency is high.
      original_max_positions: Context length before scaling, in tokens.
    """

    factor: float = 8.0
    low_frequency_factor: float = 1.0
    high_frequency_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self):
        _check_scaling(self)
        if not 0 < self.low_frequency_factor < self.high_frequency_factor:
            raise ValueError(
                f"low_frequency_factor={self.low_frequency_factor} must be positive and below "
                f"high_frequency_factor={self.high_frequency_factor}."
            )

    def scale(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        """Scaled frequencies, float64 `[dims / 2]`, and the factor on sine and cosine."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        low, high = self.low_frequency_factor, self.high_frequency_factor
        kept = np.clip((turns - low) / (high - low), 0, 1)
        return frequencies * (kept + (1 - kept) / self.factor), 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: low frequencies are interpolated, high ones kept, and attention is sharpened.

    The share that is kept falls linearly with the index of the frequency, between those that turn
    `fast_turns` and `slow_turns` times in `original_max_positions`. (Published models and the
    authors' code do so; the paper's ramp is linear in the number of turns.)

    Source: Peng et al., 2023 (arXiv 2309.00071), section 3, and the `rope_scaling` of published
    configurations (`rope_type` "yarn").

    Attributes:
      factor: What low frequencies are divided by, at least 1.
      original_max_positions: Context length before scaling, in tokens.
      fast_turns: Turns above which a frequency is kept (`beta_fast`).
      slow_turns: Turns below which a frequency is divided by `factor` (`beta_slow`).
      attention_factor: Factor on sine and cosine; None for the paper's `0.1 * ln(factor) + 1`.
      truncate: Whether the ramp starts and ends at whole indices.
    """

    factor: float
    original_max_positions: int
    fast_turns: float = 32.0
    slow_turns: float = 1.0
    attention_factor: float | None = None
    truncate: bool = True

    def __post_init__(self):
        _check_scaling(self)
        if not 0 < self.slow_turns < self.fast_turns:
            raise ValueError(
                f"slow_turns={self.slow_turns} must be positive and below "
                f"fast_turns={self.fast_turns}."
            )

    def scale(self, frequencies: np.ndarray, base: float) -> tuple[np.ndarray, float]:
        """Scaled frequencies, float64 `[dims / 2]`, and the factor on sine and cosine."""
        pairs = len(frequencies)

        def index_with(turns):
            """The index, not whole, of the frequency that turns so often: solves for i in
            `original_max_positions * base ** (-i / pairs) = 2 * pi * turns`."""
            ratio = self.original_max_positions / (2 * math.pi * turns)
            return pairs * math.log(ratio) / math.log(base)

        start, stop = index_with(self.fast_turns), index_with(self.slow_turns)
        if self.truncate:
            start, stop = math.floor(start), math.ceil(stop)
        start, stop = max(start, 0), min(stop, 2 * pairs - 1)
        kept = 1 - np.clip((np.arange(pairs) - start) / max(stop - start, 1e-3), 0, 1)
        factor = self.attention_factor
        if factor is None:
            factor = 0.1 * math.log(self.factor) + 1
        return frequencies * (kept + (1 - kept) / self.factor), factor


def _check_scaling(scaling):
    if not 1 <= scaling.factor < math.inf:
        raise ValueError(f"factor={scaling.factor} must be at least 1 and finite.")
    if scaling.original_max_positions < 1:
        raise ValueError(
            f"original_max_positions={scaling.original_max_positions} must be at least 1 token."
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotary:
    """Rotary position embedding.

    With `f_i = base ** (-2 i / dims)` for i in `0 .. dims / 2 - 1`, each pair of features
    `(x_i, x_{i + dims / 2})` is turned by the angle `position * f_i`.

    Source: Su et al., 2021 (arXiv 2104.09864), section 3.2.

    Attributes:
      base: Of the frequencies, above 1 (`rope_theta`).
      dims: Leading features of each head that are turned, even; the others pass through. None
        for all.
      scaling: `Llama3Scaling`, `YarnScaling` or None.

    >>> import jax.numpy as jnp
    >>> x = jnp.ones((1, 3, 2, 4))  # [B, T, N, H]
    >>> turned = Rotary().apply(x, jnp.arange(3))
    >>> turned.shape
    (1, 3, 2, 4)
    >>> bool((turned[:, 0] == x[:, 0]).all())  # nothing turns at position 0
    True
    """

    base: float = 10_000.0
    dims: int | None = None
    scaling: Llama3Scaling | YarnScaling | None = None

    def __post_init__(self):
        if not 1 < self.base < math.inf:
            raise ValueError(f"base={self.base} must be above 1 and finite.")
        if self.dims is not None and (self.dims < 2 or self.dims % 2):
            raise ValueError(f"dims={self.dims} must be even and at least 2.")

    def apply(self, x: jax.Array, positions: jax.Array) -> jax.Array:
        """Turns each head of `x` by its token's position.

        Angles, sine and cosine are float32, so an angle is off by up to `position * 6e-8`.

        Args:
          x: Queries or keys, `[..., T, N, H]`, floating point.
          positions: Integers that broadcast to `[..., T]`, the last axis T.

        Returns:
          As `x`, in its dtype.

        Raises:
          ValueError: `dims` exceeds H, H is odd, or `positions` does not fit `x`.
        """
        dims = x.shape[-1] if self.dims is None else self.dims
        if dims > x.shape[-1] or dims % 2:
            raise ValueError(
                f"Rotary(dims={self.dims}) turns pairs of features: it needs an even number of "
                f"them, at most the head size, which is {x.shape[-1]}."
            )
        positions = jnp.asarray(positions)
        *batch, tokens = x.shape[:-2]
        leading = positions.shape[:-1]
        if (
            positions.shape[-1:] != (tokens,)
            or len(leading) > len(batch)
            or any(size not in (1, batch[-i]) for i, size in enumerate(reversed(leading), 1))
        ):
            raise ValueError(
                f"positions has shape {positions.shape}; for x of shape {x.shape} it must be "
                f"{x.shape[:-2]} or {x.shape[-3:-2]}."
            )
        frequencies, factor = self.frequencies(dims)
        angles = positions[..., None, None].astype(jnp.float32) * frequencies.astype(np.float32)
        sine, cosine = factor * jnp.sin(angles), factor * jnp.cos(angles)
        # All features at once rather than half by half: on CPU twice as fast, with the projection
        # before it and both gradients.
        sine, cosine = (jnp.concatenate([half, half], axis=-1) for half in (sine, cosine))
        turning = x[..., :dims].astype(jnp.promote_types(x.dtype, jnp.float32))
        first, second = jnp.split(turning, 2, axis=-1)
        turned = turning * cosine + jnp.concatenate([-second, first], axis=-1) * sine
        return jnp.concatenate([turned.astype(x.dtype), x[..., dims:]], axis=-1)

    def frequencies(self, dims: int) -> tuple[np.ndarray, float]:
        """Angle per position of each pair, float64 `[dims / 2]`, and the factor on sine and cosine.

        Args:
          dims: Features that are turned.
        """
        frequencies = self.base ** (-np.arange(0, dims, 2) / dims)
        if self.scaling is None:
            return frequencies, 1.0
        return self.scaling.scale(frequencies, self.base)
