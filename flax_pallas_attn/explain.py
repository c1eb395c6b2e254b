"""What `dot_product_attention` would do with a call, in words and figures, without doing it."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from flax_pallas_attn import choice, input_checks
from flax_pallas_attn import sharding as sharding_lib
from flax_pallas_attn.attention import nothing
from flax_pallas_attn.kernels import tiles as tiles_lib
from flax_pallas_attn.kernels.tiles import Tiles
from flax_pallas_attn.logits import Alibi, Dropout
from flax_pallas_attn.masking import MaskRule, Positions, SegmentIds
from flax_pallas_attn.sharding import AttentionSharding

_MIB = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionExplanation:
    """What runs a call of `dot_product_attention`, and how. `print` it.

    Attributes:
      on_tpu: The implementation where the program is compiled for TPU; None where the call raises,
        and for an empty batch, of which nothing runs.
      elsewhere: The one where it is compiled for another platform; "pallas" runs there in the
        interpreter alone.
      reasons: Why each other implementation does not run on TPU.
      device_kind: The TPU generation that this holds for, as jax calls it; None where tracing
        knows of none, and tiles are those that compile for all.
      batch_axes: Mesh axes that split the batch; None where nothing is placed on a mesh.
      head_axes: Mesh axes that split the heads; likewise.
      replicated_axes: Mesh axes over which the work is repeated; likewise.
      query_shape: What one device works on, heads first: `[B, N, T, H]`.
      key_shape: Likewise `[B, K, S, H]`.
      is_folded: Whether the kernels take the query heads that share a key head as more queries of
        one head, as they do with a few queries.
      tiles: Tile sizes of the kernels; None where they do not run on TPU.
      forward_vmem_bytes: Estimate of the VMEM that the forward kernel needs; likewise.
      backward_vmem_bytes: Of the backward kernel; likewise.
      vmem_bytes: VMEM that a kernel may use, of the generation, or of the smallest one.
    """

    on_tpu: str | None
    elsewhere: str | None
    reasons: Mapping[str, str]
    device_kind: str | None
    batch_axes: tuple[str, ...] | None
    head_axes: tuple[str, ...] | None
    replicated_axes: tuple[str, ...] | None
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    is_folded: bool
    tiles: Tiles | None
    forward_vmem_bytes: int | None
    backward_vmem_bytes: int | None
    vmem_bytes: int

    def __str__(self) -> str:
        lines = [f"on TPU: {self.on_tpu or 'nothing'}; elsewhere: {self.elsewhere or 'nothing'}"]
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons.items()]
        lines.append(f"TPU generation: {self.device_kind or 'not known: for all of them'}")
        lines.append(f"mesh: {self._placement()}")
        lines.append(f"one device: query {list(self.query_shape)}, key {list(self.key_shape)}")
        if self.is_folded:
            lines[-1] += "; query heads that share a key head folded into one"
        if self.tiles is not None:
            assert self.forward_vmem_bytes is not None
            assert self.backward_vmem_bytes is not None
            sizes = dataclasses.asdict(self.tiles)
            lines.append("tiles: " + ", ".join(f"{name} {size}" for name, size in sizes.items()))
            lines.append(
                f"VMEM, estimated: forward {self.forward_vmem_bytes / _MIB:.1f} MiB, backward "
                f"{self.backward_vmem_bytes / _MIB:.1f} MiB, of {self.vmem_bytes / _MIB:.1f} MiB"
            )
        return "\n".join(lines)

    def _placement(self) -> str:
        if self.batch_axes is None:
            return "none, or one device"
        named = {
            "batch over": self.batch_axes,
            "heads over": self.head_axes,
            "repeated over": self.replicated_axes,
        }
        parts = [f"{what} {' and '.join(axes)}" for what, axes in named.items() if axes]
        return ", ".join(parts)


def explain_attention(
    query: jax.Array | jax.ShapeDtypeStruct,
    key: jax.Array | jax.ShapeDtypeStruct,
    value: jax.Array | jax.ShapeDtypeStruct,
    bias: jax.Array | jax.ShapeDtypeStruct | Alibi | None = None,
    mask: jax.Array | jax.ShapeDtypeStruct | MaskRule | None = None,
    *,
    scale: float | jax.Array | jax.ShapeDtypeStruct | None = None,
    is_causal: bool = False,
    query_seq_lengths: jax.Array | jax.ShapeDtypeStruct | None = None,
    key_value_seq_lengths: jax.Array | jax.ShapeDtypeStruct | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    segment_ids: SegmentIds | None = None,
    positions: Positions | None = None,
    query_offset: int | jax.Array | jax.ShapeDtypeStruct = 0,
    logits_soft_cap: float | None = None,
    sinks: jax.Array | jax.ShapeDtypeStruct | None = None,
    dropout: Dropout | None = None,
    precision: jax.lax.PrecisionLike = None,
    layout: str = "BTNH",
    sharding: AttentionSharding | None = None,
    tiles: Tiles | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> AttentionExplanation:
    """What `dot_product_attention` would do with the same arguments; nothing is computed.

    Which implementation runs and why not the others, tiles, VMEM, sharding. It holds for the TPU
    that is there, or for a generation whose mesh is set, on any machine:
    `with jax.set_mesh(aot.topology_mesh("v5e", {"data": 4})):`.

    Args:
      query: As `dot_product_attention`'s, like all others. In the place of every array a
        `jax.ShapeDtypeStruct` does as well.
      key: Likewise.
      value: Likewise.
      bias: Likewise.
      mask: Likewise.
      scale: Likewise.
      is_causal: Likewise.
      query_seq_lengths: Likewise.
      key_value_seq_lengths: Likewise.
      local_window_size: Likewise.
      segment_ids: Likewise.
      positions: Likewise.
      query_offset: Likewise.
      logits_soft_cap: Likewise.
      sinks: Likewise.
      dropout: Likewise.
      precision: Likewise.
      layout: Likewise.
      sharding: Likewise.
      tiles: Likewise.
      implementation: Likewise; one that cannot take the call does not raise here.
      return_residual: Likewise.

    Returns:
      An `AttentionExplanation`.

    Raises:
      ValueError: An argument is wrong; the text names it.
      NotImplementedError: Arrays that are sharded along the sequence or the head size.

    >>> query = jax.ShapeDtypeStruct((2, 1000, 8, 64), "bfloat16")
    >>> key = jax.ShapeDtypeStruct((2, 1000, 2, 64), "bfloat16")
    >>> explanation = explain_attention(query, key, key, is_causal=True)
    >>> explanation.on_tpu, explanation.elsewhere
    ('pallas', 'xla')
    >>> print(explain_attention(query, key, key, implementation="xla"))
    on TPU: xla; elsewhere: xla
      not pallas: implementation="xla" was asked for
      not reference: implementation="xla" was asked for
    TPU generation: not known: for all of them
    mesh: none, or one device
    one device: query [2, 8, 1000, 64], key [2, 2, 1000, 64]
    """
    checked = {
        "query": query,
        "key": key,
        "value": value,
        "bias": bias,
        "mask": mask,
        "scale": scale,
        "is_causal": is_causal,
        "query_seq_lengths": query_seq_lengths,
        "key_value_seq_lengths": key_value_seq_lengths,
        "local_window_size": local_window_size,
        "segment_ids": segment_ids,
        "positions": positions,
        "query_offset": query_offset,
        "logits_soft_cap": logits_soft_cap,
        "sinks": sinks,
        "dropout": dropout,
        "layout": layout,
    }
    input_checks.check_flag(return_residual, "return_residual")
    choice.check_wish(implementation, tiles)
    explanations = []

    def trace(arguments):
        call = input_checks.check_attention(**arguments)
        axes = sharding_lib.placement(call, sharding)

        def on_each_device(*arrays):
            chosen = choice.choose(*arrays, tiles=tiles, implementation=implementation)
            explanations.append(_explanation(chosen, implementation, axes, *arrays[:2]))
            return nothing(*arrays)

        return sharding_lib.place(on_each_device, call, sharding)

    _trace_with_abstract_leaves(trace, checked)
    return explanations[0]


def _trace_with_abstract_leaves(fn, tree) -> None:
    """Traces `fn(tree)`, with arrays of no values for each `jax.ShapeDtypeStruct` in the tree.

    What is known stays known: static values may decide what runs.
    """
    leaves, structure = jax.tree.flatten(tree)
    abstract = {i: leaf for i, leaf in enumerate(leaves) if isinstance(leaf, jax.ShapeDtypeStruct)}

    def with_arrays(arrays: dict[int, Any]):
        filled = [arrays.get(i, leaf) for i, leaf in enumerate(leaves)]
        return fn(jax.tree.unflatten(structure, filled))

    jax.eval_shape(with_arrays, abstract)


def _explanation(
    chosen: choice.Choice,
    implementation: str | None,
    axes: sharding_lib.Placement | None,
    query: jax.Array,
    key: jax.Array,
) -> AttentionExplanation:
    plan = chosen.plan
    raises = implementation is not None and bool(chosen.reasons.get(implementation))
    is_empty = query.shape[0] == 0
    on_tpu = None if raises or is_empty else chosen.on_tpu
    reasons = {}
    for name in choice.IMPLEMENTATIONS:
        if name == on_tpu:
            continue
        if is_empty:
            reasons[name] = "the batch is empty"
        elif chosen.reasons.get(name):
            reasons[name] = "; ".join(chosen.reasons[name])
        elif implementation is not None:
            reasons[name] = f'implementation="{implementation}" was asked for'
        else:
            reasons[name] = f"{on_tpu} takes the call and comes first"
    tiles = plan.tiles if on_tpu == "pallas" else None
    forward_bytes = backward_bytes = None
    if tiles is not None and plan.shape is not None:
        kernels_see = (tiles, plan.shape, plan.group * key.shape[1], plan.group)
        heads = tiles_lib.forward_heads(*kernels_see)
        forward_bytes = tiles_lib.forward_vmem_bytes(tiles, plan.shape, heads)
        heads = tiles_lib.backward_heads(*kernels_see)
        keys = tiles_lib.backward_keys_in_vmem(tiles, plan.shape, plan.group)
        backward_bytes = tiles_lib.backward_vmem_bytes(tiles, plan.shape, keys, heads)
    split = () if axes is None else axes.batch + axes.heads
    return AttentionExplanation(
        on_tpu=on_tpu,
        elsewhere=None if raises or is_empty else chosen.elsewhere,
        reasons=reasons,
        device_kind=tiles_lib.tpu_kind(),
        batch_axes=axes and axes.batch,
        head_axes=axes and axes.heads,
        replicated_axes=axes and tuple(name for name in axes.free if name not in split),
        query_shape=query.shape,
        key_shape=key.shape,
        is_folded=on_tpu == "pallas" and plan.is_folded,
        tiles=tiles,
        forward_vmem_bytes=forward_bytes,
        backward_vmem_bytes=backward_bytes,
        vmem_bytes=tiles_lib.vmem_limit_bytes(),
    )
