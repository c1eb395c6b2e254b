"""The devices of a run: one mesh axis, `data`, over all local ones."""

import os

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from train.config import InputError


def data_mesh(batch_size: int) -> Mesh:
    """A mesh over all local devices, each with an equal share of every batch.

    Args:
      batch_size: Rows per batch.

    Raises:
      InputError: The devices do not divide the batch.
    """
    devices = jax.local_devices()
    if batch_size % len(devices):
        lower = batch_size // len(devices) * len(devices)
        raise InputError(
            f"batch_size={batch_size} does not divide among the {len(devices)} devices here; "
            f"choose a multiple of {len(devices)}, such as {max(lower, len(devices))}."
        )
    return jax.make_mesh((len(devices),), ("data",), (AxisType.Auto,), devices=devices)


def replicated(mesh: Mesh) -> NamedSharding:
    """The whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_row(mesh: Mesh) -> NamedSharding:
    """Rows split among the devices."""
    return NamedSharding(mesh, PartitionSpec("data"))


def quiet_libtpu() -> None:
    """Keeps libtpu, where it is installed and there is no TPU, from printing what it misses.

    Importing jax has found no TPU where it has told libtpu not to ask for the metadata of one.
    """
    if os.environ.get("TPU_SKIP_MDS_QUERY") == "1":
        os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
        os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
