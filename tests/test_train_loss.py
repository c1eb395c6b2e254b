"""Cross entropy against its definition."""

import jax
import jax.numpy as jnp
import numpy as np

from train.loss import IGNORED, cross_entropy


def test_cross_entropy_is_its_definition():
    logits = jax.random.normal(jax.random.key(0), (2, 3, 7)) * 4
    targets = jnp.array([[0, 6, IGNORED], [3, IGNORED, 2]])
    total, count = cross_entropy(logits, targets)
    exact = np.asarray(logits, np.float64)
    log_probabilities = exact - np.log(np.exp(exact).sum(-1, keepdims=True))
    picked = [(0, 0, 0), (0, 1, 6), (1, 0, 3), (1, 2, 2)]
    np.testing.assert_allclose(total, -sum(log_probabilities[i] for i in picked), rtol=1e-6)
    assert count == 4


def test_ignored_targets_have_no_gradient():
    targets = jnp.array([1, IGNORED])
    gradient = jax.grad(lambda logits: cross_entropy(logits, targets)[0])(jnp.ones((2, 5)))
    assert np.abs(gradient[0]).max() > 0.1
    np.testing.assert_array_equal(gradient[1], 0)
