"""Compile for a TPU on a machine without one: errors, memory and kernels.

The libtpu wheel (``pip install "jax[tpu]"``) holds the whole TPU compiler, Mosaic included, and compiles
for any TPU generation without a TPU being there. What it refuses here it would refuse on the device.
"""

import collections
import dataclasses
import functools
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

TOPOLOGIES: Mapping[str, str] = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""The smallest whole host of each TPU generation. Every ``topology`` argument takes these short names too."""

_KERNEL = re.compile(r'%?([\w.-]+) = .*custom_call_target="tpu_custom_call"')
_COLLECTIVE = re.compile(
    r" (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all|reduce-scatter)"
    r"(?:-start)?\("
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuProgram:
    """A program compiled for one topology. All sizes are bytes per device."""

    topology: str
    device_kind: str
    device_count: int
    compiled: jax.stages.Compiled = dataclasses.field(repr=False)
    hlo_text: str = dataclasses.field(repr=False)
    argument_bytes: int
    output_bytes: int
    alias_bytes: int
    temporary_bytes: int
    kernels: tuple[str, ...]
    collectives: Mapping[str, int]

    @property
    def total_bytes(self) -> int:
        """What the program holds at once: arguments, outputs and temporaries, aliased memory once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def topology_devices(topology: str = "v5e:2x2") -> tuple[jax.Device, ...]:
    """The devices of a TPU topology: they can be compiled for, but hold no arrays.

    Args:
      topology: generation and chips along each axis, such as ``"v5e:16x16"``, or a key of `TOPOLOGIES`.

    Returns:
      One device per chip; on tpu7x one per core, two to a chip.

    Raises:
      NotImplementedError: libtpu is not installed.
      ValueError: libtpu knows no such topology.
    """
    return _topology_devices(TOPOLOGIES.get(topology, topology))


@functools.cache
def _topology_devices(topology: str) -> tuple[jax.Device, ...]:
    _prepare_libtpu()
    # On v4 a program sees a chip's two cores as one device, as on a real host. On the others that is the default.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    try:
        description = topologies.get_topology_desc(topology, "tpu", **options)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology={topology!r} is not one that libtpu knows. Expected one of {', '.join(TOPOLOGIES)}, "
            f"or a generation and its chips along each axis, such as {', '.join(TOPOLOGIES.values())}, "
            f"v5e:16x16 or v5p:8x8x8. libtpu says: {error}"
        ) from error
    except RuntimeError as error:
        raise NotImplementedError(
            f"Compiling for topology={topology!r} needs libtpu, which is not installed. "
            'Install it with: pip install "jax[tpu]" (Linux on x86-64 only)'
        ) from error
    return tuple(description.devices)


def _prepare_libtpu() -> None:
    """Sets what libtpu reads once, when it loads, on a machine without a TPU; on one with a TPU nothing."""
    if (
        os.environ.get("TPU_SKIP_MDS_QUERY") != "1"
    ):  # jax sets it on import when it finds no TPU chip
        return
    os.environ.setdefault(
        "ALLOW_MULTIPLE_LIBTPU_LOAD", "1"
    )  # else a second process aborts on a lock
    # Without these two, libtpu writes an error about a missing TPU host to stderr, and goes on.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")


def topology_mesh(
    topology: str,
    axis_sizes: Mapping[str, int],
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
) -> Mesh:
    """A mesh over devices of a TPU topology, for shardings and for `compile_for_tpu`.

    Args:
      topology: as in `topology_devices`.
      axis_sizes: size of each named axis, such as ``{"data": 2, "tensor": 2}``.
      axis_types: one type for all axes, or one for each.

    Returns:
      A mesh over the first ``product(axis_sizes)`` devices of the topology.

    Raises:
      ValueError: the topology has fewer devices than the mesh needs.
    """
    devices = topology_devices(topology)
    size = math.prod(axis_sizes.values())
    if size > len(devices):
        raise ValueError(
            f"A mesh of {dict(axis_sizes)} needs {size} devices and topology={topology!r} has {len(devices)}. "
            "Name a larger topology, such as v5e:16x16."
        )
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(axis_sizes)
    grid = np.array(devices[:size]).reshape(tuple(axis_sizes.values()))
    return Mesh(grid, tuple(axis_sizes), axis_types=tuple(axis_types))


