"""Attention as a function: check, place on the mesh, choose an implementation, call it."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from flax_pallas_attn import choice, input_checks
from flax_pallas_attn import sharding as sharding_lib
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Alibi, Dropout
from flax_pallas_attn.masking import MaskRule, Positions, SegmentIds
from flax_pallas_attn.sharding import AttentionSharding


def dot_product_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | Alibi | None = None,
    mask: jax.Array | MaskRule | None = None,
    *,
    scale: float | jax.Array | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | None = None,
    key_value_seq_lengths: jax.Array | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    query_offset: int | jax.Array = 0,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | None = None,
    dropout: Dropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    layout: str = "BTNH",
    sharding: AttentionSharding | None = None,
    tiles: Tiles | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Scaled dot-product attention, `softmax(scale * query key^T + bias, masked) value`.

    The arguments up to `local_window_size` are those of `jax.nn.dot_product_attention`. Differs
    from it in that value may have its own head size, a row that may attend to nothing is zero, and
    the logsumexp is float32 and has gradients. Scores and softmax are at least float32.

    Gradients are in reverse mode (`jax.grad`, `jax.vjp`). For `jax.jvp` and `jax.linearize`, at
    which jax raises its own `TypeError` about `custom_vjp`, say `implementation="reference"`; for
    second derivatives `"xla"` in forward over reverse mode (`jax.hessian`), else `"reference"`.

    `jax.export` with a symbolic batch size takes "xla", with other symbolic sizes "reference". To
    export for TPU on another machine, say for which, as `aot.topology_mesh` shows.

    Under `jax.checkpoint` the policy
    `jax.checkpoint_policies.save_only_these_names(*flax_pallas_attn.CHECKPOINT_NAMES)` saves output
    and logsumexp, so that the backward pass does not run the forward kernel again ("pallas" and
    "xla").

    Axes: B batch, T queries, S keys, N query heads, K key heads (K divides N), H head size, Hv
    head size of value.

    Args:
      query: `[B, T, N, H]`, or `[T, N, H]`; bfloat16, float32, float16 or float64.
      key: `[B, S, K, H]`, same dtype.
      value: `[B, S, K, Hv]`, same dtype.
      bias: Added to the scores, broadcasts to `[B, N, T, S]`; -inf is a mask. Or `Alibi(slopes)`.
      mask: Nonzero where a query may attend to a key, broadcasts to `[B, N, T, S]`, any dtype. Or
        a static elementwise rule `f(query_position, key_position) -> bool`, never evaluated on
        more than a tile.
      scale: Factor on the scores, `H ** -0.5` by default; may be a traced scalar.
      is_causal: A query sees the keys up to its own position.
      query_seq_lengths: `[B]` integers: queries beyond are padding and come out zero.
      key_value_seq_lengths: `[B]` integers: keys beyond are padding.
      local_window_size: Keys that a query sees to its left and right, `(left, right)` or one int
        for both, beside the one at its own position.
      segment_ids: `SegmentIds` of `[B, T]` and `[B, S]` (or `[T]` and `[S]`, the same in every
        row): a query sees its own segment only.
      positions: `Positions` of such shapes, where they are not the places in the array.
      query_offset: Position of the first query, the first key being at 0: an int, or integers of
        shape `[]` or `[B]`. S - T aligns the ends.
      logits_soft_cap: `cap * tanh(scores / cap)`, before the bias.
      sinks: `[N]`, a logit per head that takes part in the softmax and has no value.
      dropout: `Dropout(rate, key, broadcast)` of the probabilities.
      precision: Of the matrix products; None is full precision for float32 in the TPU kernels.
      layout: "BTNH", or "BNTH" for heads-first arrays, in and out.
      sharding: Mesh axes that split batch and heads; None reads them off the arrays' types or, on
        Auto axes of the mesh that is set, takes `data` and `fsdp` for the batch and `tensor` for
        the heads.
      tiles: Tile sizes of the TPU kernels; None chooses. `explain_attention` tells which, and the
        VMEM that they take.
      implementation: "pallas" (TPU kernels), "xla" (tile by tile, any device), "reference"
        (plain), or None: on the platform that the program is compiled for, the first of these that
        takes the call. "pallas" compiled for a CPU needs the TPU interpreter around the call, `with
        jax.experimental.pallas.tpu.force_tpu_interpret_mode():`.
      return_residual: Also return the logsumexp of each row.

    Returns:
      `[B, T, N, Hv]` in the query's dtype; with `return_residual` also the logsumexp `[B, T, N]`
      (`[B, N, T]` for "BNTH") in float32, -inf for a row that may attend to nothing.

    Raises:
      ValueError: An argument is wrong; the text names it.
      NotImplementedError: The implementation asked for does not have what the call needs.

    Source: Vaswani et al., 2017 (arXiv 1706.03762), section 3.2.1.

    >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    >>> dot_product_attention(query, key, value, is_causal=True).shape
    (2, 16, 4, 8)
    """
    call = input_checks.check_attention(
        query,
        key,
        value,
        bias=bias,
        mask=mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        segment_ids=segment_ids,
        positions=positions,
        query_offset=query_offset,
        logits_soft_cap=logits_soft_cap,
        sinks=sinks,
        dropout=dropout,
        layout=layout,
    )
    return_residual = input_checks.check_flag(return_residual, "return_residual")
    choice.check_wish(implementation, tiles)
    attend = functools.partial(
        choice.attend,
        scale=call.scale,
        precision=precision,
        tiles=tiles,
        implementation=implementation,
    )
    if call.query.shape[0] == 0:
        attend = nothing
    output, logsumexp = sharding_lib.place(attend, call, sharding)
    if layout == "BTNH":
        output, logsumexp = output.swapaxes(1, 2), logsumexp.swapaxes(1, 2)
    if jnp.ndim(query) == 3:
        output, logsumexp = output[0], logsumexp[0]
    return (output, logsumexp) if return_residual else output


