"""Turns what a caller passes into what an implementation takes, or says what is wrong with it.

Everything here looks at shapes, dtypes and static values; no value of a traced array is read, and
nothing is traced that a wrong call would have to throw away.
"""

import dataclasses
import numbers
import os
import warnings
from typing import Any

import flax
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from flax_pallas_attn.logits import Alibi, Dropout, Logits
from flax_pallas_attn.masking import Mask, Positions, SegmentIds

LAYOUTS = ("BTNH", "BNTH")
DTYPES = ("bfloat16", "float16", "float32", "float64")

# Positions, and distances between them, are int32: the sum of an offset and a window is one too.
MOST_OFFSET = 2**29
NO_WINDOW = 2**30  # more than any two positions are apart

# A warning points at the caller: the first line of code that is none of these.
_NOT_THE_CALLER = tuple(
    os.path.dirname(file) + os.sep for file in (__file__, flax.__file__, jax.__file__)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """A checked call: arrays are heads first and have a batch axis.

    Attributes:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: What changes scores and probabilities.
      scale: Factor on the scores. A caller's traced one is already in `query`.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    mask: Mask
    logits: Logits
    scale: float


def check_attention(
    query,
    key,
    value,
    *,
    bias,
    mask,
    scale,
    is_causal,
    query_seq_lengths,
    key_value_seq_lengths,
    local_window_size,
    segment_ids,
    positions,
    query_offset,
    logits_soft_cap,
    sinks,
    dropout,
    layout,
) -> Call:
    """Checks the arguments of `dot_product_attention`, which documents them.

    Raises:
      ValueError: Names the argument, its value and what was expected.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not known; use one of {LAYOUTS}.")
    query, key, value = (
        as_array(x, name) for x, name in ((query, "query"), (key, "key"), (value, "value"))
    )
    ranks = {x.ndim for x in (query, key, value)}
    if ranks not in ({3}, {4}):
        raise ValueError(
            "query, key and value must all have rank 4 (or all rank 3, without a batch axis), got "
            f"shapes {query.shape}, {key.shape}, {value.shape}."
        )
    if not query.dtype == key.dtype == value.dtype:
        raise ValueError(
            "query, key and value must share one dtype, got "
            f"{query.dtype}, {key.dtype}, {value.dtype}; cast them, e.g. key.astype(query.dtype)."
        )
    if query.dtype not in DTYPES:
        raise ValueError(
            f"query, key and value must be floating point, one of {', '.join(DTYPES)}; got "
            f"{query.dtype}."
        )
    if query.ndim == 3:
        query, key, value = query[None], key[None], value[None]
    if layout == "BTNH":
        query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    _check_shapes(query, key, value)
    batch, heads, queries, head_dim = query.shape
    keys = key.shape[2]
    full = (batch, heads, queries, keys)

    if positions is not None and not _is_zero(query_offset):
        raise ValueError(
            f"query_offset={query_offset!r} and positions were both given; positions already say "
            "where each query stands: leave query_offset out."
        )
    lower, upper = check_band(is_causal, local_window_size)
    offset, positions = _check_positions(query_offset, positions, batch, queries, keys)
    segment_ids = _check_segments(
        segment_ids, query_seq_lengths, key_value_seq_lengths, batch, queries, keys
    )
    rule: Any = check_rule(mask) if callable(mask) else None
    dense = None if mask is None or rule is not None else _check_dense(mask, "mask", full)

    slopes = None
    if isinstance(bias, Alibi):
        slopes = _check_per_head(bias.slopes, "bias=Alibi(slopes)", heads)
        bias = None
    elif bias is not None:
        bias = _check_dense(bias, "bias", full)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise ValueError(
                f"bias has dtype {bias.dtype}; a bias is added to the scores and must be floating "
                "point. Pass a boolean array as mask."
            )
    seed, rate, broadcast = _check_dropout(dropout)
    scale = check_scale(scale, head_dim)
    if not isinstance(scale, float):
        query, scale = (query * scale).astype(query.dtype), 1.0
    return Call(
        query=query,
        key=key,
        value=value,
        mask=Mask(
            lower=lower,
            upper=upper,
            rule=rule,
            query_offset=offset,
            segment_ids=segment_ids,
            positions=positions,
            dense=dense,
        ),
        logits=Logits(
            soft_cap=check_soft_cap(logits_soft_cap),
            bias=bias,
            slopes=slopes,
            sinks=None if sinks is None else _check_per_head(sinks, "sinks", heads),
            dropout_seed=seed,
            dropout_rate=rate,
            dropout_broadcast=broadcast,
        ),
        scale=scale,
    )


def _check_shapes(query, key, value) -> None:
    (batch, heads, _, head_dim), (_, kv_heads, keys, _) = query.shape, key.shape
    for name, x in (("key", key), ("value", value)):
        if x.shape[0] != batch:
            raise ValueError(f"{name} has batch size {x.shape[0]}, query has {batch}.")
        if x.shape[2] != keys or x.shape[1] != kv_heads:
            raise ValueError(
                f"value has {value.shape[2]} positions and {value.shape[1]} heads, key has {keys} "
                f"and {kv_heads}; they must agree (is layout right?)."
            )
    if key.shape[3] != head_dim:
        raise ValueError(f"key has head size {key.shape[3]}, query has {head_dim}.")
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"query has {heads} heads and key has {kv_heads}: the number of query heads must be a "
            "multiple of the number of key heads (is layout right?)."
        )
    sizes = {"N": heads, "T": query.shape[2], "S": keys, "H": head_dim, "Hv": value.shape[3]}
    for name, size in sizes.items():
        if size == 0:
            raise ValueError(f"{name} is 0 in shapes {query.shape}, {key.shape}, {value.shape}.")


