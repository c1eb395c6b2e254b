"""Flash attention on TPU: the kernels under their one custom_vjp."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.flash_backward import flash_backward
from flax_pallas_attn.kernels.flash_forward import flash_forward
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask
from flax_pallas_attn.sharding import vary_alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    scale: float
    precision: jax.lax.PrecisionLike
    tiles: Tiles


def reasons_against(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    tiles: Tiles | None,
) -> list[str]:
    """Why these kernels cannot take a call; empty when they can. Arguments as `attend`."""
    reasons = [f"{name} is not in the Pallas kernels yet" for name in logits.used]
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(
            f"dtype {query.dtype} has no TPU kernel (Mosaic compiles bfloat16 and float32)"
        )
    if tiles is None:
        try:
            tiles_lib.default_tiles(tiles_lib.shape_of(query, key, value, mask))
        except NotImplementedError as error:
            reasons.append(str(error))
    return reasons


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    scale: float,
    precision: jax.lax.PrecisionLike = None,
    tiles: Tiles | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Attention of heads-first arrays; arguments and results as those of `reference.attend`.

    Args:
      query: `[B, N, T, H]`, bfloat16 or float32.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: Must be empty.
      scale: Factor on the scores, static.
      precision: Of float32 products; None is full precision.
      tiles: Tile sizes; None chooses.

    Raises:
      NotImplementedError: With all reasons, when the kernels cannot take the call.
    """
    if reasons := reasons_against(query, key, value, mask, logits, tiles=tiles):
        raise NotImplementedError(
            'implementation="pallas" cannot take this call: '
            + "; ".join(reasons)
            + '. Use implementation="xla", or None to let the package choose.'
        )
    if tiles is None:
        tiles = tiles_lib.default_tiles(tiles_lib.shape_of(query, key, value, mask))
    options = _Options(scale=scale, precision=precision, tiles=tiles)
    return _attend(*vary_alike((query, key, value, mask)), options)


@functools.partial(jax.custom_vjp, nondiff_argnames=("options",))
def _attend(query, key, value, mask, options: _Options):
    forward = functools.partial(flash_forward, **_as_arguments(options))
    fresh = functools.partial(forward, reuse_query=False)
    if query.shape[-1] != value.shape[-1]:
        return fresh(query, key, value, mask)
    # Elsewhere the kernel is interpreted, which gives an output in reused memory the shape of its
    # tiles and not its own (jax 0.12).
    reusing = functools.partial(forward, reuse_query=True)
    return jax.lax.platform_dependent(query, key, value, mask, tpu=reusing, default=fresh)


def _attend_forward(query, key, value, mask, options: _Options):
    output, logsumexp = flash_forward(
        query, key, value, mask, **_as_arguments(options), reuse_query=False
    )
    return (output, logsumexp), (query, key, value, mask, output, logsumexp)


def _attend_backward(options: _Options, residuals, gradients):
    query, key, value, mask, output, logsumexp = residuals
    output_gradient, logsumexp_gradient = gradients
    delta = jnp.einsum(
        "bnth,bnth->bnt", output, output_gradient, preferred_element_type=jnp.float32
    )
    query, key, value = flash_backward(
        query,
        key,
        value,
        output_gradient,
        logsumexp,
        delta - logsumexp_gradient,
        mask,
        **_as_arguments(options),
    )
    return query, key, value, None


_attend.defvjp(_attend_forward, _attend_backward)


def _as_arguments(options: _Options) -> dict:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