def attention_fn(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    bias: jax.Array | Alibi | None = None,
    mask: jax.Array | MaskRule | None = None,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: jax.typing.DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    module: object | None = None,
    is_causal: bool = False,
) -> jax.Array:
    """`dot_product_attention` under the contract of flax's modules, for their `attention_fn=`.

    Takes the place of `flax.nnx.dot_product_attention` and `flax.linen.dot_product_attention`.
    Differs from them in that a row that may attend to nothing is zero, scores and softmax are
    float32, so that bfloat16 rounds differently, and dropout draws other bits, by its own hash.

    Args:
      query: `[batch..., T, N, H]`, any number of batch axes.
      key: `[batch..., S, K, H]`.
      value: `[batch..., S, K, Hv]`.
      bias: Added to the scores, broadcasts to `[batch..., N, T, S]`; or `Alibi`.
      mask: Nonzero where attention is allowed, broadcasts to `[batch..., N, T, S]`; or a rule.
      broadcast_dropout: Drop the same pairs in all batch rows and heads.
      dropout_rng: Random key; needed when something is dropped.
      dropout_rate: In `[0, 1)`.
      deterministic: Nothing is dropped.
      dtype: Of the computation; None promotes query, key and value to a common one.
      precision: Of the matrix products.
      module: Must be None: flax passes itself to sow the attention weights.
      is_causal: A query sees the keys up to its own position.

    Returns:
      `[batch..., T, N, Hv]`.

    Raises:
      NotImplementedError: `module` is given.
      ValueError: As `dot_product_attention`.
    """
    if module is not None:
        raise NotImplementedError(
            "sow_weights=True asks for the attention weights, a T by S array that this package "
            "never forms. To look at weights, call the module with "
            "attention_fn=flax.nnx.dot_product_attention (or flax.linen's)."
        )
    arrays = {
        name: input_checks.as_array(x, name)
        for name, x in (("query", query), ("key", key), ("value", value))
    }
    for name, x in arrays.items():
        if x.ndim < 3:
            raise ValueError(
                f"{name} has shape {x.shape}; [batch..., positions, heads, head size] is expected."
            )
    dtype = jnp.result_type(*arrays.values()) if dtype is None else dtype
    batch_shape = arrays["query"].shape[:-3]
    dropout = None
    if not input_checks.check_flag(deterministic, "deterministic"):
        dropout = Dropout(rate=dropout_rate, key=dropout_rng, broadcast=broadcast_dropout)
    output = dot_product_attention(
        *(one_batch_axis(x.astype(dtype), batch_shape, 3, name) for name, x in arrays.items()),
        bias=_one_batch_axis_if_array(bias, batch_shape, "bias"),
        mask=_one_batch_axis_if_array(mask, batch_shape, "mask"),
        is_causal=is_causal,
        dropout=dropout,
        precision=precision,
    )
    assert isinstance(output, jax.Array)  # no residual was asked for
    return output.reshape(*batch_shape, *output.shape[-3:])


def _one_batch_axis_if_array(x, batch_shape: tuple[int, ...], name: str) -> Any:
    """A rule, Alibi and None have no batch."""
    if x is None or callable(x) or isinstance(x, Alibi):
        return x
    return one_batch_axis(input_checks.as_array(x, name), batch_shape, 3, name)


def one_batch_axis(x: jax.Array, batch_shape: tuple[int, ...], rank: int, name: str) -> jax.Array:
    """Merges the axes before the last `rank`, which broadcast to `batch_shape`, into one.

    Axes that are missing or 1 in all of the batch stay 1, so that a mask shared by the batch is not
    copied for it.

    Raises:
      ValueError: They do not broadcast to `batch_shape`; names `x`.
    """
    leading = x.shape[: max(x.ndim - rank, 0)]
    tail = x.shape[len(leading) :]
    if math.prod(leading) == 1:
        return x.reshape(1, *tail)
    if len(batch_shape) == 1:
        return x
    try:
        x = jnp.broadcast_to(x, batch_shape + tail)
    except ValueError as error:
        raise ValueError(
            f"{name} has the batch axes {leading} (shape {x.shape}), which do not broadcast to "
            f"those of query, {batch_shape}."
        ) from error
    return x.reshape(math.prod(batch_shape), *tail)


def nothing(query, key, value, mask, logits) -> tuple[jax.Array, jax.Array]:
    """Output and logsumexp of no batch rows, of which no implementation can make tiles."""
    rows = query.shape[:-1]
    sums = jnp.promote_types(query.dtype, jnp.float32)
    return jnp.zeros((*rows, value.shape[-1]), query.dtype), jnp.zeros(rows, sums)
