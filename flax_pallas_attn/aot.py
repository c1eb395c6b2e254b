"""Compile for a TPU on a machine without one: errors, memory, kernels, kernel cycles.

The libtpu wheel (`pip install "jax[tpu]"`) holds the whole TPU compiler, Mosaic included, and
compiles for every TPU generation without a TPU being there. What it refuses here it would refuse
on the device. From the shell: `python -m flax_pallas_attn.aot --help`.
"""

import collections
import dataclasses
import functools
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.export
import numpy as np
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding

from flax_pallas_attn.tpu_profile import OperationProfile, profile_flags, read_profiles

TOPOLOGIES: Mapping[str, str] = {
    "v4": "v4:2x2x1",
    "v5e": "v5e:2x2",
    "v5p": "v5p:2x2x1",
    "v6e": "v6e:2x2",
    "tpu7x": "tpu7x:2x2x1",
}
"""One small topology for each TPU generation. A `topology` argument takes these short names too."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TpuProgram:
    """A program compiled for one topology. Sizes are bytes per device.

    Attributes:
      topology: What it was compiled for, as the caller named it.
      device_kind: What jax calls such a device, `"TPU v5 lite"` for v5e.
      device_count: How many devices run it.
      compiled: Jax's compiled program: analyses, shardings and layouts. It cannot be called here.
      hlo_text: The optimised and scheduled program.
      argument_bytes: Arguments, padding of their layout included.
      output_bytes: Outputs, those included that take the memory of a donated argument.
      alias_bytes: Outputs that take the memory of a donated argument.
      temporary_bytes: What the program holds besides, at its peak, in HBM.
      kernels: Names of its Mosaic (Pallas) kernels, in the program's order, one for each call.
      collectives: How often each collective stands in it, such as `{"all-gather": 2}`.
    """

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
        """Arguments, outputs and temporaries together, memory that is shared counted once."""
        return self.argument_bytes + self.output_bytes - self.alias_bytes + self.temporary_bytes


def topology_mesh(
    topology: str,
    axis_sizes: Mapping[str, int],
    *,
    axis_types: AxisType | Sequence[AxisType] = AxisType.Auto,
) -> Mesh:
    """A mesh of TPU devices that are not there: they can be compiled for, but hold no arrays.

    Args:
      topology: Generation and chips along each axis, `"v5p:8x8x8"`, or a key of `TOPOLOGIES`. A
        device is a chip; on tpu7x one of a chip's two cores.
      axis_sizes: Size of each named axis, `{"data": 2, "tensor": 2}`.
      axis_types: One type for all axes, or one for each.

    Returns:
      A mesh over the first devices of the topology, as many as the axes need.

    Raises:
      NotImplementedError: Libtpu is not installed.
      ValueError: Libtpu knows no such topology, or it has fewer devices than the axes need.
    """
    devices = _topology_devices(TOPOLOGIES.get(topology, topology))
    size = math.prod(axis_sizes.values())
    if size > len(devices):
        raise ValueError(
            f"A mesh of {dict(axis_sizes)} needs {size} devices, and topology={topology!r} has "
            f"{len(devices)}. Name a larger topology, such as v5e:16x16 (256 devices)."
        )
    if isinstance(axis_types, AxisType):
        axis_types = (axis_types,) * len(axis_sizes)
    grid = devices[:size].reshape(tuple(axis_sizes.values()))
    return Mesh(grid, tuple(axis_sizes), axis_types=tuple(axis_types))


def compile_for_tpu(
    fn: Callable[..., Any],
    *args: Any,
    topology: str = "v5e:2x2",
    mesh: Mesh | AbstractMesh | None = None,
) -> TpuProgram:
    """Compiles `fn(*args)` for a TPU, without one.

    Args:
      fn: A function, or what `jax.jit` made of one: its donation and static arguments hold.
      *args: What to call it with. Of an array only shape, dtype and sharding matter, so that a
        `jax.ShapeDtypeStruct` does as well. A sharding, be it a `NamedSharding` on any mesh or a
        `PartitionSpec` in a `ShapeDtypeStruct`, names axes of the mesh compiled for.
      topology: What to compile for: `"v5e:2x2"`, `"v5p:8x8x8"`, or a key of `TOPOLOGIES`.
      mesh: Names, sizes and types of the mesh's axes. While `fn` is traced it is the mesh that is
        set, over devices of the topology instead of its own. None: one device.

    Returns:
      The compiled program, its memory per device, its kernels and its collectives.

    Raises:
      NotImplementedError: Libtpu is not installed.
      ValueError: Unknown topology, or fewer devices in it than in the mesh.
      Exception: What tracing, Mosaic or XLA raise, with a note that names function and topology.

    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> increment = jax.jit(lambda x: x + 1, donate_argnums=0)
    >>> program = compile_for_tpu(increment, x)
    >>> program.argument_bytes, program.alias_bytes, program.temporary_bytes
    (262144, 262144, 0)
    """
    tpu_mesh = _mesh_on(topology, mesh)
    device_kind = tpu_mesh.devices.flat[0].device_kind
    try:
        with jax.set_mesh(tpu_mesh):
            traced = _jit(fn).trace(*jax.tree.map(_without_devices, args))
            compiled = traced.lower(lowering_platforms=("tpu",)).compile()
    except Exception as error:
        error.add_note(f"While compiling {function_name(fn)} for {topology} ({device_kind}).")
        raise
    memory = compiled.memory_analysis()
    hlo_text = compiled.as_text()
    # op_name="jit(step)/transpose(jvp(flash))/pallas_call": the name is inside what transformed it.
    kernels = re.findall(
        r'custom_call_target="tpu_custom_call".*\bop_name="(?:[^"]*[/(])?([^"/()]+)\)*/[^"/]+"',
        hlo_text,
    )
    collectives = re.findall(
        r" (all-gather|all-reduce|all-to-all|collective-permute|ragged-all-to-all|reduce-scatter)"
        r"(?:-start)?\(",
        hlo_text,
    )
    return TpuProgram(
        topology=topology,
        device_kind=device_kind,
        device_count=tpu_mesh.size,
        compiled=compiled,
        hlo_text=hlo_text,
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        alias_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        kernels=tuple(kernels),
        collectives=dict(collections.Counter(collectives)),
    )


def estimate_cycles(
    fn: Callable[..., Any], *args: Any, topology: str = "v5e:2x2"
) -> dict[str, int]:
    """Simulates `fn(*args)` on one TPU device, without one, and counts cycles.

    Libtpu walks through the final instruction schedule of each operation, its loops and its waits
    for DMA included. The same program gives the same figure on any machine, however busy, which
    is good for comparing kernels; `benchmarks/calibration.md` says how far it is off against
    hardware. Prefetches between operations count as zero, and so does work that depends on a value
    loaded from an input, such as a length in scalar memory.

    Args:
      fn: A function, or what `jax.jit` made of one: its donation holds.
      *args: Arrays or `jax.ShapeDtypeStruct`, in any pytree; their shardings do not matter.
      topology: As in `compile_for_tpu`.

    Returns:
      Cycles of each operation of the compiled program. Equal operations stand under the name of
      the first, with the sum of their cycles; what is in a loop's body counts once.

    Raises:
      NotImplementedError: Libtpu or flatbuffers is not installed, or the topology is v4.
      ValueError: Unknown topology, an argument that is not an array, or `fn` from `nnx.jit`.
      RuntimeError: The program does not compile, or libtpu's simulation of it crashed.

    >>> x = jax.ShapeDtypeStruct((256, 256), "float32")
    >>> cycles = estimate_cycles(lambda x: x @ x, x)
    >>> 1000 < sum(cycles.values()) < 10000
    True
    """
    profiles = simulate(fn, args, topology, units=False)
    return {operation.name: operation.cycles for operation in profiles}


def profile_for_tpu(
    fn: Callable[..., Any], *args: Any, topology: str = "v5e:2x2"
) -> tuple[OperationProfile, ...]:
    """As `estimate_cycles`, and says how much of each unit the cycles use, and what they wait.

    Needs about 500 bytes for each cycle in the directory for temporary files.

    Args:
      fn: As there.
      *args: As there.
      topology: As there.

    Returns:
      One profile for each operation of the compiled program.

    Raises:
      NotImplementedError: As there.
      ValueError: As there.
      RuntimeError: As there.

    >>> x = jax.ShapeDtypeStruct((1024, 1024), "bfloat16")
    >>> (product,) = profile_for_tpu(jax.numpy.matmul, x, x)
    >>> product.bound_by
    'MXU'
    """
    return simulate(fn, args, topology, units=True)


def simulate(
    fn: Callable[..., Any], args: Sequence[Any], topology: str, *, units: bool
) -> tuple[OperationProfile, ...]:
    """What `estimate_cycles` (without units) and `profile_for_tpu` (with them) do."""
    if not has_cycles(topology):
        raise NotImplementedError(
            f"estimate_cycles got topology={topology!r}: libtpu simulates v5e and later, not v4. "
            "Compare on another topology, such as v5p, and use compile_for_tpu for v4."
        )
    program, donated = export(fn, args, topology)
    # Libtpu reads where to write its profiles when it loads, hence a process of its own.
    with tempfile.TemporaryDirectory() as directory:
        flags = profile_flags(Path(directory), units=units)
        environment = {
            **os.environ,
            "JAX_ENABLE_COMPILATION_CACHE": "false",  # what is not compiled is not profiled
            "JAX_PLATFORMS": "cpu",
            "LIBTPU_INIT_ARGS": f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {flags}",
            "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
        }
        call = f"aot._compile_exported({topology!r}, {donated!r})"
        child = subprocess.run(
            [sys.executable, "-c", f"from flax_pallas_attn import aot; {call}"],
            input=program,
            env=environment,
            capture_output=True,
            check=False,
        )
        if child.returncode:
            raise RuntimeError(
                f"Simulating {function_name(fn)} on {topology} failed, exit code "
                f"{child.returncode}. Where compile_for_tpu accepts the same call, the program is "
                "right and libtpu fails to simulate it: change it slightly. The process said:\n"
                + _fatal_message(child.stderr.decode(errors="replace"))
            )
        return read_profiles(Path(directory))


def has_cycles(topology: str) -> bool:
    """Whether libtpu has a model of the generation's memory transfers to simulate with."""
    return topology.partition(":")[0] != "v4"


