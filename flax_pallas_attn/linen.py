"""Multi-head attention for flax.linen: flax's own module with this package's attention in it."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Literal

import jax
from flax import linen

from flax_pallas_attn.attention import attention_fn as pallas_attention_fn
from flax_pallas_attn.input_checks import warn
from flax_pallas_attn.logits import Dropout
from flax_pallas_attn.masking import Positions, SegmentIds
from flax_pallas_attn.module_core import (
    DECODING,
    DEFAULT_PAGE_SIZE,
    FOREIGN_ATTENTION,
    SOWING,
    AttentionOptions,
    DecodeCache,
    attend,
    check_normalize_qk,
    check_sizes,
    decode_step,
    pair_positions,
    pair_segments,
    refuse,
    turn,
)
from flax_pallas_attn.paged.attention import Implementation
from flax_pallas_attn.rotary import Rotary
from flax_pallas_attn.sharding import AttentionSharding


class MultiHeadDotProductAttention(linen.MultiHeadDotProductAttention):
    """Multi-head attention; takes the place of `flax.linen.MultiHeadDotProductAttention`.

    Constructor, call, parameter names and shapes are flax's, so code and checkpoints carry over by
    changing the class. These results differ: a query that may attend to nothing gives zero (flax:
    the mean of all values); scores and softmax are float32, so bfloat16 results differ by its
    rounding; dropout draws other bits, by a hash of its own; and `sow_weights=True` raises, since
    the weights are never formed.

    Decoding takes one token or a whole prompt at a time. As with flax, `init` (or a call without a
    cache whose "cache" collection is mutable) makes an empty cache of the inputs' shape, and calls
    after it append to it. Keys and values are kept in pages; a cache of flax's does not carry over.
    Decoding more than there is room for raises; under `jit`, where it cannot, nothing is written,
    the output is NaN, and the cache's `is_full` is set.

    Attributes beside flax's, by keyword:
      num_kv_heads: K, key/value heads, K divides `num_heads`; None for `num_heads`.
      rotary: Turns queries and keys by their positions, after normalization.
      local_window_size: As in `dot_product_attention`.
      logits_soft_cap: As in `dot_product_attention`.
      implementation: As in `dot_product_attention`.
      sharding: As in `dot_product_attention`.
      page_size: Tokens per page of the cache.

    Of flax's, these say more here:
      attention_fn: What attends. Another function of flax's contract may stand here (flax's own
        shows the weights); then the arguments after `rotary`, and decoding, cannot be used.
      normalize_qk: True normalizes queries and keys per head with LayerNorm, "rms" with RMSNorm.
      force_fp32_for_softmax: The softmax is float32 in any case.
      qk_attn_weights_einsum_cls: Only with another `attention_fn`, as there is no such einsum here.
      attn_weights_value_einsum_cls: Likewise.

    >>> import jax, jax.numpy as jnp
    >>> layer = MultiHeadDotProductAttention(num_heads=4, num_kv_heads=2, rotary=Rotary())
    >>> x = jnp.ones((2, 5, 16))
    >>> variables = layer.init(jax.random.key(0), x)
    >>> layer.apply(variables, x, is_causal=True).shape
    (2, 5, 16)
    """

    attention_fn: Callable[..., jax.Array] = pallas_attention_fn
    normalize_qk: bool | Literal["rms"] = False  # pyright: ignore[reportIncompatibleVariableOverride]
    num_kv_heads: int | None = dataclasses.field(default=None, kw_only=True)
    rotary: Rotary | None = dataclasses.field(default=None, kw_only=True)
    local_window_size: int | tuple[int, int] | None = dataclasses.field(default=None, kw_only=True)
    logits_soft_cap: float | None = dataclasses.field(default=None, kw_only=True)
    implementation: Implementation | None = dataclasses.field(default=None, kw_only=True)
    sharding: AttentionSharding | None = dataclasses.field(default=None, kw_only=True)
    page_size: int = dataclasses.field(default=DEFAULT_PAGE_SIZE, kw_only=True)

    def __post_init__(self):
        check_normalize_qk(self.normalize_qk)
        check_sizes(
            num_heads=self.num_heads, num_kv_heads=self.num_kv_heads, page_size=self.page_size
        )
        _options(self)
        super().__post_init__()

    @linen.compact
    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        inputs_kv: jax.Array | None = None,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        dropout_rng: jax.Array | None = None,
        sow_weights: bool = False,
        is_causal: bool = False,
        segment_ids: jax.Array | SegmentIds | None = None,
        positions: jax.Array | Positions | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          inputs_q: `[..., T, features]`, any number of batch dimensions.
          inputs_k: `[..., S, features]`; None for `inputs_q`.
          inputs_v: `[..., S, features]`; None for `inputs_k`.
          inputs_kv: The former name for both; deprecated by flax.
          mask: Broadcasts to `[..., N, T, S]`; nonzero, of any dtype, where attention is allowed.
          deterministic: Whether dropout is off; here or in the constructor, not in both.
          dropout_rng: Random key for dropout; None for the "dropout" stream.
          sow_weights: Whether to keep the attention weights; needs an `attention_fn` that forms
            them.
          is_causal: Whether query i sees keys up to i. Decoding always is.
          segment_ids: Document of each token, `[..., T]`, or `SegmentIds` where queries and keys
            differ; a negative one is padding.
          positions: Where each token stands, `[..., T]`, or `Positions` where queries and keys
            differ: for rotary, causality and window. None counts from 0, and in decoding from what
            the cache holds (there they are for rotary alone).

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError: Shapes that do not fit, arguments that exclude each other, decoding beyond
            the cache.
          NotImplementedError: What cannot be done with this `attention_fn`, or while decoding.
        """
        inputs_k, inputs_v = _inputs(inputs_q, inputs_k, inputs_v, inputs_kv)
        query, key, value = self._project(inputs_q, inputs_k, inputs_v)
        pairs = pair_positions(positions)
        dropout = self._dropout(deterministic, dropout_rng)
        options = _options(self)
        out = linen.DenseGeneral(
            features=self.out_features or inputs_q.shape[-1],
            axis=(-2, -1),
            kernel_init=self.out_kernel_init or self.kernel_init,
            bias_init=self.out_bias_init or self.bias_init,
            use_bias=self.use_bias,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            precision=self.precision,
            dot_general=self.out_dot_general,
            dot_general_cls=self.out_dot_general_cls,
            name="out",
        )

        if self.decode:
            refuse(
                {
                    "attention_fn": self.attention_fn is not pallas_attention_fn,
                    "mask": mask is not None,
                    "segment_ids": segment_ids is not None,
                    "sow_weights": sow_weights,
                    "dropout": dropout is not None,
                },
                DECODING,
            )
            has_cache = self.has_variable("cache", "decode_cache")
            cache = self.variable("cache", "decode_cache", self._empty_cache, key)
            if has_cache:
                x, cache.value = decode_step(
                    options, query, key, value, cache.value, positions=pairs
                )
                return out(x)

        query, key = turn(self.rotary, query, key, pairs)
        if self.attention_fn is pallas_attention_fn:
            refuse(
                {
                    "sow_weights": sow_weights,
                    "qk_attn_weights_einsum_cls": self.qk_attn_weights_einsum_cls is not None,
                    "attn_weights_value_einsum_cls": self.attn_weights_value_einsum_cls is not None,
                },
                SOWING,
            )
            x = attend(
                options,
                query,
                key,
                value,
                mask=mask,
                segment_ids=pair_segments(segment_ids),
                positions=pairs,
                is_causal=is_causal,
                dropout=dropout,
            )
        else:
            named = inspect.signature(self.attention_fn).parameters
            refuse(
                {
                    **options.used,
                    "is_causal": is_causal and "is_causal" not in named,
                    "segment_ids": segment_ids is not None,
                    "positions": positions is not None,
                },
                FOREIGN_ATTENTION,
            )
            einsum_cls = self.qk_attn_weights_einsum_cls
            value_einsum_cls = self.attn_weights_value_einsum_cls
            arguments = {
                "mask": mask,
                "dropout_rng": None if dropout is None else dropout.key,
                "dropout_rate": self.dropout_rate,
                "broadcast_dropout": self.broadcast_dropout,
                "deterministic": dropout is None,
                "dtype": self.dtype,
                "precision": self.precision,
                "force_fp32_for_softmax": self.force_fp32_for_softmax,
                "qk_attn_weights_einsum": einsum_cls() if einsum_cls else None,
                "attn_weights_value_einsum": value_einsum_cls() if value_einsum_cls else None,
                "is_causal": is_causal,
            }
            # By flax's contract a function gets those arguments that it names.
            arguments = {name: x for name, x in arguments.items() if name in named}
            if sow_weights:
                arguments["module"] = self
            x = self.attention_fn(query, key, value, **arguments)
        return out(x)

    def _project(self, inputs_q, inputs_k, inputs_v):
        """Queries, keys and values by heads, normalized if so configured."""
        features = self.qkv_features or inputs_q.shape[-1]
        kv_heads = self.num_kv_heads or self.num_heads
        if features % self.num_heads or self.num_heads % kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must divide qkv_features={features}, and "
                f"num_kv_heads={kv_heads} must divide num_heads."
            )
        head_dim = features // self.num_heads
        dense = functools.partial(
            linen.DenseGeneral,
            axis=-1,
            dtype=self.dtype,
            param_dtype=self.param_dtype,
            kernel_init=self.kernel_init,
            bias_init=self.bias_init,
            use_bias=self.use_bias,
            precision=self.precision,
            dot_general=self.qkv_dot_general,
            dot_general_cls=self.qkv_dot_general_cls,
        )
        query = dense(features=(self.num_heads, head_dim), name="query")(inputs_q)
        key = dense(features=(kv_heads, head_dim), name="key")(inputs_k)
        value = dense(features=(kv_heads, head_dim), name="value")(inputs_v)
        if self.normalize_qk:
            norm = functools.partial(
                linen.RMSNorm
                if self.normalize_qk == "rms"
                else functools.partial(linen.LayerNorm, use_bias=False),
                dtype=self.dtype,
                param_dtype=self.param_dtype,
            )
            query, key = norm(name="query_ln")(query), norm(name="key_ln")(key)
        return query, key, value

    def _dropout(self, deterministic, dropout_rng) -> Dropout | None:
        """What `dot_product_attention` is told about dropout."""
        if self.dropout_rate == 0:
            return None
        if linen.merge_param("deterministic", self.deterministic, deterministic):
            return None
        key = self.make_rng("dropout") if dropout_rng is None else dropout_rng
        return Dropout(rate=self.dropout_rate, key=key, broadcast=self.broadcast_dropout)

    def _empty_cache(self, key: jax.Array) -> DecodeCache:
        """A cache with room for as many tokens as `key` `[..., T, K, H]` has."""
        *batch_shape, max_length, kv_heads, head_dim = key.shape
        return DecodeCache.create(
            batch_shape=tuple(batch_shape),
            max_length=max_length,
            page_size=self.page_size,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            dtype=key.dtype,
        )


def _options(module: MultiHeadDotProductAttention) -> AttentionOptions:
    """Checked, when the module is built too."""
    return AttentionOptions(
        rotary=module.rotary,
        local_window_size=module.local_window_size,
        logits_soft_cap=module.logits_soft_cap,
        implementation=module.implementation,
        sharding=module.sharding,
        dtype=module.dtype,
        precision=module.precision,
    )


def _inputs(inputs_q, inputs_k, inputs_v, inputs_kv):
    """Keys' and values' inputs, by flax's rules."""
    if inputs_kv is not None:
        if inputs_k is not None or inputs_v is not None:
            raise ValueError("inputs_kv stands for inputs_k and inputs_v: pass it or them.")
        warn(
            "inputs_kv is deprecated by flax: pass inputs_k, and inputs_v where it differs.",
            DeprecationWarning,
        )
        return inputs_kv, inputs_kv
    if inputs_k is None and inputs_v is not None:
        raise ValueError("inputs_v was given without inputs_k; pass the array as inputs_k.")
    inputs_k = inputs_q if inputs_k is None else inputs_k
    return inputs_k, inputs_k if inputs_v is None else inputs_v
