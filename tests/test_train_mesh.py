"""The mesh: all local devices, and batches that they divide."""

import jax
import numpy as np
import pytest

from train.config import InputError
from train.mesh import by_row, data_mesh, replicated


def test_rows_are_split_and_parameters_are_whole():
    mesh = data_mesh(16)
    assert mesh.shape == {"data": 8}
    rows = jax.device_put(np.zeros((16, 3)), by_row(mesh))
    assert {shard.data.shape for shard in rows.addressable_shards} == {(2, 3)}
    whole = jax.device_put(np.zeros((16, 3)), replicated(mesh))
    assert {shard.data.shape for shard in whole.addressable_shards} == {(16, 3)}


@pytest.mark.parametrize(("batch_size", "suggested"), [(20, 16), (3, 8)])
def test_a_batch_that_does_not_divide_is_named(batch_size, suggested):
    with pytest.raises(InputError, match=f"batch_size={batch_size} .* 8 devices.*as {suggested}"):
        data_mesh(batch_size)
