"""Sampling: which tokens may be drawn, and how often."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.sampling import GREEDY, LOWEST_TEMPERATURE, Sampling, keep_likeliest, sample

PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.3, 0.15])
LOGITS = jnp.log(jnp.asarray(PROBABILITIES, jnp.float32)) + 2.0


def kept(logits, top_k=None, top_p=None):
    return np.flatnonzero(np.isfinite(keep_likeliest(logits, top_k, top_p))).tolist()


def shares(sampling, draws=20_000):
    keys = jax.random.split(jax.random.key(0), draws)
    tokens = jax.vmap(lambda key: sample(LOGITS, key, sampling))(keys)
    return np.bincount(tokens, minlength=5) / draws


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=LOWEST_TEMPERATURE)])
def test_greedy_takes_the_likeliest(sampling):
    tokens = sample(jnp.stack([LOGITS, -LOGITS]), jax.random.key(0), sampling)
    assert tokens.tolist() == [1, 2]
    assert tokens.dtype == jnp.int32


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [(1, [1]), (3, [1, 3, 4]), (5, [0, 1, 2, 3, 4]), (10**12, [0, 1, 2, 3, 4])],
)
def test_top_k_keeps_the_k_likeliest(top_k, expected):
    assert kept(LOGITS, top_k=top_k) == expected


def test_top_k_keeps_k_of_equal_tokens():
    assert kept(jnp.zeros(6), top_k=4) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("top_p", "expected"),
    [
        (1e-9, [1]),
        (0.39, [1]),
        (0.41, [1, 3]),
        (0.69, [1, 3]),
        (0.71, [1, 3, 4]),
        (1.0, [0, 1, 2, 3, 4]),
    ],
)
def test_top_p_keeps_the_fewest_that_reach_p(top_p, expected):
    assert kept(LOGITS, top_p=top_p) == expected


def test_top_p_looks_at_what_top_k_keeps():
    # Of the two likeliest, the first has 0.4 / 0.7 = 0.57.
    assert kept(LOGITS, top_k=2, top_p=0.56) == [1]
    assert kept(LOGITS, top_k=2, top_p=0.58) == [1, 3]


def test_tokens_are_drawn_as_often_as_they_are_likely():
    # Three standard deviations of a share near 0.4 in 20,000 draws are 0.0104.
    np.testing.assert_allclose(shares(Sampling()), PROBABILITIES, atol=0.0104)
    sharpened = PROBABILITIES**2 / (PROBABILITIES**2).sum()
    np.testing.assert_allclose(shares(Sampling(temperature=0.5)), sharpened, atol=0.0104)
    np.testing.assert_allclose(
        shares(Sampling(top_k=2)), np.array([0, 4, 0, 3, 0]) / 7, atol=0.0104
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0"),
        ({"temperature": 1e-40}, "temperature=1e-40 must be 0"),
        ({"temperature": float("nan")}, "temperature=nan must be 0"),
        ({"temperature": float("inf")}, "temperature=inf must be 0"),
        ({"top_k": 0}, "top_k=0 must be a whole number of at least 1"),
        ({"top_k": 1.5}, "top_k=1.5 must be a whole number"),
        ({"top_k": True}, "top_k=True must be a whole number"),
        ({"top_p": 0.0}, "top_p=0.0 must be in"),
        ({"top_p": 1.5}, "top_p=1.5 must be in"),
    ],
)
def test_wrong_values_are_named(values, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**values)
