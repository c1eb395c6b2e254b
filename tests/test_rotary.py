"""Rotary positions against the published formulas, written out in float64 NumPy."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn.rotary import Llama3Scaling, Rotary, YarnScaling

LLAMA3 = Llama3Scaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_max_positions=8192
)
YARN = YarnScaling(factor=4.0, original_max_positions=4096)


def normal(*shape, seed=0):
    return np.asarray(jax.random.normal(jax.random.key(seed), shape))


def turned_ref(x, positions, frequencies, factor=1.0):
    """One complex number for each pair of features, times exp(i * angle)."""
    pairs = len(frequencies)
    x = np.asarray(x, np.float64)
    angle = np.asarray(positions, np.float64)[..., None, None] * frequencies
    z = x[..., :pairs] + 1j * x[..., pairs : 2 * pairs]
    z = z * factor * np.exp(1j * angle)
    return np.concatenate([z.real, z.imag, x[..., 2 * pairs :]], axis=-1)


def plain_frequencies_ref(dims, base):
    return np.array([1 / base ** (2 * i / dims) for i in range(dims // 2)])


def llama3_frequencies_ref(dims, base, scaling):
    """By cases on the wavelength, as Llama 3.1 is published."""
    result = []
    for f in plain_frequencies_ref(dims, base):
        wavelength = 2 * math.pi / f
        longest = scaling.original_max_positions / scaling.low_frequency_factor
        shortest = scaling.original_max_positions / scaling.high_frequency_factor
        if wavelength < shortest:
            result.append(f)
        elif wavelength > longest:
            result.append(f / scaling.factor)
        else:
            smooth = (
                scaling.original_max_positions / wavelength - scaling.low_frequency_factor
            ) / (scaling.high_frequency_factor - scaling.low_frequency_factor)
            result.append((1 - smooth) * f / scaling.factor + smooth * f)
    return np.array(result)


def yarn_frequencies_ref(dims, base, scaling):
    """Ramp over the index between the dimensions of 32 and of 1 turns."""

    def dimension(turns):
        length = scaling.original_max_positions
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.fast_turns), dimension(scaling.slow_turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    result = []
    for i, f in enumerate(plain_frequencies_ref(dims, base)):
        interpolated = min(max((i - low) / (high - low), 0), 1)
        result.append(interpolated * f / scaling.factor + (1 - interpolated) * f)
    return np.array(result)


@pytest.mark.parametrize(
    ("rotary", "frequencies", "factor"),
    [
        pytest.param(Rotary(), plain_frequencies_ref(64, 1e4), 1.0, id="plain"),
        pytest.param(Rotary(base=5e5), plain_frequencies_ref(64, 5e5), 1.0, id="base"),
        pytest.param(Rotary(dims=16), plain_frequencies_ref(16, 1e4), 1.0, id="partial"),
        pytest.param(
            Rotary(base=5e5, scaling=LLAMA3),
            llama3_frequencies_ref(64, 5e5, LLAMA3),
            1.0,
            id="llama3",
        ),
        pytest.param(
            Rotary(scaling=YARN),
            yarn_frequencies_ref(64, 1e4, YARN),
            0.1 * math.log(4) + 1,
            id="yarn",
        ),
        pytest.param(
            Rotary(
                scaling=YarnScaling(
                    factor=32.0, original_max_positions=4096, attention_factor=1.5, truncate=False
                ),
                base=150_000.0,
            ),
            yarn_frequencies_ref(
                64,
                150_000.0,
                YarnScaling(factor=32.0, original_max_positions=4096, truncate=False),
            ),
            1.5,
            id="yarn-untruncated",
        ),
    ],
)
def test_equals_float64_formula(rotary, frequencies, factor):
    x = normal(2, 5, 3, 64)
    positions = np.array([[0, 1, 2, 3, 4], [7, 100, 1000, 4095, 9000]])
    got = rotary.apply(jnp.asarray(x), jnp.asarray(positions))
    expected = turned_ref(x, positions, frequencies, factor)
    # A float32 angle is off by up to position * 2**-24, and so is the turned feature.
    tolerance = 4 * (1e-6 + positions * 2.0**-24)
    assert (abs(got - expected) < tolerance[..., None, None]).all()


def test_scalings_change_some_frequencies_and_keep_others():
    plain = plain_frequencies_ref(128, 5e5)
    for scaling in (LLAMA3, YARN):
        ratio = Rotary(base=5e5, scaling=scaling).frequencies(128)[0] / plain
        assert ratio[0] == 1
        assert ratio[-1] == pytest.approx(1 / scaling.factor)
        assert (np.diff(ratio) <= 1e-12).all()
        assert np.unique(ratio).size > 3


def test_yarn_with_an_empty_ramp_steps_from_kept_to_divided():
    scaling = YarnScaling(factor=2.0, original_max_positions=6)
    frequencies, _ = Rotary(scaling=scaling).frequencies(8)
    np.testing.assert_allclose(frequencies, plain_frequencies_ref(8, 1e4) / [1, 2, 2, 2])


def test_score_depends_on_distance_alone():
    query, key = (jnp.asarray(normal(1, 1, 1, 32, seed=seed)) for seed in (1, 2))

    def score(m, n):
        turn = Rotary().apply
        return float(jnp.vdot(turn(query, jnp.array([m])), turn(key, jnp.array([n]))))

    assert score(5, 2) == pytest.approx(score(103, 100), abs=1e-4)
    assert abs(score(5, 2) - score(5, 4)) > 0.1


@pytest.mark.parametrize("leading", [(), (2,), (2, 3)])
def test_leading_dimensions_and_shared_positions(leading):
    x = jnp.asarray(normal(*leading, 4, 2, 8))
    positions = jnp.arange(3, 7)
    shared = Rotary().apply(x, positions)
    each = Rotary().apply(x, jnp.broadcast_to(positions, (*leading, 4)))
    np.testing.assert_array_equal(shared, each)
    one_row = positions.reshape((1,) * len(leading) + (4,))
    np.testing.assert_array_equal(Rotary().apply(x, one_row), each)
    np.testing.assert_allclose(
        shared, turned_ref(x, positions, plain_frequencies_ref(8, 1e4)), atol=4e-6
    )


def test_bfloat16_is_turned_in_float32():
    x = jnp.asarray(normal(1, 6, 2, 16), jnp.bfloat16)
    positions = jnp.arange(1000, 1006)
    got = Rotary().apply(x, positions)
    assert got.dtype == jnp.bfloat16
    expected = turned_ref(x, positions, plain_frequencies_ref(16, 1e4))
    # One rounding of the result, half a unit in the last place of 8 bits.
    np.testing.assert_allclose(np.asarray(got, np.float64), expected, rtol=2.0**-8, atol=1e-3)


def test_gradient_turns_backwards():
    x, cotangent = (jnp.asarray(normal(1, 4, 1, 8, seed=seed)) for seed in (3, 4))
    positions = jnp.arange(4)
    _, pull = jax.vjp(lambda x: Rotary().apply(x, positions), x)
    np.testing.assert_allclose(pull(cotangent)[0], Rotary().apply(cotangent, -positions), atol=1e-6)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Rotary(base=1.0), "base=1.0"),
        (lambda: Rotary(base=float("nan")), "base=nan"),
        (lambda: Rotary(dims=7), "dims=7"),
        (lambda: Rotary(dims=0), "dims=0"),
        (lambda: Llama3Scaling(factor=0.5), "factor=0.5"),
        (lambda: Llama3Scaling(factor=float("inf")), "factor=inf"),
        (lambda: Llama3Scaling(original_max_positions=0), "original_max_positions=0"),
        (lambda: Llama3Scaling(low_frequency_factor=4.0), "low_frequency_factor=4.0"),
        (lambda: YarnScaling(factor=0.0, original_max_positions=8), "factor=0.0"),
        (
            lambda: YarnScaling(factor=2.0, original_max_positions=8, slow_turns=32.0),
            "slow_turns=32.0",
        ),
        (lambda: Rotary(dims=16).apply(jnp.ones((1, 2, 1, 8)), jnp.arange(2)), "dims=16"),
        (lambda: Rotary().apply(jnp.ones((1, 2, 1, 7)), jnp.arange(2)), "head size, which is 7"),
        (lambda: Rotary().apply(jnp.ones((3, 2, 1, 8)), jnp.arange(3)), r"positions has shape \(3"),
    ],
)
def test_bad_arguments_are_named(make, words):
    with pytest.raises(ValueError, match=words):
        make()
