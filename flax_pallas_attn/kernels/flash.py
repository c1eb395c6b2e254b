"""Flash attention on TPU: the kernels under their one custom_vjp."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from flax_pallas_attn import input_checks
from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.flash_backward import flash_backward
from flax_pallas_attn.kernels.flash_bias_gradient import flash_bias_gradient
from flax_pallas_attn.kernels.flash_forward import flash_forward
from flax_pallas_attn.kernels.score_tiles import ScoreOptions, fold_group
from flax_pallas_attn.kernels.tiles import LANES, Shape, Tiles
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask
from flax_pallas_attn.residuals import named
from flax_pallas_attn.sharding import vary_alike

_LEAST_REUSED_BYTES = 64 << 20
"""Of a query whose memory the output takes. XLA copies a query that is needed later, such as an
argument of the program: of a small one that costs more than its memory is worth."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Options:
    scale: float
    precision: jax.lax.PrecisionLike
    tiles: Tiles


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How the kernels run a call.

    Attributes:
      reasons: Why they cannot; empty where they can.
      is_folded: Whether the query heads that share a key head are more queries of one head.
      group: Query heads that share a key head, after that.
      shape: What the kernels see, after that; None where it is not known while tracing.
      tiles: None where none fit.
    """

    reasons: list[str]
    is_folded: bool
    group: int
    shape: Shape | None
    tiles: Tiles | None


def plan(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    tiles: Tiles | None,
) -> Plan:
    """How the kernels would run a call, of which the values do not matter; arguments as `attend`.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: Soft cap, bias, ALiBi, sinks, dropout.
      tiles: The caller's; None chooses.

    Raises:
      ValueError: The caller's tiles do not fit.
    """
    reasons = []
    if query.dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(
            f"dtype {query.dtype} has no TPU kernel (Mosaic compiles bfloat16 and float32)"
        )
    if symbolic := input_checks.symbolic_sizes(query, key, value, axes="BNTKSH"):
        reasons.append(
            f"{symbolic}: the kernels take no symbolic size (export once for each of the sizes)"
        )
        return Plan(reasons=reasons, is_folded=False, group=1, shape=None, tiles=None)
    is_folded = key.shape[1] < query.shape[1] and query.shape[2] < LANES
    bias = logits.bias
    if is_folded:
        query, mask, options = jax.eval_shape(_folded, query, key, mask, logits)
        bias = options.bias
    shape = tiles_lib.shape_of(query, key, value, mask, bias)
    if tiles is not None:
        tiles_lib.check_fit(tiles, "forward", tiles_lib.forward_vmem_bytes(tiles, shape))
    else:
        try:
            tiles = tiles_lib.default_tiles(shape)
        except NotImplementedError as error:
            reasons.append(str(error))
    group = query.shape[1] // key.shape[1]
    return Plan(reasons=reasons, is_folded=is_folded, group=group, shape=shape, tiles=tiles)


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
      logits: Soft cap, bias, ALiBi, sinks, dropout.
      scale: Factor on the scores, static.
      precision: Of float32 products; None is full precision.
      tiles: Tile sizes; None chooses.

    Raises:
      NotImplementedError: With all reasons, when the kernels cannot take the call.
      ValueError: The tiles given do not fit.
    """
    planned = plan(query, key, value, mask, logits, tiles=tiles)
    if planned.reasons:
        raise NotImplementedError(
            'implementation="pallas" cannot take this call: '
            + "; ".join(planned.reasons)
            + '. Use implementation="xla", or None to let the package choose.'
        )
    assert planned.tiles is not None, "no tiles is a reason"
    options = _Options(scale=scale, precision=precision, tiles=planned.tiles)
    rows = query.shape[:3]
    if planned.is_folded:
        query, mask, score_options = _folded(query, key, mask, logits)
    else:
        score_options = ScoreOptions.of(logits, mask, *rows)
    output, logsumexp = _attend(*vary_alike((query, key, value, mask, score_options)), options)
    return output.reshape(*rows, -1), logsumexp.reshape(rows)


def _folded(query, key, mask: Mask, logits: Logits):
    """Query, mask and options, with the query heads of a group as queries of one head."""
    options = ScoreOptions.of(logits, mask, *query.shape[:3])
    return fold_group(query, key.shape[2], key.shape[1], mask, options)


@functools.partial(jax.custom_vjp, nondiff_argnames=("options",))
def _attend(query, key, value, mask, score_options, options: _Options):
    forward = functools.partial(flash_forward, **_as_arguments(options))
    fresh = functools.partial(forward, reuse_query=False)
    arrays = (query, key, value, mask, score_options)
    if query.shape[-1] != value.shape[-1] or query.nbytes < _LEAST_REUSED_BYTES:
        return fresh(*arrays)
    # Elsewhere the kernel is interpreted, which gives an output in reused memory the shape of its
    # tiles and not its own (jax 0.12).
    reusing = functools.partial(forward, reuse_query=True)
    return jax.lax.platform_dependent(*arrays, tpu=reusing, default=fresh)


@jax.custom_jvp
def _differentiated_once(arrays):
    """The arrays. Their tangents would have to pass through a kernel, of which jax knows none."""
    return arrays


@_differentiated_once.defjvp
def _differentiated_twice(primals, tangents):
    raise NotImplementedError(
        'implementation="pallas" has first derivatives in reverse mode alone (jax.grad, jax.vjp), '
        'and this asks for a second one. Use implementation="xla" for jax.hessian and jax.jvp of '
        'jax.grad (forward over reverse), or "reference" for all others.'
    )


def _attend_forward(query, key, value, mask, score_options, options: _Options):
    shape = tiles_lib.shape_of(query, key, value, mask, score_options.bias)
    need_bytes = tiles_lib.backward_vmem_bytes(options.tiles, shape, keys_in_vmem=0)
    tiles_lib.check_fit(options.tiles, "backward", need_bytes)
    arrays = _differentiated_once((query, key, value, mask, score_options))
    results = named(*flash_forward(*arrays, **_as_arguments(options), reuse_query=False))
    return results, (arrays, results)


def _attend_backward(options: _Options, residuals, gradients):
    residuals, gradients = _differentiated_once((residuals, gradients))
    (query, key, value, mask, score_options), (output, logsumexp) = residuals
    output_gradient, logsumexp_gradient = gradients
    delta = jnp.einsum(
        "bnth,bnth->bnt", output, output_gradient, preferred_element_type=jnp.float32
    )
    delta -= logsumexp_gradient
    arrays = (query, key, value, output_gradient, logsumexp, delta, mask, score_options)
    arguments = _as_arguments(options)
    option_gradients = jax.tree.map(lambda _: None, score_options)
    if score_options.bias is not None:
        gradient = flash_bias_gradient(*arrays, **arguments)
        option_gradients = dataclasses.replace(option_gradients, bias=gradient)
    if score_options.sinks is not None:
        sinks = score_options.sinks
        rows = logits_lib.sinks_gradient(sinks[..., 0], logsumexp, delta)
        shared = [axis for axis, size in enumerate(sinks.shape[:3]) if size == 1]
        gradient = rows.sum(shared, keepdims=True)[..., None]
        option_gradients = dataclasses.replace(option_gradients, sinks=gradient)
    return *flash_backward(*arrays, **arguments), None, option_gradients


_attend.defvjp(_attend_forward, _attend_backward)


def _as_arguments(options: _Options) -> dict:
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
