"""Simulates attention kernels of other packages: jax's splash attention and tokamax's.

They run in an environment of their own, `.venv-peers` (`make peers`), in a process for each kernel:
`python -m benchmarks.peers` reads one job from its standard input, and is not for calling by hand.
"""

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.simulate import FLOP_PER_CYCLE, Cycles, simulate

ROOT = Path(__file__).parent.parent
PYTHON = ROOT / ".venv-peers" / "bin" / "python"
FORWARD = {"block_q": 512, "block_kv": 512, "block_kv_compute": 512}  # unused by a backward pass


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One kernel to simulate.

    Attributes:
      peer: `"splash"` or `"tokamax"`.
      step: `"forward"`, or `"backward"`: from output, logsumexp and the output's gradient.
      topology: For which generation.
      is_causal: Causal, or no mask at all.
      length: T and S.
      heads: N and K.
      head_size: H, of values too.
      config: Tile sizes and options, under the peer's own names.
    """

    peer: str
    step: str
    topology: str
    is_causal: bool
    length: int
    heads: int
    head_size: int
    config: dict[str, Any]

    @property
    def flop(self) -> float:
        """Useful operations: causal counts half, backward 2.5 times forward."""
        products = 4 * self.heads * self.length**2 * self.head_size
        return products * (0.5 if self.is_causal else 1) * (2.5 if self.step == "backward" else 1)


def measure(job: Job) -> Cycles:
    """Simulates one kernel in the peers' environment.

    Raises:
      FileNotFoundError: The environment is not there.
      RuntimeError: The process ended otherwise than by a refusal or a failed simulation.
    """
    if not PYTHON.exists():
        raise FileNotFoundError(
            f"{PYTHON.relative_to(ROOT)} is not there. Set it up with: make peers"
        )
    process = subprocess.run(
        [PYTHON, "-m", "benchmarks.peers"],
        cwd=ROOT,
        input=json.dumps(dataclasses.asdict(job)),
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise RuntimeError(f"Simulating {job} ended with:\n{process.stderr[-4000:]}")
    return Cycles(**json.loads(process.stdout.splitlines()[-1]))


def package(peer: str) -> str:
    """The package that a peer is from, with its version as `requirements-peers.txt` pins it."""
    name = {"splash": "jax", "tokamax": "tokamax"}[peer]
    pins = (ROOT / "requirements-peers.txt").read_text()
    return next(pin for pin in pins.splitlines() if pin.startswith(f"{name}=="))


def build(job: Job) -> tuple[Callable[..., Any], list[jax.ShapeDtypeStruct]]:
    """The function to simulate and its arguments."""
    array = jax.ShapeDtypeStruct((job.heads, job.length, job.head_size), jnp.bfloat16)
    logsumexp = jax.ShapeDtypeStruct((job.heads, job.length), jnp.float32)
    forward, backward = {"splash": _splash, "tokamax": _tokamax}[job.peer](job)
    if job.step == "forward":
        return forward, [array] * 3
    return backward, [array] * 4 + [logsumexp, array]


def _splash(job: Job) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    # Its kernels read from tables in scalar memory which tile is next and whether to compute it,
    # and the simulator counts what is read as zero. The same answers by arithmetic:
    def next_nonzero(h, i, j, data_next_ref, block_mask_ref, m_next_ref, next_i=False):
        assert m_next_ref is None
        if not job.is_causal or data_next_ref is None:
            return (i if next_i else j), None, True, True
        queries, keys = (job.length // count for count in block_mask_ref.shape[1:])
        is_visible = j * keys <= i * queries + queries - 1
        if next_i:  # the tiles before the first that is computed are never fetched
            return jnp.where(is_visible, i, j * keys // queries), None, is_visible, True
        return jnp.where(is_visible, j, 0), None, is_visible, True

    splash_attention_kernel._next_nonzero = next_nonzero
    blocks: dict[str, Any] = FORWARD | job.config
    mask = splash_attention_mask.CausalMask if job.is_causal else splash_attention_mask.FullMask
    forward = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.MultiHeadMask([mask((job.length, job.length))] * job.heads),
        block_sizes=splash_attention_kernel.BlockSizes(**blocks),
        head_shards=1,
        q_seq_shards=1,
    )

    def backward(query, key, value, output, logsumexp, output_gradient):
        masks = (forward.dq_mask_info, forward.dkv_mask_info)
        residuals = (query, key, value, None, None, output, logsumexp, *masks)
        return splash_attention_kernel._splash_attention_bwd(
            res=residuals, do=output_gradient, **forward.kwargs
        )[3:6]

    return forward, backward


def _tokamax(job: Job) -> tuple[Callable[..., Any], Callable[..., Any]]:
    from tokamax._src.ops.experimental.tpu.splash_attention import (  # pyright: ignore[reportMissingImports]
        splash_attention_kernel,
        splash_attention_mask,
    )

    if job.is_causal:
        raise NotImplementedError("tokamax's causal kernel reads its work list from memory")
    config: dict[str, Any] = FORWARD | job.config
    for layout in {"q_layout", "k_layout", "v_layout"} & set(config):
        config[layout] = splash_attention_kernel.QKVLayout(config[layout])
    forward = splash_attention_kernel.make_splash_mha(
        splash_attention_mask.FullMask((job.length, job.length)),
        # The scaling of the query in the kernel crashes the simulator.
        config=splash_attention_kernel.SplashConfig(**config, q_prescaled_log2e=True),
        q_seq_shards=1,
    )

    def backward(query, key, value, output, logsumexp, output_gradient):
        residuals = (query, key, value, None, None, output, logsumexp, forward.dkv_mask_info, None)
        return splash_attention_kernel._splash_attention_bwd(
            res=residuals, grads=output_gradient, **forward.kwargs
        )[2:5]

    return forward, backward


def main() -> None:
    """Simulates the job on the standard input and prints what came of it."""
    job = Job(**json.load(sys.stdin))
    try:
        fn, arrays = build(job)
        least = job.flop / FLOP_PER_CYCLE[job.topology]
        cycles = simulate(fn, *arrays, topology=job.topology, least=least)
    except (jax.errors.JaxRuntimeError, NotImplementedError, ValueError) as error:
        first = str(error).partition("\n")[0]
        cycles = Cycles(error=f"refused: {type(error).__name__}: {first}")
    print(json.dumps(dataclasses.asdict(cycles)))


if __name__ == "__main__":
    main()
