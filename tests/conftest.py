"""What every test runs under: the CPU as eight devices, and the marker for compiling for TPU."""

import importlib.util
import os
from collections.abc import Iterator

# Read when jax is imported. A process that a test starts must not look for a TPU either.
os.environ["JAX_PLATFORMS"] = "cpu"
# Most of a test's time goes into compiling for the CPU what then runs once.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0"

import hypothesis
import jax
import pytest
from jax.experimental.pallas import tpu as pltpu

jax.config.update("jax_num_cpu_devices", 8)

# The same cases on every run and machine; a slow test asks for more of them.
hypothesis.settings.register_profile("suite", deadline=None, derandomize=True, max_examples=25)
# Others on every run, for `make test-nightly`: a failure prints how to draw it again.
hypothesis.settings.register_profile(
    "nightly", deadline=None, max_examples=334, print_blob=True, database=None
)
hypothesis.settings.load_profile("suite")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("tpu_compile") and importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for TPU needs libtpu, which has no wheel for this platform")


@pytest.fixture
def x64() -> Iterator[None]:
    """Float64 arrays, for a reference whose rounding does not count."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def interpret() -> Iterator[None]:
    """Runs TPU kernels in the interpreter, where memory never written holds NaN."""
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams()):
        yield
