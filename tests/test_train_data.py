"""Data: batches are a function of seed and step, and cover the text; bad text is named."""

import hashlib

import numpy as np
import pytest

from train.config import DataConfig, InputError
from train.data import check_length, describe_files, read_text, training_batch, validation_batches
from train.loss import IGNORED

TEXT = np.arange(250, dtype=np.uint8)


def batch(step, *, text=TEXT, seed=0, batch_size=4, row_tokens=8):
    return training_batch(text, seed=seed, step=step, batch_size=batch_size, row_tokens=row_tokens)


@pytest.fixture
def directory(tmp_path):
    for name, content in (("b", "second "), ("a", "first "), ("v", "validation")):
        (tmp_path / f"{name}.txt").write_text(content)
    (tmp_path / "notes.md").write_text("not text to train on")
    return tmp_path


def test_text_is_all_files_but_the_validation_file(directory):
    training, validation = read_text(DataConfig(directory=directory, validation_file="v.txt"))
    assert training.tobytes() == b"first second "
    assert validation.tobytes() == b"validation"


def test_each_file_is_described(directory):
    described = describe_files(DataConfig(directory=directory, validation_file="v.txt"))
    assert list(described) == ["a.txt", "b.txt", "v.txt"]
    assert described["a.txt"] == {
        "bytes": 6,
        "sha256": hashlib.sha256(b"first ").hexdigest(),
    }


def test_batches_are_a_function_of_seed_and_step():
    np.testing.assert_array_equal(batch(3).inputs, batch(3).inputs)
    later_first = [batch(step).inputs for step in (9, 3)][1]
    np.testing.assert_array_equal(later_first, batch(3).inputs)
    assert (batch(3).inputs != batch(4).inputs).any()
    assert (batch(3).inputs != batch(3, seed=1).inputs).any()


def test_targets_follow_inputs():
    inputs, targets = batch(5)
    assert inputs.shape == targets.shape == (4, 8)
    np.testing.assert_array_equal(targets, inputs + 1)  # the text counts up


def test_an_epoch_sees_each_row_once():
    """249 // 8 - 1 = 30 rows: 15 batches of 2."""
    for first in (1, 16, 31):
        starts = np.concatenate(
            [batch(step, batch_size=2).inputs[:, 0] for step in range(first, first + 15)]
        )
        np.testing.assert_array_equal(np.diff(np.sort(starts)), 8)


def test_epochs_differ():
    def starts(first):
        return [
            batch(step, batch_size=2).inputs[:, 0].tolist() for step in range(first, first + 15)
        ]

    first, second = starts(1), starts(16)
    assert first != second
    assert min(min(first)) % 8 != min(min(second)) % 8, "rows begin elsewhere"


def test_the_shortest_text_has_one_row():
    text = np.arange(9, dtype=np.uint8)
    np.testing.assert_array_equal(batch(7, text=text, batch_size=1).inputs, [np.arange(8)])


def test_every_byte_but_the_first_is_validated_once():
    batches = validation_batches(TEXT, batch_size=4, row_tokens=8, max_tokens=None)
    targets = np.concatenate([part.targets for part in batches])
    np.testing.assert_array_equal(np.sort(targets[targets != IGNORED]), np.arange(1, 250))
    for inputs, targets in batches:
        assert inputs.shape == targets.shape == (4, 8)
        real = targets != IGNORED
        np.testing.assert_array_equal(targets[real], inputs[real] + 1)


def test_fewer_tokens_are_spread_over_the_text():
    [part] = validation_batches(TEXT, batch_size=4, row_tokens=8, max_tokens=33)
    assert part.inputs[:, 0].tolist() == [0, 80, 160, 248]


def test_a_text_of_two_bytes_can_be_validated():
    [part] = validation_batches(TEXT[:2], batch_size=2, row_tokens=4, max_tokens=None)
    assert part.targets[part.targets != IGNORED].tolist() == [1]


def test_bad_text_is_named(directory, tmp_path):
    def read(**values):
        return read_text(
            DataConfig(**({"directory": directory, "validation_file": "v.txt"} | values))
        )

    with pytest.raises(InputError, match="nowhere' is not a directory"):
        read(directory=tmp_path / "nowhere")
    with pytest.raises(
        InputError, match=r"'x\.txt' is not in .*choose one of: a\.txt, b\.txt, v\.txt"
    ):
        read(validation_file="x.txt")
    (directory / "v.txt").write_text("")
    with pytest.raises(InputError, match=r"v\.txt: 0 bytes, too few"):
        read()
    for name in "ab":
        (directory / f"{name}.txt").unlink()
    with pytest.raises(InputError, match=r"no \.txt file besides the validation file"):
        read()


def test_text_shorter_than_a_row_is_named():
    check_length(TEXT[:9], 8)
    with pytest.raises(InputError, match=r"training text has 8 bytes.*row_tokens=8"):
        check_length(TEXT[:8], 8)