def export(fn: Callable[..., Any], args: Sequence[Any], topology: str) -> tuple[bytes, list[int]]:
    """Lowers for one device of the topology: the program, and which leaves of `args` it may reuse.

    The same program is the same bytes, but for the places in the source that it came from.

    The program takes and returns leaves, since jax.export cannot write down a caller's own pytree
    types; nor does it keep donation.
    """
    leaves, structure = jax.tree.flatten(jax.tree.map(_without_devices, args))
    for leaf in leaves:
        if not isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"estimate_cycles got the argument {leaf!r}, which is not an array. "
                "Bind it with functools.partial(fn, ...) before jax.jit."
            )
    leaves = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]  # no sharding

    with jax.set_mesh(_mesh_on(topology, None)):
        jitted = _jit(fn)
        traced = jitted.trace(*jax.tree.unflatten(structure, leaves))
        if not isinstance(traced, jax.stages.Traced):
            raise ValueError(
                f"estimate_cycles got fn={fn!r}, which jax.jit did not make. "
                "Give it the function inside: a module is a pytree, and an argument like any."
            )
        donated = [i for i, leaf in enumerate(jax.tree.leaves(traced.args_info)) if leaf.donated]

        def on_leaves(*leaves: jax.Array) -> list[jax.Array]:
            return jax.tree.leaves(jitted(*jax.tree.unflatten(structure, leaves)))

        exported = jax.export.export(jax.jit(on_leaves), platforms=["tpu"])(*leaves)
    try:
        return bytes(exported.serialize()), donated
    except ImportError as error:
        raise NotImplementedError(
            "estimate_cycles needs flatbuffers to hand the program to another process. "
            "Install it with: pip install flatbuffers"
        ) from error