def as_array(x, name: str) -> jax.Array:
    """`x` as an array, be it numpy's or a list.

    Raises:
      ValueError: It is none; names the argument.
    """
    try:
        return jnp.asarray(x)
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{name}={x!r:.100} is not an array: {error}") from error


def as_integers(x, name: str) -> jax.Array:
    """As `as_array`, of integers that int32 can hold."""
    array = as_array(x, name)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} has dtype {array.dtype}; integers are expected.")
    int32 = np.iinfo(np.int32)
    if not isinstance(x, Tracer) and jnp.iinfo(getattr(x, "dtype", int32.dtype)).max > int32.max:
        for extreme in (np.min, np.max):
            value = extreme(np.asarray(x), initial=0)  # of x: the array may be narrower
            if not int32.min <= value <= int32.max:
                raise ValueError(f"{name} holds {value}, which int32 cannot.")
    return array


def check_flag(flag, name: str) -> bool:
    """True or False, known while tracing.

    Raises:
      ValueError: It is neither; names the argument.
    """
    if not isinstance(flag, (bool, np.bool_)):
        raise ValueError(
            f"{name}={flag!r} must be True or False and known while tracing; under jax.jit name it "
            "in static_argnames."
        )
    return bool(flag)


def symbolic_sizes(query: jax.Array, key: jax.Array, value: jax.Array, axes: str) -> str:
    """Sizes that are symbolic, as `jax.export` allows: "B=b, T=t", or "" for none.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`.
      value: `[B, K, S, Hv]`.
      axes: Letters of those that matter; H stands for Hv too.
    """
    sizes = {
        letter: size
        for letters, x in (("BKSH", value), ("BKSH", key), ("BNTH", query))
        for letter, size in zip(letters, x.shape, strict=True)
        if jax.export.is_symbolic_dim(size)
    }
    return ", ".join(f"{letter}={sizes[letter]}" for letter in axes if letter in sizes)


def check_rule(rule):
    """A mask rule that gives what `dot_product_attention` asks of it.

    Raises:
      ValueError: It cannot be called with two arrays of positions, or gives no booleans.
    """
    expected = (
        "a rule is elementwise, f(query_position, key_position) -> bool, on int32 arrays that "
        "broadcast"
    )
    positions = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((2, 1), (1, 3)))
    try:
        result = jax.eval_shape(rule, *positions)
    except (TypeError, ValueError) as error:
        raise ValueError(f"mask={rule!r} cannot be called: {error}; {expected}.") from error
    if (
        not isinstance(result, jax.ShapeDtypeStruct)
        or result.dtype != bool
        or result.shape not in ((), (1, 1), (2, 1), (1, 3), (2, 3))
    ):
        raise ValueError(
            f"mask={rule!r} returns {result} for positions of shapes (2, 1) and (1, 3) (does it "
            f"lack a return?); {expected}."
        )
    return rule


