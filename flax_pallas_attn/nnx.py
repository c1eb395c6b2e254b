"""Multi-head attention for flax.nnx: flax's own module with this package's attention in it."""

import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.module import first_from
from flax.nnx.nn.dtypes import promote_dtype
from flax.nnx.nn.linear import default_kernel_init
from flax.typing import Dtype, Initializer, PrecisionLike, PromoteDtypeFn, Shape

from flax_pallas_attn.attention import attention_fn as pallas_attention_fn
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
    paged_step,
    pair_positions,
    pair_segments,
    refuse,
    turn,
)
from flax_pallas_attn.paged.attention import Implementation
from flax_pallas_attn.paged.cache import PagedKVCache, token_places
from flax_pallas_attn.rotary import Rotary
from flax_pallas_attn.sharding import AttentionSharding

_ZEROS = nnx.initializers.zeros_init()
_NO_METADATA: Mapping[str, Any] = MappingProxyType({})


class MultiHeadAttention(nnx.MultiHeadAttention):
    """Multi-head attention; takes the place of `flax.nnx.MultiHeadAttention`.

    Constructor, call, parameter names and shapes are flax's, so code and checkpoints carry over by
    changing the class. These results differ: a query that may attend to nothing gives zero (flax:
    the mean of all values); scores and softmax are float32, so bfloat16 results differ by its
    rounding; dropout draws other bits, by a hash of its own; and `sow_weights=True` raises, since
    the weights are never formed.

    Decoding takes one token or a whole prompt at a time, and keeps keys and values in pages (a
    cache from flax's `init_cache` does not carry over). `paged` serves sequences of different
    lengths from a cache that many layers share.

    Args:
      num_heads: N, query heads.
      in_features: Features of the inputs.
      qkv_features: Features of all query heads together; None for `in_features`.
      out_features: Features of the output; None for `in_features`.
      num_kv_heads: K, key/value heads, K divides N; None for `num_heads`.
      in_kv_features: Features of `inputs_k` and `inputs_v`; None for `in_features`.
      dtype: Of the computation; None promotes inputs and parameters.
      param_dtype: Of the parameters.
      broadcast_dropout: Whether all batch rows and heads drop the same pairs.
      dropout_rate: Share of attention probabilities that is dropped, in `[0, 1)`.
      deterministic: Whether dropout is off.
      precision: Of the projections and of attention; None for the projections' default and for
        full precision of float32 attention.
      kernel_init: Of the projections' kernels.
      out_kernel_init: Of the output projection's; None for `kernel_init`.
      bias_init: Of the projections' biases.
      out_bias_init: Of the output projection's; None for `bias_init`.
      use_bias: Whether the projections have a bias.
      attention_fn: What attends. Another function of flax's contract may stand here (flax's own
        shows the weights); then the arguments after `rotary`, and decoding, cannot be used.
      decode: Whether calls decode from the cache.
      normalize_qk: True normalizes queries and keys per head with LayerNorm, "rms" with RMSNorm.
      qkv_promote_dtype: Promotes inputs and parameters of the input projections.
      out_promote_dtype: Promotes those of the output projection.
      ln_promote_dtype: Promotes those of the normalization.
      qkv_dot_general: Of the input projections; deprecated by flax.
      out_dot_general: Of the output projection; deprecated by flax.
      qkv_dot_general_cls: Makes the former; deprecated by flax.
      out_dot_general_cls: Makes the former; deprecated by flax.
      rngs: Random streams, for parameters and dropout.
      keep_rngs: Whether to keep a fork of the dropout stream in the module.
      kernel_metadata: Of the projections' kernels, such as their sharding.
      out_kernel_metadata: Of the output projection's; empty for `kernel_metadata`.
      bias_metadata: Of the projections' biases.
      out_bias_metadata: Of the output projection's; empty for `bias_metadata`.
      query_ln_scale_metadata: Of the query normalization's scale.
      key_ln_scale_metadata: Of the key normalization's scale.
      rotary: Turns queries and keys by their positions, after normalization.
      local_window_size: As in `dot_product_attention`.
      logits_soft_cap: As in `dot_product_attention`.
      implementation: As in `dot_product_attention`.
      sharding: As in `dot_product_attention`.

    Raises:
      ValueError: Sizes that do not divide, or an option that is none.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> layer = MultiHeadAttention(
    ...     num_heads=4, in_features=16, num_kv_heads=2, rotary=Rotary(), rngs=nnx.Rngs(0)
    ... )
    >>> x = jnp.ones((2, 5, 16))
    >>> layer(x, is_causal=True, decode=False).shape
    (2, 5, 16)
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        qkv_features: int | None = None,
        out_features: int | None = None,
        num_kv_heads: int | None = None,
        in_kv_features: int | None = None,
        *,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        broadcast_dropout: bool = True,
        dropout_rate: float = 0.0,
        deterministic: bool | None = None,
        precision: PrecisionLike = None,
        kernel_init: Initializer = default_kernel_init,
        out_kernel_init: Initializer | None = None,
        bias_init: Initializer = _ZEROS,
        out_bias_init: Initializer | None = None,
        use_bias: bool = True,
        attention_fn: Callable[..., jax.Array] = pallas_attention_fn,
        decode: bool | None = None,
        normalize_qk: bool | Literal["rms"] = False,
        qkv_promote_dtype: PromoteDtypeFn = promote_dtype,
        out_promote_dtype: PromoteDtypeFn = promote_dtype,
        ln_promote_dtype: PromoteDtypeFn = promote_dtype,
        qkv_dot_general: Callable[..., jax.Array] | None = None,
        out_dot_general: Callable[..., jax.Array] | None = None,
        qkv_dot_general_cls: Any = None,
        out_dot_general_cls: Any = None,
        rngs: nnx.Rngs,
        keep_rngs: bool = True,
        kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        out_kernel_metadata: Mapping[str, Any] = _NO_METADATA,
        bias_metadata: Mapping[str, Any] = _NO_METADATA,
        out_bias_metadata: Mapping[str, Any] = _NO_METADATA,
        query_ln_scale_metadata: Mapping[str, Any] = _NO_METADATA,
        key_ln_scale_metadata: Mapping[str, Any] = _NO_METADATA,
        rotary: Rotary | None = None,
        local_window_size: int | tuple[int, int] | None = None,
        logits_soft_cap: float | None = None,
        implementation: Implementation | None = None,
        sharding: AttentionSharding | None = None,
    ):
        check_sizes(num_heads=num_heads, num_kv_heads=num_kv_heads)
        super().__init__(
            num_heads,
            in_features,
            qkv_features,
            out_features,
            num_kv_heads,
            in_kv_features,
            dtype=dtype,
            param_dtype=param_dtype,
            broadcast_dropout=broadcast_dropout,
            dropout_rate=dropout_rate,
            deterministic=deterministic,
            precision=precision,
            kernel_init=kernel_init,
            out_kernel_init=out_kernel_init,
            bias_init=bias_init,
            out_bias_init=out_bias_init,
            use_bias=use_bias,
            attention_fn=attention_fn,
            decode=decode,
            normalize_qk=bool(normalize_qk) and normalize_qk != "rms",
            qkv_promote_dtype=qkv_promote_dtype,
            out_promote_dtype=out_promote_dtype,
            ln_promote_dtype=ln_promote_dtype,
            qkv_dot_general=qkv_dot_general,
            out_dot_general=out_dot_general,
            qkv_dot_general_cls=qkv_dot_general_cls,
            out_dot_general_cls=out_dot_general_cls,
            rngs=rngs,
            keep_rngs=keep_rngs,
            kernel_metadata=kernel_metadata,
            out_kernel_metadata=out_kernel_metadata,
            bias_metadata=bias_metadata,
            out_bias_metadata=out_bias_metadata,
            query_ln_scale_metadata=query_ln_scale_metadata,
            key_ln_scale_metadata=key_ln_scale_metadata,
        )
        check_normalize_qk(normalize_qk)
        self.normalize_qk = normalize_qk
        if normalize_qk == "rms":
            norm = functools.partial(
                nnx.RMSNorm,
                self.head_dim,
                dtype=dtype,
                param_dtype=param_dtype,
                promote_dtype=ln_promote_dtype,
                rngs=rngs,
            )
            # flax declares both as LayerNorm.
            self.query_ln = norm(scale_metadata=query_ln_scale_metadata)  # pyright: ignore
            self.key_ln = norm(scale_metadata=key_ln_scale_metadata)  # pyright: ignore
        self.options = AttentionOptions(
            rotary=rotary,
            local_window_size=local_window_size,
            logits_soft_cap=logits_soft_cap,
            implementation=implementation,
            sharding=sharding,
            dtype=dtype,
            precision=precision,
        )
        self.cache: nnx.Cache[DecodeCache] | None = nnx.data(None)

    def __call__(
        self,
        inputs_q: jax.Array,
        inputs_k: jax.Array | None = None,
        inputs_v: jax.Array | None = None,
        *,
        mask: jax.Array | None = None,
        deterministic: bool | None = None,
        rngs: nnx.Rngs | nnx.RngStream | None = None,
        sow_weights: bool = False,
        decode: bool | None = None,
        is_causal: bool = False,
        out_sharding: Any = None,
        qkv_sharding: Any = None,
        input_positions: jax.Array | None = None,
        segment_ids: jax.Array | SegmentIds | None = None,
        positions: jax.Array | Positions | None = None,
    ) -> jax.Array:
        """Attends.

        Args:
          inputs_q: `[..., T, in_features]`, any number of batch dimensions.
          inputs_k: `[..., S, in_kv_features]`; None for `inputs_q`.
          inputs_v: `[..., S, in_kv_features]`; None for `inputs_k`.
          mask: Broadcasts to `[..., N, T, S]`; nonzero, of any dtype, where attention is allowed.
          deterministic: Whether dropout is off; goes before the constructor's.
          rngs: Random streams for dropout; go before the module's own.
          sow_weights: Whether to keep the attention weights; needs an `attention_fn` that forms
            them.
          decode: Whether to append the inputs, `[batch..., t, in_features]` with any t, to the
            cache, and to attend to all of it; goes before the constructor's.
          is_causal: Whether query i sees keys up to i. Decoding always is.
          out_sharding: Of the output.
          qkv_sharding: Of queries, keys and values.
          input_positions: flax's name for an array of `positions`.
          segment_ids: Document of each token, `[..., T]`, or `SegmentIds` where queries and keys
            differ; a negative one is padding.
          positions: Where each token stands, `[..., T]`, or `Positions` where queries and keys
            differ: for rotary, causality and window. None counts from 0, and in decoding from what
            the cache holds (there they are for rotary alone).

        Returns:
          `[..., T, out_features]`.

        Raises:
          ValueError: Shapes that do not fit, arguments that exclude each other, dropout without
            random numbers, decoding without a cache or beyond it.
          NotImplementedError: What cannot be done with this `attention_fn`, or while decoding.
        """
        if inputs_k is None and inputs_v is not None:
            raise ValueError("inputs_v was given without inputs_k; pass the array as inputs_k.")
        if positions is not None and input_positions is not None:
            raise ValueError("positions and input_positions are the same thing: pass one of them.")
        inputs_k = inputs_q if inputs_k is None else inputs_k
        inputs_v = inputs_k if inputs_v is None else inputs_v
        query, key, value = self._project(inputs_q, inputs_k, inputs_v, qkv_sharding)
        pairs = pair_positions(input_positions if positions is None else positions)
        dropout = self._dropout(deterministic, rngs)
        decode = first_from(
            decode,
            self.decode,
            error_msg="decode was given neither to the call nor to the constructor.",
        )

        if decode:
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
            if self.cache is None:
                raise ValueError("There is no cache to decode from: call init_cache first.")
            x, cache = decode_step(
                self.options, query, key, value, self.cache.get_value(), positions=pairs
            )
            self.cache.set_value(cache)
            return self.out(x, out_sharding=out_sharding)

        query, key = turn(self.options.rotary, query, key, pairs)
        if self.attention_fn is pallas_attention_fn:
            refuse({"sow_weights": sow_weights}, SOWING)
            x = attend(
                self.options,
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
            refuse(
                {
                    **self.options.used,
                    "segment_ids": segment_ids is not None,
                    "positions": positions is not None,
                },
                FOREIGN_ATTENTION,
            )
            forwarded = {} if input_positions is None else {"input_positions": input_positions}
            x = self.attention_fn(
                query,
                key,
                value,
                mask=mask,
                dropout_rng=None if dropout is None else dropout.key,
                dropout_rate=self.dropout_rate,
                broadcast_dropout=self.broadcast_dropout,
                deterministic=dropout is None,
                dtype=self.dtype,
                precision=self.precision,
                module=self if sow_weights else None,
                is_causal=is_causal,
                **forwarded,
            )
        return self.out(x, out_sharding=out_sharding)

    def paged(
        self,
        inputs: jax.Array,
        cache: PagedKVCache,
        *,
        layer: int | jax.Array = 0,
        page_table: jax.Array,
        kv_lengths: jax.Array,
        query_starts: jax.Array,
    ) -> tuple[jax.Array, PagedKVCache]:
        """Self-attention of ragged sequences over a shared paged cache, for serving.

        Rotary positions are those of the tokens in their sequences. No dropout.

        Args:
          inputs: `[tokens, in_features]`, the tokens of all sequences one after another.
          cache: Of the heads of this module and the dtype of its computation.
          layer: The layer of the cache that is this module's.
          page_table: As in `paged_attention`.
          kv_lengths: As in `paged_attention`.
          query_starts: As in `paged_attention`.

        Returns:
          `[tokens, out_features]`, and the cache with the keys and values of these tokens.

        Raises:
          ValueError: As `paged_attention`.
          NotImplementedError: As `paged_attention`, or an `attention_fn` that is not this
            package's.
        """
        refuse({"attention_fn": self.attention_fn is not pallas_attention_fn}, DECODING)
        query, key, value = self._project(inputs, inputs, inputs, None)
        _, position = token_places(inputs.shape[0], kv_lengths, query_starts)
        query, key = turn(self.options.rotary, query, key, pair_positions(position))
        output, cache = paged_step(
            self.options,
            query,
            key,
            value,
            cache,
            layer=layer,
            page_table=page_table,
            kv_lengths=kv_lengths,
            query_starts=query_starts,
        )
        return self.out(output), cache

    def init_cache(
        self,
        input_shape: Shape,
        dtype: Dtype | None = None,
        *,
        page_size: int = DEFAULT_PAGE_SIZE,
    ) -> None:
        """Makes an empty cache, `self.cache`, that decoding needs.

        Decoding more than there is room for raises; under `jit`, where it cannot, nothing is
        written, the output is NaN, and `self.cache.is_full` is set.

        Args:
          input_shape: `[batch..., length, features]`: the most tokens of each row.
          dtype: Of keys and values; None for `dtype` of the module, or else its `param_dtype`.
          page_size: Tokens per page.

        Raises:
          ValueError: A shape without length and features, or a size below 1.

        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> layer = MultiHeadAttention(num_heads=2, in_features=8, decode=True, rngs=nnx.Rngs(0))
        >>> layer.init_cache((1, 16, 8))
        >>> prompt, token = jnp.ones((1, 5, 8)), jnp.ones((1, 1, 8))
        >>> layer(prompt).shape, layer(token).shape
        ((1, 5, 8), (1, 1, 8))
        >>> int(layer.cache.index)
        6
        """
        if len(input_shape) < 2:
            raise ValueError(
                f"input_shape={input_shape} must be that of the inputs, [batch..., length, "
                "features]."
            )
        *batch_shape, max_length, _ = input_shape
        dtype = self.dtype if dtype is None else dtype
        self.cache = nnx.Cache(
            DecodeCache.create(
                batch_shape=tuple(batch_shape),
                max_length=max_length,
                page_size=page_size,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                dtype=jnp.dtype(self.param_dtype if dtype is None else dtype),
            )
        )

    def set_view(
        self,
        deterministic: bool | None = None,
        decode: bool | None = None,
        batch_size: int | Shape | None = None,
        max_length: int | None = None,
    ) -> None:
        """Used by `nnx.view`.

        Args:
          deterministic: Whether dropout is off.
          decode: Whether calls decode from the cache.
          batch_size: With `max_length`, makes an empty cache for a batch of this size or shape.
          max_length: The most tokens of each row.
        """
        if deterministic is not None:
            self.deterministic = deterministic
        if decode is not None:
            self.decode = decode
        if (batch_size is None) != (max_length is None):
            raise ValueError(
                f"batch_size={batch_size} and max_length={max_length} must be given together."
            )
        if batch_size is not None and max_length is not None:
            batch_shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
            self.init_cache((*batch_shape, max_length, self.in_features))

    def _project(self, inputs_q, inputs_k, inputs_v, sharding):
        """Queries, keys and values by heads, normalized if so configured."""
        for name, x, features in (
            ("inputs_q", inputs_q, self.in_features),
            ("inputs_k", inputs_k, self.in_kv_features),
            ("inputs_v", inputs_v, self.in_kv_features),
        ):
            if x.shape[-1] != features:
                raise ValueError(
                    f"{name} has {x.shape[-1]} features (shape {x.shape}); the module was built "
                    f"for {features}."
                )
        query = self.query(inputs_q, out_sharding=sharding)
        key = self.key(inputs_k, out_sharding=sharding)
        value = self.value(inputs_v, out_sharding=sharding)
        if self.query_ln is not None and self.key_ln is not None:
            query, key = self.query_ln(query), self.key_ln(key)
        return query, key, value

    def _dropout(self, deterministic, rngs) -> Dropout | None:
        """What `dot_product_attention` is told about dropout."""
        if self.dropout_rate == 0:
            return None
        deterministic = first_from(
            deterministic,
            self.deterministic,
            error_msg="deterministic was given neither to the call nor to the constructor.",
        )
        if deterministic:
            return None
        stream = self.rngs if rngs is None else rngs
        if stream is None:
            raise ValueError(
                "Dropout needs random numbers: pass rngs to the call, or build the module with "
                "keep_rngs=True."
            )
        key = stream.dropout() if isinstance(stream, nnx.Rngs) else stream()
        return Dropout(rate=self.dropout_rate, key=key, broadcast=self.broadcast_dropout)