def compile_for_tpu(
    fn: Callable[..., Any],
    *args: Any,
    topology: str = "v5e:2x2",
    mesh: Mesh | AbstractMesh | None = None,
) -> TpuProgram:
    """Compiles ``fn(*args)`` for a TPU, without one.

    Args:
      fn: a function, or one that `jax.jit` returned, whose donation and static arguments hold.
      *args: its arguments; arrays and `jax.ShapeDtypeStruct` mean the same, only shape, dtype and sharding
        are looked at. A sharding (a `jax.NamedSharding` on any mesh, or a bare `jax.P` in a
        `jax.ShapeDtypeStruct`) is applied to the mesh compiled for, by the names of its axes.
      topology: what to compile for: ``"v5e:2x2"``, ``"v5p:8x8x8"``, or a key of `TOPOLOGIES`.
      mesh: names, sizes and types of mesh axes; set (`jax.set_mesh`) while tracing, with devices of the
        topology in place of its own. None compiles for one device.

    Returns:
      The compiled program, its memory per device, its Mosaic kernels and its collectives.

    Raises:
      NotImplementedError: libtpu is not installed.
      ValueError: unknown topology, or a mesh larger than it.
      Exception: what tracing, Mosaic or XLA raise, with the function and the topology added as a note.

    >>> from flax_pallas_attn import aot
    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> program = aot.compile_for_tpu(jax.jit(lambda x: x + 1, donate_argnums=0), x)  # doctest: +SKIP
    >>> program.argument_bytes, program.alias_bytes, program.temporary_bytes  # doctest: +SKIP
    (262144, 262144, 0)
    """
    placed_mesh = _place_mesh(topology, mesh)
    device_kind = placed_mesh.devices.flat[0].device_kind
    try:
        with jax.set_mesh(placed_mesh):
            compiled = _lower(fn, args).compile()
    except Exception as error:
        error.add_note(f"while compiling {_name(fn)} for topology {topology} ({device_kind})")
        raise
    memory = compiled.memory_analysis()
    hlo_text = compiled.as_text()
    return TpuProgram(
        topology=topology,
        device_kind=device_kind,
        device_count=placed_mesh.size,
        compiled=compiled,
        hlo_text=hlo_text,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=tuple(re.sub(r"\.\d+$", "", name) for name in _KERNEL.findall(hlo_text)),
        collectives=dict(collections.Counter(_COLLECTIVE.findall(hlo_text))),
    )


def _place_mesh(topology: str, mesh: Mesh | AbstractMesh | None) -> Mesh:
    if mesh is None:
        return topology_mesh(topology, {"device": 1})
    return topology_mesh(topology, dict(mesh.shape), axis_types=mesh.axis_types)


def _lower(fn: Callable[..., Any], args: Sequence[Any]) -> jax.stages.Lowered:
    """Lowers for TPU, under the mesh that is set: the device, and what Pallas asks for, come from it."""
    jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
    traced = jitted.trace(*jax.tree.map(_abstract, tuple(args)))
    return traced.lower(lowering_platforms=("tpu",))


def _abstract(leaf: Any) -> Any:
    """Replaces an array's devices by the mesh that is set: its sharding keeps the names of the axes alone."""
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf  # a number, a numpy array or a static argument
    spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else None
    weak_type = getattr(leaf, "weak_type", False)  # an array of random keys has none
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=spec, weak_type=weak_type)


def _name(fn: Callable[..., Any]) -> str:
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", repr(fn))
