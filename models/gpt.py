"""A decoder-only transformer for flax.nnx, in GPT-2 or Llama style.

Letters: B batch, T tokens per row, D width, F MLP width, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.core import Tracer

from flax_pallas_attn.nnx import MultiHeadAttention
from flax_pallas_attn.paged.cache import PagedKVCache, token_places
from models.config import GPTConfig


class GPT(nnx.Module):
    """Tokens in, logits of the next token out.

    One set of parameters serves two forms. `__call__` takes rows of equal length: to train, to
    score. `paged` takes tokens of any number of sequences and keeps a paged cache: to generate.

    >>> import jax.numpy as jnp
    >>> from models.config import PRESETS
    >>> model = GPT(PRESETS["tiny"], rngs=nnx.Rngs(0))
    >>> model(jnp.zeros((2, 8), jnp.int32)).shape
    (2, 8, 256)
    """

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters.

        Args:
          config: Sizes and choices.
          rngs: The stream `params`.
        """
        self.config = config
        self.token_embedding = _embedding(config.vocab_size, config, rngs)
        self.position_embedding = (
            _embedding(config.context_tokens, config, rngs) if config.rotary is None else None
        )
        self.embedding_dropout = nnx.Dropout(config.dropout_rate)
        self.blocks = nnx.List([Block(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = _norm(config, rngs)
        self.head = (
            None
            if config.tie_head
            else nnx.Linear(
                config.width,
                config.vocab_size,
                use_bias=False,
                dtype=config.compute_dtype,
                preferred_element_type=jnp.float32,
                rngs=rngs,
            )
        )

    def __call__(
        self,
        tokens: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        deterministic: bool = True,
        rngs: nnx.Rngs | None = None,
    ) -> jax.Array:
        """Logits of the token after each token.

        Args:
          tokens: `[B, T]` int32.
          segment_ids: `[B, T]` int32: tokens see their own segment alone; negative is padding.
          positions: `[B, T]` int32, places within a document; by default 0 to T - 1. They decide
            who is before whom, so packed rows need segment_ids as well.
          deterministic: Whether dropout is off.
          rngs: The stream `dropout`, needed for dropout.

        Returns:
          `[B, T, V]` float32.

        Raises:
          ValueError: `tokens` is not `[B, T]`, T is longer than the context, or an id is outside
            the vocabulary. Under `jit` ids are not known: one too high gives NaN, and a negative
            one counts from the end.
        """
        if tokens.ndim != 2:
            raise ValueError(f"tokens has shape {tokens.shape}; expected [B, T].")
        if tokens.shape[1] > self.config.context_tokens:
            raise ValueError(
                f"tokens has rows of {tokens.shape[1]} tokens, more than "
                f"context_tokens={self.config.context_tokens}; cut them, or build the model with a "
                "longer context."
            )
        if tokens.size and not isinstance(tokens, Tracer):
            ids = np.asarray(tokens)  # of jax's own, a minimum inside jit is traced
            lowest, highest = ids.min(), ids.max()
            if lowest < 0 or highest >= self.config.vocab_size:
                raise ValueError(
                    f"tokens has ids from {lowest} to {highest}; the model knows 0 to "
                    f"{self.config.vocab_size - 1}."
                )
        places = jnp.arange(tokens.shape[1]) if positions is None else positions
        x = self._embed(tokens, places)
        x = self.embedding_dropout(x, deterministic=deterministic, rngs=rngs)
        for block in self.blocks:
            x = block(
                x,
                segment_ids=segment_ids,
                positions=positions,
                deterministic=deterministic,
                rngs=rngs,
            )
        return self._logits(x)

    def paged(
        self,
        tokens: jax.Array,
        cache: PagedKVCache,
        *,
        page_table: jax.Array,
        kv_lengths: jax.Array,
        query_starts: jax.Array,
        logits_at: jax.Array,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Appends tokens of several sequences to the cache; logits of the token after some of them.

        Args:
          tokens: `[tokens]` int32, those of all sequences one after another, then padding.
          cache: As `create_cache` makes it.
          page_table: `[sequences, M]` int32, the pages of each sequence in order.
          kv_lengths: `[sequences]` int32, tokens of each sequence, these included.
          query_starts: `[sequences + 1]` int32: tokens `query_starts[s]` up to
            `query_starts[s + 1]` are the last ones of sequence s.
          logits_at: `[n]` int32, rows of `tokens`.

        Returns:
          Logits `[n, V]` float32, and the cache with the tokens in it.
        """
        _, positions = token_places(tokens.shape[0], kv_lengths, query_starts)
        x = self._embed(tokens, jnp.maximum(positions, 0))
        for layer, block in enumerate(self.blocks):
            x, cache = block.paged(
                x,
                cache,
                layer=layer,
                page_table=page_table,
                kv_lengths=kv_lengths,
                query_starts=query_starts,
            )
        return self._logits(x[logits_at]), cache

    def create_cache(self, *, num_pages: int, page_size: int) -> PagedKVCache:
        """An empty cache for `paged`, in the dtype of the computation.

        Args:
          num_pages: Pages of each layer, shared by all sequences.
          page_size: Tokens per page.
        """
        return PagedKVCache.create(
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            page_size=page_size,
            num_kv_heads=self.config.num_kv_heads,
            head_dim=self.config.head_size,
            dtype=self.config.compute_dtype,
        )

    def _embed(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        x = self.token_embedding(tokens)
        if self.position_embedding is not None:
            x += self.position_embedding(positions)
        return x

    def _logits(self, x: jax.Array) -> jax.Array:
        return _rowwise(self._head, self.final_norm(x))

    def _head(self, rows: jax.Array) -> jax.Array:
        if self.head is not None:
            return self.head(rows)
        embedding = self.token_embedding.embedding[...].astype(rows.dtype)
        return jnp.dot(rows, embedding.T, preferred_element_type=jnp.float32)


class Block(nnx.Module):
    """Attention, then MLP; each reads the normalized stream and adds to it."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters; arguments as in `GPT`."""
        self.attention_norm = _norm(config, rngs)
        self.attention = MultiHeadAttention(
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            in_features=config.width,
            dtype=config.compute_dtype,
            out_kernel_init=_residual_init(config),
            use_bias=config.use_bias,
            dropout_rate=config.dropout_rate,
            normalize_qk="rms" if config.normalize_query_key else False,
            rotary=config.rotary,
            local_window_size=_window(config),
            logits_soft_cap=config.logits_soft_cap,
            implementation=config.implementation,
            decode=False,
            keep_rngs=False,
            rngs=rngs,
        )
        self.mlp_norm = _norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs)
        self.dropout = nnx.Dropout(config.dropout_rate)

    def __call__(
        self,
        x: jax.Array,
        *,
        segment_ids: jax.Array | None,
        positions: jax.Array | None,
        deterministic: bool,
        rngs: nnx.Rngs | None,
    ) -> jax.Array:
        """`[B, T, D]` to `[B, T, D]`; arguments as in `GPT.__call__`."""
        attended = self.attention(
            self.attention_norm(x),
            is_causal=True,
            segment_ids=segment_ids,
            positions=positions,
            deterministic=deterministic,
            rngs=rngs,
        )
        x += self.dropout(attended, deterministic=deterministic, rngs=rngs)
        added = self.mlp(self.mlp_norm(x))
        return x + self.dropout(added, deterministic=deterministic, rngs=rngs)

    def paged(
        self,
        x: jax.Array,
        cache: PagedKVCache,
        *,
        layer: int,
        page_table: jax.Array,
        kv_lengths: jax.Array,
        query_starts: jax.Array,
    ) -> tuple[jax.Array, PagedKVCache]:
        """`[tokens, D]` to `[tokens, D]`; arguments as in `GPT.paged`."""
        attended, cache = self.attention.paged(
            self.attention_norm(x),
            cache,
            layer=layer,
            page_table=page_table,
            kv_lengths=kv_lengths,
            query_starts=query_starts,
        )
        x += attended
        return x + self.mlp(self.mlp_norm(x)), cache


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, or `down(silu(gate(x)) * up(x))` (Shazeer, 2020, arXiv 2002.05202)."""

    def __init__(self, config: GPTConfig, *, rngs: nnx.Rngs):
        """Draws the parameters; arguments as in `GPT`."""

        def linear(in_features, out_features, **options):
            return nnx.Linear(
                in_features,
                out_features,
                use_bias=config.use_bias,
                dtype=config.compute_dtype,
                rngs=rngs,
                **options,
            )

        self.up = linear(config.width, config.mlp_width)
        self.gate = linear(config.width, config.mlp_width) if config.mlp == "swiglu" else None
        self.down = linear(config.mlp_width, config.width, kernel_init=_residual_init(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        """`[..., D]` to `[..., D]`."""
        return _rowwise(self._rows, x)

    def _rows(self, x: jax.Array) -> jax.Array:
        if self.gate is None:
            return self.down(nnx.gelu(self.up(x)))
        return self.down(nnx.silu(self.gate(x)) * self.up(x))


def _rowwise(function, x: jax.Array) -> jax.Array:
    """Calls a function of rows `[n, D]` on `[..., D]`.

    With one leading dimension XLA:CPU runs a product's gradient as one matrix product; with two it
    copies the operands into another order first, which doubles the time of an MLP.
    """
    y = function(x.reshape(-1, x.shape[-1]))
    return y.reshape(*x.shape[:-1], y.shape[-1])


def _embedding(num_embeddings: int, config: GPTConfig, rngs: nnx.Rngs) -> nnx.Embed:
    return nnx.Embed(
        num_embeddings,
        config.width,
        dtype=config.compute_dtype,
        # With this spread a tied head gives logits of unit variance at first.
        embedding_init=nnx.initializers.normal(config.width**-0.5),
        rngs=rngs,
    )


def _norm(config: GPTConfig, rngs: nnx.Rngs) -> nnx.LayerNorm | nnx.RMSNorm:
    options = {
        "epsilon": config.normalization_epsilon,
        "dtype": config.compute_dtype,
        "rngs": rngs,
    }
    if config.normalization == "layernorm":
        return nnx.LayerNorm(config.width, use_bias=config.use_bias, **options)
    return nnx.RMSNorm(config.width, **options)


def _residual_init(config: GPTConfig) -> nnx.initializers.Initializer:
    """Of what is added to the stream: 2 additions per layer keep its size (as in GPT-2)."""
    return nnx.initializers.variance_scaling(
        1 / (2 * config.num_layers), "fan_in", "truncated_normal"
    )


def _window(config: GPTConfig) -> tuple[int, int] | None:
    return None if config.local_window_size is None else (config.local_window_size, 0)