def warn(text: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the line that called this package, through flax's and jax's own code too."""
    warnings.warn(text, category, skip_file_prefixes=_NOT_THE_CALLER)


def check_soft_cap(soft_cap) -> float | None:
    """The soft cap as a number.

    Raises:
      ValueError: It is none that is known while tracing, or not positive.
    """
    if soft_cap is None:
        return None
    try:
        number = float(soft_cap)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"logits_soft_cap={soft_cap!r} must be a number that is known while tracing."
        ) from error
    float32 = np.finfo(np.float32)
    if not float(float32.tiny) <= number <= float(float32.max):
        raise ValueError(
            f"logits_soft_cap={soft_cap!r} must be positive and finite in float32 (None for none)."
        )
    return number


def check_band(is_causal, window) -> tuple[int | None, int | None]:
    """Causality and window as bounds on query position - key position, as `Mask` has them.

    Raises:
      ValueError: The window is none, or it is not known whether the mask is causal.
    """
    is_causal = check_flag(is_causal, "is_causal")
    lower = 0 if is_causal else None
    if window is None:
        return lower, None
    sides = (window, window) if isinstance(window, numbers.Integral) else window
    if (
        not isinstance(sides, tuple)
        or len(sides) != 2
        or not all(isinstance(side, (int, np.integer)) and side >= 0 for side in sides)
    ):
        raise ValueError(
            f"local_window_size={window!r} must be an int or a pair (left, right) of ints >= 0: "
            "the number of keys on each side that a query may see beside its own."
        )
    left, right = (int(side) if side < NO_WINDOW else None for side in sides)
    if right is not None and not is_causal:
        lower = -right
    return lower, left


def _is_zero(offset) -> bool:
    return isinstance(offset, numbers.Integral) and offset == 0


def _check_positions(offset, positions, batch, queries, keys) -> tuple[int, Positions | None]:
    if positions is not None:
        if not isinstance(positions, Positions):
            raise ValueError(
                f"positions is a {type(positions).__name__}; pass "
                "Positions(query=[B, T], key=[B, S])."
            )
        return 0, _check_pair(positions, "positions", batch, queries, keys)
    most = MOST_OFFSET - sum(
        size for size in (queries, keys) if not jax.export.is_symbolic_dim(size)
    )
    if isinstance(offset, numbers.Integral):
        _check_distance(int(offset), most)
        return int(offset), None
    offset = as_integers(offset, "query_offset")
    if offset.shape not in ((), (batch,)):
        raise ValueError(
            f"query_offset must be an int or an integer array of shape () or ({batch},), got "
            f"{offset.dtype}{list(offset.shape)}."
        )
    if not isinstance(offset, Tracer):
        for value in np.ravel(offset).tolist():
            _check_distance(value, most)
    start = jnp.broadcast_to(offset, (batch,)).astype(jnp.int32)[:, None]
    return 0, Positions(
        query=start + jnp.arange(queries, dtype=jnp.int32),
        key=jnp.broadcast_to(jnp.arange(keys, dtype=jnp.int32), (batch, keys)),
    )


def _check_distance(offset: int, most: int) -> None:
    if abs(offset) > most:
        raise ValueError(
            f"query_offset={offset} is too far for positions in int32: at most {most} either way. "
            "What is so far apart sees all or nothing; count positions from nearer."
        )


def _check_pair(pair, name, batch, queries, keys):
    checked = []
    for side, size in (("query", queries), ("key", keys)):
        x = as_integers(getattr(pair, side), f"{name}.{side}")
        if x.shape not in ((size,), (1, size), (batch, size)):
            raise ValueError(
                f"{name}.{side} has shape {x.shape}; ({batch}, {size}) is expected, one "
                f"entry per token, or ({size},) where all rows share it."
            )
        checked.append(jnp.broadcast_to(x.astype(jnp.int32), (batch, size)))
    return type(pair)(*checked)


def _check_segments(segment_ids, query_lengths, key_lengths, batch, queries, keys):
    """Segment ids and lengths as one: what lies beyond a length has segment -1."""
    if segment_ids is not None:
        if not isinstance(segment_ids, SegmentIds):
            raise ValueError(
                f"segment_ids is a {type(segment_ids).__name__}; pass "
                "SegmentIds(query=[B, T], key=[B, S])."
            )
        segment_ids = _check_pair(segment_ids, "segment_ids", batch, queries, keys)
    if query_lengths is None and key_lengths is None:
        return segment_ids
    if segment_ids is None:
        segment_ids = SegmentIds(
            query=jnp.zeros((batch, queries), jnp.int32), key=jnp.zeros((batch, keys), jnp.int32)
        )
    return SegmentIds(
        query=_cut(segment_ids.query, query_lengths, "query_seq_lengths"),
        key=_cut(segment_ids.key, key_lengths, "key_value_seq_lengths"),
    )


def _cut(ids, lengths, name):
    if lengths is None:
        return ids
    lengths = as_integers(lengths, name)
    if lengths.shape != ids.shape[:1]:
        raise ValueError(
            f"{name} must be integers of shape ({ids.shape[0]},), one per batch row, got "
            f"{lengths.dtype}{list(lengths.shape)}."
        )
    return jnp.where(jnp.arange(ids.shape[1]) < lengths[:, None], ids, -1)


def _check_dense(x, name, full):
    x = as_array(x, name)
    if x.ndim > 4 or x.ndim < 2:
        raise ValueError(
            f"{name} has shape {x.shape}; [B, N, T, S] = {list(full)} is expected, with 1 or a "
            "missing leading axis where it broadcasts."
        )
    padded = x.reshape((1,) * (4 - x.ndim) + x.shape)
    axes = ("B (batch)", "N (query heads)", "T (queries)", "S (keys)")
    for axis, size, expected in zip(axes, padded.shape, full, strict=True):
        if size not in (1, expected):
            raise ValueError(
                f"{name} has shape {x.shape}: its axis {axis} has size {size}, 1 or {expected} is "
                f"expected, so that it broadcasts to [B, N, T, S] = {list(full)}."
            )
    return padded


def _check_per_head(x, name, heads):
    x = as_array(x, name)
    if x.shape != (heads,):
        raise ValueError(
            f"{name} has shape {x.shape}; ({heads},) is expected, one number per query head."
        )
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _check_dropout(dropout) -> tuple[jax.Array | None, float, bool]:
    if dropout is None:
        return None, 0.0, False
    if not isinstance(dropout, Dropout):
        raise ValueError(
            f"dropout is a {type(dropout).__name__}; pass Dropout(rate=, key=, broadcast=)."
        )
    if not isinstance(dropout.rate, numbers.Real) or not 0 <= dropout.rate < 1:
        raise ValueError(
            f"dropout.rate={dropout.rate!r} must lie in [0, 1) and be known while tracing."
        )
    if dropout.rate == 0:
        return None, 0.0, False
    if dropout.key is None:
        raise ValueError(
            f"dropout.rate={dropout.rate} needs a random key, got None: pass "
            "Dropout(rate=, key=jax.random.key(seed)), or rate=0 when evaluating."
        )
    try:
        seed = jax.random.bits(dropout.key, (2,), jnp.uint32)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"dropout.key={dropout.key!r} is not one random key; pass jax.random.key(seed)."
        ) from error
    return seed, float(dropout.rate), check_flag(dropout.broadcast, "dropout.broadcast")


def check_scale(scale, head_dim: int) -> float | jax.Array:
    """The factor on the scores; an array only where the caller passed one.

    Raises:
      ValueError: It is no number.
      NotImplementedError: The head size is symbolic, and no scale was passed.
    """
    if scale is None:
        if jax.export.is_symbolic_dim(head_dim):
            raise NotImplementedError(
                f"scale=None is H ** -0.5, and the head size H is the symbolic dimension "
                f"{head_dim}. Export once for each head size, or pass scale."
            )
        return head_dim**-0.5
    if isinstance(scale, numbers.Real):
        return float(scale)
    scale = as_array(scale, "scale")
    if scale.shape != () or not jnp.issubdtype(scale.dtype, jnp.floating):
        raise ValueError(
            f"scale must be a number, got an array {scale.dtype}{list(scale.shape)}; scale heads "
            "one by one by multiplying query."
        )
    return scale
