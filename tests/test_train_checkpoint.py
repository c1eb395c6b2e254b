"""Checkpoints: what was saved comes back, and no failure takes a complete one away."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.checkpoint import CheckpointError, Checkpoints, restore_parameters
from train.config import InputError
from train.step import TrainState


def make_state(number, width=4, layers=2):
    value = float(number)
    parameters = {
        "blocks": {layer: {"kernel": jnp.full((width, 300), value)} for layer in range(layers)}
    }
    optimizer_state = optax.adam(1e-3).init(parameters)
    return TrainState(parameters, jax.tree.map(lambda x: x + value, optimizer_state))


def assert_equal(state, expected):
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, state, expected)


@pytest.fixture(params=[True, False], ids=["asynchronous", "blocking"])
def checkpoints(request, tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2, asynchronous=request.param)
    yield opened
    opened.close()


def test_what_was_saved_comes_back(checkpoints):
    assert checkpoints.latest_step() is None
    for step in (3, 5, 8):
        checkpoints.save(step, make_state(step))
    checkpoints.wait()
    assert checkpoints.latest_step() == 8
    assert_equal(checkpoints.restore(8, make_state(0)), make_state(8))
    assert_equal(checkpoints.restore(5, make_state(0)), make_state(5))
    with pytest.raises(CheckpointError, match="checkpoints/3 cannot be read"):
        checkpoints.restore(3, make_state(0))


def test_arrays_may_be_donated_while_they_are_written(checkpoints):
    """The training step writes over its state as soon as `save` returns."""
    add = jax.jit(lambda state: jax.tree.map(lambda x: x + 1, state), donate_argnums=0)
    state = make_state(1, width=4000)
    for step in (1, 2, 3):
        checkpoints.save(step, state)
        state = add(add(state))
    checkpoints.wait()
    assert_equal(checkpoints.restore(2, state), add(add(make_state(1, width=4000))))
    assert_equal(checkpoints.restore(3, state), add(add(add(add(make_state(1, width=4000))))))


def test_a_restored_array_lies_where_it_is_wanted(checkpoints):
    checkpoints.save(1, make_state(1))
    checkpoints.wait()
    mesh = jax.make_mesh((8,), ("data",), (jax.sharding.AxisType.Auto,))
    whole = jax.NamedSharding(mesh, jax.P())
    restored = checkpoints.restore(1, jax.device_put(make_state(0), whole))
    assert {leaf.sharding for leaf in jax.tree.leaves(restored)} == {whole}
    assert_equal(restored, make_state(1))


def test_a_checkpoint_of_another_shape_is_named(checkpoints):
    checkpoints.save(1, make_state(1))
    checkpoints.wait()
    with pytest.raises(
        InputError,
        match=r"parameters/blocks/0/kernel: float32\[4, 300\] in the checkpoint, "
        r"float32\[6, 300\] in this run",
    ):
        checkpoints.restore(1, make_state(0, width=6))
    with pytest.raises(InputError, match="blocks/2/kernel: absent in the checkpoint"):
        checkpoints.restore(1, make_state(0, layers=3))
    with pytest.raises(InputError, match=r"blocks/1/kernel: float32.* absent in this run"):
        checkpoints.restore(1, make_state(0, layers=1))


def test_what_an_interrupted_save_left_is_removed(tmp_path):
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(directory, keep=2, asynchronous=False)
    checkpoints.save(1, make_state(1))
    checkpoints.close()
    left = directory / "2.orbax-checkpoint-tmp"
    shutil.copytree(directory / "1", left)
    reopened = Checkpoints(directory, keep=2, asynchronous=False)
    assert reopened.latest_step() == 1
    reopened.save(2, make_state(2))
    assert reopened.latest_step() == 2
    assert not left.exists()
    reopened.close()


def test_a_file_in_place_of_the_directory_is_named(tmp_path):
    (tmp_path / "checkpoints").touch()
    with pytest.raises(CheckpointError, match="checkpoints is not a directory"):
        Checkpoints(tmp_path / "checkpoints", keep=2, asynchronous=False)


def test_a_damaged_checkpoint_is_named(checkpoints, tmp_path):
    for step in (1, 2):
        checkpoints.save(step, make_state(step))
    checkpoints.wait()
    (tmp_path / "checkpoints" / "2" / "default" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match=r"checkpoints/2 cannot be read.*\nDelete it"):
        checkpoints.restore(2, make_state(0))
    assert_equal(checkpoints.restore(1, make_state(0)), make_state(1))


def test_parameters_are_read_alone_and_nothing_is_written(tmp_path):
    directory = tmp_path / "checkpoints"
    with Checkpoints(directory, keep=2, asynchronous=False) as checkpoints:
        for step in (9, 10):
            checkpoints.save(step, make_state(step))
    (directory / "11.orbax-checkpoint-tmp").mkdir()  # of a run that goes on
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])

    def like(**sizes):
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here),
            make_state(0, **sizes).parameters,
        )

    assert_equal(restore_parameters(directory, like()), make_state(10).parameters)
    assert sorted(path.name for path in directory.iterdir()) == [
        "10",
        "11.orbax-checkpoint-tmp",
        "9",
    ]
    with pytest.raises(InputError, match=r"kernel: float32\[4, 300\] in the checkpoint"):
        restore_parameters(directory, like(width=6))
    with pytest.raises(InputError, match="nothing has no complete checkpoint yet"):
        restore_parameters(tmp_path / "nothing", like())
    (directory / "10" / "default" / "_METADATA").write_text("{")
    with pytest.raises(CheckpointError, match="checkpoints/10 cannot be read"):
        restore_parameters(directory, like())
