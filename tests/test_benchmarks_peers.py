"""Jobs for other packages' kernels, as far as they need no simulator."""

import jax
import pytest
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

from benchmarks import peers

SPLASH_TILES = {
    "block_q": 256,
    "block_kv": 256,
    "block_kv_compute": 256,
    "block_q_dkv": 256,
    "block_kv_dkv": 256,
    "block_kv_dkv_compute": 256,
    "use_fused_bwd_kernel": True,
}


@pytest.fixture(autouse=True)
def splash_as_it_was(monkeypatch):
    monkeypatch.setattr(
        splash_attention_kernel, "_next_nonzero", splash_attention_kernel._next_nonzero
    )


def job(**changes):
    return peers.Job(
        **{
            "peer": "splash",
            "step": "forward",
            "topology": "v6e",
            "is_causal": False,
            "length": 1024,
            "heads": 2,
            "head_size": 128,
            "config": SPLASH_TILES,
        }
        | changes
    )


def test_useful_operations():
    products = 2 * 2 * 1024 * 1024 * 128 * 2  # two products, an addition with each multiplication
    assert job().flop == products
    assert job(is_causal=True).flop == products / 2
    assert job(is_causal=True, step="backward").flop == products / 2 * 2.5


def test_without_the_environment_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(peers, "ROOT", tmp_path)
    monkeypatch.setattr(peers, "PYTHON", tmp_path / ".venv-peers" / "bin" / "python")
    with pytest.raises(FileNotFoundError, match=r"\.venv-peers/bin/python.*make peers"):
        peers.measure(job())


def test_a_process_that_ends_badly_is_no_failure_of_the_simulator(tmp_path, monkeypatch):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho broken >&2\nexit 3\n")
    python.chmod(0o755)
    monkeypatch.setattr(peers, "PYTHON", python)
    with pytest.raises(RuntimeError, match=r"(?s)Simulating Job.*broken"):
        peers.measure(job())


def test_packages_are_named_as_they_are_pinned():
    assert peers.package("splash").startswith("jax==")
    assert peers.package("tokamax").startswith("tokamax==")


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("step", ["forward", "backward"])
def test_splash_takes_the_arguments_that_are_built_for_it(step, is_causal):
    this = job(step=step, is_causal=is_causal)
    fn, arrays = peers.build(this)
    outputs = jax.tree.leaves(jax.eval_shape(fn, *arrays))
    assert {output.shape for output in outputs} == {(2, 1024, 128)}
    assert len(outputs) == {"forward": 1, "backward": 3}[step]


@pytest.mark.parametrize(
    ("is_causal", "visible"),
    [
        (True, [[True, False], [True, False], [True, True], [True, True]]),
        (False, [[True, True]] * 4),
    ],
)
def test_splash_visits_by_arithmetic_what_it_would_look_up(is_causal, visible):
    peers.build(job(is_causal=is_causal))
    tables = jax.ShapeDtypeStruct((1, 4, 2), "int32")  # tiles of 256 queries by 512 keys
    lookup = splash_attention_kernel._next_nonzero
    seen = [[bool(lookup(0, i, j, tables, tables, None)[2]) for j in range(2)] for i in range(4)]
    assert seen == visible
    # Where a tile is computed, its own data is there, in the backward order too.
    for i, j in ((i, j) for i in range(4) for j in range(2) if visible[i][j]):
        assert int(lookup(0, i, j, tables, tables, None)[0]) == j
        assert int(lookup(0, i, j, tables, tables, None, next_i=True)[0]) == i