def _compile_exported(topology: str, donated: Sequence[int]) -> None:
    """What the process of `estimate_cycles` does: compiles the program on its standard input."""
    exported = jax.export.deserialize(bytearray(sys.stdin.buffer.read()))
    leaves = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in exported.in_avals]
    compile_for_tpu(jax.jit(exported.call, donate_argnums=donated), *leaves, topology=topology)


def _fatal_message(stderr: str) -> str:
    """What libtpu says before it aborts, without its stack traces, or the exception that Python
    ends with; else the end of the text."""
    fatal = re.search(
        r"^F\d{4} .*?\] (.*?)\n(?:\n|=== Source|\*\*\* Check)", stderr, re.DOTALL | re.MULTILINE
    )
    if fatal:
        return fatal.group(1)
    exceptions = list(re.finditer(r"^[\w.]+(?:Error|Exception): ", stderr, re.MULTILINE))
    return stderr[exceptions[-1].start() :][:4000] if exceptions else stderr[-4000:]


@functools.cache
def _topology_devices(topology: str) -> np.ndarray:
    # jax sets TPU_SKIP_MDS_QUERY on import where it finds no TPU. Only there is it for us to say
    # what libtpu reads when it loads: that another process may have loaded it too (otherwise it
    # aborts), and a host to be on (otherwise it writes an error to stderr and goes on).
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    # A program on v4 sees the two cores of a chip as one device, as it does on a v4 host.
    options = {"chip_config_name": "megacore"} if topology.startswith("v4:") else {}
    try:
        return np.array(topologies.get_topology_desc(topology, "tpu", **options).devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology={topology!r} is none that libtpu knows. Expected one of "
            f"{', '.join(TOPOLOGIES)}, or a generation and its chips along each axis: "
            f"{', '.join(TOPOLOGIES.values())}, v5e:16x16, v5p:8x8x8. Libtpu says: {error}"
        ) from error
    except RuntimeError as error:
        raise NotImplementedError(
            f"Compiling for topology={topology!r} needs libtpu, which is not installed. "
            'Install it with: pip install "jax[tpu]" (on Linux, x86-64).'
        ) from error


def _mesh_on(topology: str, mesh: Mesh | AbstractMesh | None) -> Mesh:
    """The same axes over devices of the topology; one device without a mesh."""
    if mesh is None:
        return topology_mesh(topology, {"device": 1})
    return topology_mesh(topology, mesh.shape, axis_types=mesh.axis_types)


def _jit(fn: Callable[..., Any]) -> Any:
    return fn if hasattr(fn, "trace") else jax.jit(fn)


def _without_devices(leaf: Any) -> Any:
    """An array's shape, dtype and partition; the mesh that is set says on which devices."""
    if isinstance(leaf, np.ndarray):
        return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))
    if not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return leaf  # a number or a static argument
    return jax.ShapeDtypeStruct(
        leaf.shape,
        leaf.dtype,
        sharding=leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else None,
        weak_type=getattr(leaf, "weak_type", False),  # an array of random keys has none
    )


def function_name(fn: Callable[..., Any]) -> str:
    """What a function is called, under any `functools.partial`."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    return getattr(fn, "__qualname__", repr(fn))


if __name__ == "__main__":
    from flax_pallas_attn.aot_cli import run

    run()
