"""The sizes and choices that make up a GPT, and the presets."""

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp

from flax_pallas_attn.rotary import Llama3Scaling, Rotary

PresetName = Literal["tiny", "gpt2", "gpt2-medium", "llama-1b"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """A decoder-only transformer, from GPT-2 style to Llama style.

    GPT-2 style: rotary None (learned positions), normalization "layernorm", mlp "gelu", use_bias.
    Llama style: rotary, normalization "rmsnorm", mlp "swiglu", fewer key/value heads, no bias.

    Raises:
      ValueError: A size is not positive, heads do not divide, or dropout_rate is out of range.
    """

    vocab_size: int
    """Number of token ids."""
    context_tokens: int
    """Longest sequence, in tokens."""
    num_layers: int
    """Blocks of attention and MLP."""
    num_heads: int
    """Query heads; they divide `width` into heads of width / num_heads."""
    num_kv_heads: int
    """Key/value heads; they divide `num_heads`."""
    width: int
    """Features of a token between blocks."""
    mlp_width: int
    """Features inside the MLP."""
    rotary: Rotary | None
    """Rotary positions of queries and keys; None adds a learned embedding per position."""
    normalization: Literal["layernorm", "rmsnorm"]
    """What precedes attention, MLP and head."""
    normalization_epsilon: float = 1e-5
    """Added to the variance (layernorm) or the mean square (rmsnorm)."""
    normalize_query_key: bool = False
    """RMS-normalize queries and keys, per head."""
    mlp: Literal["gelu", "swiglu"]
    """gelu: down(gelu(up(x))). swiglu: down(silu(gate(x)) * up(x))."""
    use_bias: bool
    """Biases in projections and in layernorm."""
    tie_head: bool
    """The head is the token embedding, transposed."""
    dropout_rate: float = 0.0
    """Of embeddings, attention probabilities and what blocks add, while training."""
    local_window_size: int | None = None
    """A token sees so many before it, and itself; None for all."""
    logits_soft_cap: float | None = None
    """Bounds attention scores to cap * tanh(scores / cap)."""
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Of the computation; parameters are float32."""
    implementation: Literal["pallas", "xla", "reference"] | None = None
    """Of attention; None chooses by the platform that the program is compiled for."""

    def __post_init__(self):
        for name in (
            "vocab_size",
            "context_tokens",
            "num_layers",
            "num_heads",
            "num_kv_heads",
            "width",
            "mlp_width",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1.")
        if self.width % self.num_heads:
            raise ValueError(
                f"num_heads={self.num_heads} does not divide width={self.width}; "
                f"choose a multiple of {self.num_heads} as width."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                "choose a divisor, so that every key/value head serves as many query heads."
            )
        if self.rotary is not None and self.head_size % 2:
            raise ValueError(
                f"width={self.width} and num_heads={self.num_heads} make heads of "
                f"{self.head_size} features; rotary positions turn pairs, choose an even size."
            )
        if self.rotary is not None and (self.rotary.dims or 0) > self.head_size:
            raise ValueError(
                f"rotary.dims={self.rotary.dims} is more than the {self.head_size} features of a "
                f"head (width={self.width} / num_heads={self.num_heads}); leave it out to turn all."
            )
        if not 0 <= self.normalization_epsilon < math.inf:
            raise ValueError(
                f"normalization_epsilon={self.normalization_epsilon} must be finite and not "
                "negative."
            )
        if not 0 <= self.dropout_rate < 1:
            raise ValueError(f"dropout_rate={self.dropout_rate} must be in [0, 1).")
        if self.local_window_size is not None and self.local_window_size < 0:
            raise ValueError(f"local_window_size={self.local_window_size} must not be negative.")
        if self.logits_soft_cap is not None and not 0 < self.logits_soft_cap < math.inf:
            raise ValueError(
                f"logits_soft_cap={self.logits_soft_cap} must be positive and finite; None for no "
                "cap."
            )

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.width // self.num_heads

    @property
    def compute_dtype(self) -> jnp.dtype:
        """`dtype` as JAX has it."""
        return jnp.dtype(self.dtype)


def gpt2(*, num_layers: int, num_heads: int, width: int) -> GPTConfig:
    """GPT-2's choices at any size.

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), table 2,
    and the hparams.json published with the weights. Dropout is 0, as the data outlasts training.
    """
    return GPTConfig(
        vocab_size=50257,
        context_tokens=1024,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        width=width,
        mlp_width=4 * width,
        rotary=None,
        normalization="layernorm",
        mlp="gelu",
        use_bias=True,
        tie_head=True,
    )


PRESETS: dict[PresetName, GPTConfig] = {
    # Bytes, and small enough for minutes on a laptop's CPU; the sizes are measured in
    # benchmarks/LOG.md.
    "tiny": GPTConfig(
        vocab_size=256,
        context_tokens=128,
        num_layers=4,
        num_heads=2,
        num_kv_heads=2,
        width=128,
        mlp_width=352,
        rotary=Rotary(),
        normalization="rmsnorm",
        mlp="swiglu",
        normalize_query_key=True,
        use_bias=False,
        tie_head=True,
    ),
    "gpt2": gpt2(num_layers=12, num_heads=12, width=768),
    "gpt2-medium": gpt2(num_layers=24, num_heads=16, width=1024),
    # Source: config.json of the published Llama-3.2-1B.
    "llama-1b": GPTConfig(
        vocab_size=128256,
        context_tokens=131072,
        num_layers=16,
        num_heads=32,
        num_kv_heads=8,
        width=2048,
        mlp_width=8192,
        rotary=Rotary(base=500_000.0, scaling=Llama3Scaling(factor=32.0)),
        normalization="rmsnorm",
        mlp="swiglu",
        use_bias=False,
        tie_head=True,
    ),
}
