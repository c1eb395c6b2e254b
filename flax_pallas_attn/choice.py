"""Which implementation takes a call, and why another does not."""

import dataclasses
import functools
from collections.abc import Mapping

import jax

from flax_pallas_attn import blockwise, input_checks, reference
from flax_pallas_attn.kernels import flash
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask

IMPLEMENTATIONS = ("pallas", "xla", "reference")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """What runs a call.

    Attributes:
      on_tpu: The implementation where the program is compiled for TPU.
      elsewhere: The one where it is compiled for another platform.
      reasons: Against each implementation that cannot take the call.
      plan: How the kernels would run it.
    """

    on_tpu: str
    elsewhere: str
    reasons: Mapping[str, list[str]]
    plan: flash.Plan


def check_wish(implementation: str | None, tiles: Tiles | None) -> None:
    """Raises `ValueError` for an implementation that is not known, or tiles that it has no use for.

    Arguments as `dot_product_attention`'s.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(
            f"implementation={implementation!r} is not known; use None or one of {IMPLEMENTATIONS}."
        )
    if not isinstance(tiles, Tiles | None):
        raise ValueError(f"tiles={tiles!r} must be Tiles(...), or None to let the package choose.")
    if tiles is not None and implementation not in (None, "pallas"):
        raise ValueError(
            f'tiles are of the TPU kernels, implementation="{implementation}" has none: leave '
            "tiles out."
        )


def choose(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    tiles: Tiles | None,
    implementation: str | None,
) -> Choice:
    """The choice for one device's heads-first arrays, of which the values do not matter.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: What changes scores and probabilities.
      tiles: The caller's, or None.
      implementation: The one that the caller insists on, or None.

    Raises:
      ValueError: The caller's tiles do not fit.
    """
    plan = flash.plan(query, key, value, mask, logits, tiles=tiles)
    reasons = {"pallas": plan.reasons, "xla": blockwise.reasons_against(query, key, value)}
    if implementation is None:
        elsewhere = "reference" if reasons["xla"] else "xla"
        on_tpu = elsewhere if plan.reasons else "pallas"
    else:
        on_tpu = elsewhere = implementation
    return Choice(on_tpu=on_tpu, elsewhere=elsewhere, reasons=reasons, plan=plan)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    scale: float,
    precision: jax.lax.PrecisionLike,
    tiles: Tiles | None,
    implementation: str | None,
) -> tuple[jax.Array, jax.Array]:
    """Attention by the implementation chosen; arguments as `choose`, results as the reference's.

    Raises:
      ValueError: The caller's tiles do not fit.
      NotImplementedError: The implementation that the caller insists on cannot take the call.
    """
    arrays = (query, key, value, mask, logits)
    choice = choose(*arrays, tiles=tiles, implementation=implementation)
    if implementation is None:
        _warn_of_the_unexpected(choice)
    options = {"scale": scale, "precision": precision}
    run = {
        "pallas": functools.partial(flash.attend, **options, tiles=choice.plan.tiles),
        "xla": functools.partial(blockwise.attend, **options),
        "reference": functools.partial(reference.attend, **options),
    }
    if choice.on_tpu == choice.elsewhere:
        return run[choice.on_tpu](*arrays)
    return jax.lax.platform_dependent(
        *arrays, tpu=run[choice.on_tpu], default=run[choice.elsewhere]
    )


def _warn_of_the_unexpected(choice: Choice) -> None:
    """What the caller has to know: no kernel on TPU, memory that grows with T * S."""
    if choice.elsewhere == "reference":
        input_checks.warn(
            'implementation="xla" cannot take this call, "reference" does, whose memory grows with '
            "T * S: " + "; ".join(choice.reasons["xla"]) + "."
        )
    elif choice.on_tpu != "pallas" and tiles_lib.tpu_kind() is not None:
        input_checks.warn(
            'The Pallas kernels cannot take this call, implementation="xla" does: '
            + "; ".join(choice.reasons["pallas"])
            + "."
        )
