"""Places attention on a mesh: XLA cannot partition a kernel, so `shard_map` goes around it.

Which mesh axes split what: on Explicit axes the arrays' own types say it, on Auto axes the rules
below do, on Manual axes (a caller's own `shard_map`) it has been done.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from flax_pallas_attn.input_checks import Call
from flax_pallas_attn.masking import Positions, SegmentIds

AxisNames = str | tuple[str, ...] | None

BATCH_AXES = ("data", "fsdp")
HEAD_AXES = ("tensor",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSharding:
    """Says which mesh axes split the batch and the heads, instead of the package's rules.

    Attributes:
      batch: Mesh axes that split the batch.
      heads: Mesh axes that split the heads.
      sequence: Mesh axes that split the sequence; not supported yet, must be None.
      mesh: The mesh; None is the one that `jax.set_mesh` has set.
    """

    batch: AxisNames = BATCH_AXES
    heads: AxisNames = HEAD_AXES
    sequence: AxisNames = None
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None

    def __post_init__(self):
        for name in ("batch", "heads"):
            axes = getattr(self, name)
            names = axes if isinstance(axes, tuple) else (axes,)
            if axes is not None and not all(isinstance(axis, str) for axis in names):
                raise ValueError(
                    f"AttentionSharding.{name}={axes!r} must be the name of a mesh axis, a tuple "
                    "of names, or None."
                )
        if twice := set(_names(self.batch)) & set(_names(self.heads)):
            raise ValueError(
                f"AttentionSharding.batch={self.batch!r} and heads={self.heads!r} both name "
                f"{sorted(twice)}; a mesh axis splits one of them."
            )
        if self.sequence is not None:
            raise NotImplementedError(
                f"AttentionSharding.sequence={self.sequence!r}: splitting the sequence over "
                "devices is not supported yet; leave it None and split batch and heads."
            )


Attend = Callable[..., tuple[jax.Array, jax.Array]]


def check_sharding(sharding) -> None:
    """Raises `ValueError` for what is neither an `AttentionSharding` nor None."""
    if not isinstance(sharding, AttentionSharding | None):
        raise ValueError(
            f"sharding={sharding!r} must be AttentionSharding(batch=..., heads=...), or None for "
            "the package's rules."
        )


def place(attend: Attend, call: Call, sharding: AttentionSharding | None) -> tuple:
    """Calls `attend(query, key, value, mask, logits)`, inside a `shard_map` where there is a mesh.

    Args:
      attend: Sees each device's share.
      call: Heads-first arrays.
      sharding: The caller's wish, or None for the rules.

    Raises:
      ValueError: A mesh axis that does not divide the heads, or is not in the mesh; `sharding` is
        of another type.
      NotImplementedError: Arrays that are sharded along the sequence or the head size.
    """
    arrays = (call.query, call.key, call.value, call.mask, call.logits)
    axes = placement(call, sharding)
    if axes is None:
        return attend(*arrays)
    mesh = axes.mesh
    batch, heads = axes.batch or None, axes.heads or None
    size = math.prod(mesh.shape[name] for name in axes.heads)
    kv_heads = call.key.shape[1]
    shares_kv = kv_heads % size != 0  # fewer key heads than devices along the axis

    def on_each_device(query, key, value, mask, logits):
        if logits.dropout_seed is not None and not logits.dropout_broadcast:
            logits = dataclasses.replace(
                logits,
                first_batch=_share_index(axes.batch, mesh) * query.shape[0],
                first_head=_share_index(axes.heads, mesh) * query.shape[1],
            )
        if shares_kv:
            head = _share_index(axes.heads, mesh) * kv_heads // size
            key, value = (jax.lax.dynamic_slice_in_dim(x, head, 1, axis=1) for x in (key, value))
        return attend(query, key, value, mask, logits)

    def dense_spec(x):
        if x is None:
            return None
        return P(batch if x.shape[0] > 1 else None, heads if x.shape[1] > 1 else None)

    per_token: Any = P(batch)  # stands where an array will
    mask, logits = call.mask, call.logits
    specs = (
        P(batch, heads),
        P(batch, None if shares_kv else heads),
        P(batch, None if shares_kv else heads),
        dataclasses.replace(
            mask,
            segment_ids=mask.segment_ids and SegmentIds(per_token, per_token),
            positions=mask.positions and Positions(per_token, per_token),
            dense=dense_spec(mask.dense),
        ),
        dataclasses.replace(
            logits,
            bias=dense_spec(logits.bias),
            slopes=None if logits.slopes is None else P(heads),
            sinks=None if logits.sinks is None else P(heads),
            dropout_seed=None if logits.dropout_seed is None else P(),
        ),
    )
    if any(kind == AxisType.Explicit for kind in _axis_types(mesh).values()):
        arrays = jax.tree.map(jax.sharding.reshard, arrays, specs)
    return jax.shard_map(
        on_each_device,
        mesh=mesh,
        in_specs=specs,
        out_specs=(P(batch, heads), P(batch, heads)),
        axis_names=set(axes.free),
    )(*arrays)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Which mesh axes split a call.

    Attributes:
      mesh: Whose axes they are.
      batch: Those that split the batch.
      heads: Those that split the heads.
      free: All that are not Manual: over those that split nothing the work is repeated.
    """

    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
    batch: tuple[str, ...]
    heads: tuple[str, ...]
    free: tuple[str, ...]


