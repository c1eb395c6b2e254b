"""Soft cap, ALiBi and dropout, each against its definition."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.logits import Logits, alibi, cap, dropout_keep, dropout_rows
from flax_pallas_attn.masking import Tokens

SEED = (7, 3_000_000_000)


def keep(rate, shape=(2, 3, 40, 50), seed=SEED, start=(0, 0, 0, 0)):
    index = [
        (first + jnp.arange(size)).reshape([-1 if n == axis else 1 for n in range(4)])
        for axis, (size, first) in enumerate(zip(shape, start, strict=True))
    ]
    rows = dropout_rows(jnp.array(seed, jnp.uint32), *index[:3])
    return np.asarray(dropout_keep(rows, rate, index[3]))


def keep_by_hand(seed, rate, *words):
    """The hash in Python's integers."""

    def mix(x):
        x = (x ^ (x >> 16)) * 0x7FEB352D % 2**32
        x = (x ^ (x >> 15)) * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    batch, head, query, key = (word % 2**32 for word in words)
    state = mix(seed[0] ^ mix(batch ^ mix(seed[1] ^ head)))
    return mix(mix(state ^ query) ^ key) >= rate * 2**32


def test_dropout_is_the_hash():
    actual = keep(0.3, (2, 3, 5, 7), start=(1, 4, -2, 1000))
    for index in np.ndindex(*actual.shape):
        words = [i + first for i, first in zip(index, (1, 4, -2, 1000), strict=True)]
        assert actual[index] == keep_by_hand(SEED, 0.3, *words)


def test_dropout_of_a_tile_is_the_tile_of_dropout():
    whole = keep(0.5)
    tile = keep(0.5, (1, 2, 8, 16), start=(1, 1, 24, 32))
    np.testing.assert_array_equal(tile, whole[1:2, 1:3, 24:32, 32:48])


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.9])
def test_dropout_rate(rate):
    shape = (4, 8, 128, 128)
    kept = keep(rate, shape)
    deviation = np.sqrt(rate * (1 - rate) / kept.size)
    assert abs(1 - kept.mean() - rate) < 4 * deviation
    # Nor does any row, column, head or batch row drop more than its share.
    for axis in range(4):
        others = tuple(n for n in range(4) if n != axis)
        part = kept.mean(others)
        worst = np.abs(1 - part - rate).max()
        assert worst < 5 * np.sqrt(rate * (1 - rate) * part.size / kept.size)


def test_dropout_at_neighbours_is_independent():
    kept = keep(0.5, (4, 8, 128, 128))
    for axis in range(4):
        first = np.take(kept, range(kept.shape[axis] - 1), axis)
        second = np.take(kept, range(1, kept.shape[axis]), axis)
        assert abs((first == second).mean() - 0.5) < 2.5 / np.sqrt(first.size)
    assert abs((kept == keep(0.5, kept.shape, seed=(8, SEED[1]))).mean() - 0.5) < 0.005
    assert abs((kept == keep(0.5, kept.shape, seed=(7, SEED[1] + 1))).mean() - 0.5) < 0.005


def test_dropout_of_nothing():
    assert keep(0.0).all()


def test_dropout_indices():
    rows, columns = Logits().dropout_indices(2, 3)
    np.testing.assert_array_equal(rows, [0, 1])
    np.testing.assert_array_equal(columns, [0, 1, 2])
    here = Logits(first_batch=jnp.int32(4), first_head=jnp.int32(6))
    rows, columns = here.dropout_indices(2, 3)
    np.testing.assert_array_equal(rows, [4, 5])
    np.testing.assert_array_equal(columns, [6, 7, 8])
    for shared in Logits(dropout_broadcast=True).dropout_indices(2, 3):
        np.testing.assert_array_equal(shared, [0])


def test_cap():
    x = jnp.linspace(-100, 100, 41)
    np.testing.assert_allclose(cap(x, 5.0), 5 * np.tanh(np.asarray(x) / 5), rtol=1e-6)
    slope = jax.vmap(jax.grad(lambda x: cap(x, 5.0)))(x)
    np.testing.assert_allclose(slope, 1 - (cap(x, 5.0) / 5) ** 2, atol=1e-6)


def test_alibi():
    query = Tokens(jnp.arange(2)[:, None], jnp.array([[3], [1]]))
    key = Tokens(jnp.arange(3)[None], jnp.array([[0, 3, 5]]))
    np.testing.assert_array_equal(
        alibi(jnp.float32(0.5), query, key), [[-1.5, 0.0, -1.0], [-0.5, -1.0, -2.0]]
    )


def test_used_names_public_arguments():
    assert Logits().used == ()
    one = jnp.ones(1)
    everything = Logits(
        soft_cap=1.0, bias=one, slopes=one, sinks=one, dropout_seed=jnp.zeros(2, jnp.uint32)
    )
    assert everything.used == ("logits_soft_cap", "bias", "bias=Alibi", "sinks", "dropout")