def placement(call: Call, sharding: AttentionSharding | None) -> Placement | None:
    """How `place` places a call; None where there is no mesh. Arguments and errors as there."""
    check_sharding(sharding)
    mesh = sharding.mesh if sharding and sharding.mesh else jax.sharding.get_abstract_mesh()
    free = tuple(name for name, kind in _axis_types(mesh).items() if kind != AxisType.Manual)
    if math.prod(mesh.shape[name] for name in free) == 1:
        return None
    batch, heads = _split_axes(call, sharding, mesh)
    return Placement(mesh=mesh, batch=batch, heads=heads, free=free)


def _split_axes(
    call: Call, sharding: AttentionSharding | None, mesh
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The axes that split the batch, and those that split the heads."""
    batch, heads = call.query.shape[:2]
    kv_heads = call.key.shape[1]
    types = _axis_types(mesh)
    wish = sharding or AttentionSharding()
    if sharding is not None:
        asked = set(_names(wish.batch) + _names(wish.heads)) - {*BATCH_AXES, *HEAD_AXES}
        if unknown := sorted(asked - set(types)):
            raise ValueError(
                f"sharding names the axes {unknown}; the mesh {dict(mesh.shape)} has none of that "
                "name."
            )
    batch_axes = [n for n in _names(wish.batch) if types.get(n) == AxisType.Auto]
    head_axes = [n for n in _names(wish.heads) if types.get(n) == AxisType.Auto]
    spec = _explicit_spec(call.query)
    for part, name in ((spec[2], "sequence"), (spec[3], "head size")):
        if part:
            raise NotImplementedError(
                f"query is sharded along its {name} over {part}; reshard it so that only batch "
                "and heads are, e.g. jax.sharding.reshard(query, P('data', None, 'tensor', None))."
            )
    batch_axes, head_axes = [*spec[0], *batch_axes], [*spec[1], *head_axes]

    split, share = [], batch
    for name in batch_axes:  # an axis that does not divide what is left is replicated over
        if share % mesh.shape[name] == 0:
            split.append(name)
            share //= mesh.shape[name]
    size = math.prod(mesh.shape[name] for name in head_axes)
    if heads % size:
        raise ValueError(
            f"query has {heads} heads, which the mesh axes {head_axes} of size {size} do not "
            f"divide. Choose a number of heads that is a multiple of {size}, a smaller axis, or "
            "AttentionSharding(heads=None) to compute all heads on each device."
        )
    if kv_heads % size and size % kv_heads:
        raise ValueError(
            f"key has {kv_heads} heads and the mesh axes {head_axes} have size {size}: one must "
            "divide the other, so that each device holds whole key heads or shares one with its "
            "neighbours."
        )
    return tuple(split), tuple(head_axes)


def _explicit_spec(x: jax.Array) -> list[tuple[str, ...]]:
    """The Explicit mesh axes along each axis of `x`, from its type."""
    spec = jax.typeof(x).sharding.spec
    return [_names(part) for part in [*spec, *[None] * (x.ndim - len(spec))]]


def _axis_types(mesh) -> dict[str, AxisType]:
    return dict(zip(mesh.axis_names, mesh.axis_types, strict=True))


def _names(axes) -> tuple[str, ...]:
    return () if axes is None else (axes,) if isinstance(axes, str) else tuple(axes)


def _share_index(names: tuple[str, ...], mesh) -> jax.Array | int:
    """Which share of what `names` split this device holds."""
    return functools.reduce(
        lambda index, name: index * mesh.shape[name] + jax.lax.axis_index(name), names, 0
    )


def vary_alike(tree):
    """Gives all leaves the same varying axes, inside a `shard_map` that checks them.

    Loops and kernels want operands of one type, and the transpose of this cast is the sum over
    devices that the gradient of a replicated input needs.
    """
    axes = frozenset().union(*(_varying(x) for x in jax.tree.leaves(tree)))
    return jax.tree.map(lambda x: jax.lax.pcast(x, tuple(axes - _varying(x)), to="varying"), tree)


def _varying(x) -> frozenset:
    return jax.typeof(x).manual_axis_type.varying
