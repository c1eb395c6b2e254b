"""Wrong calls: each error names the argument, its value and what was expected."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from flax_pallas_attn import Alibi, Dropout, Positions, SegmentIds, dot_product_attention
from flax_pallas_attn.input_checks import check_attention

B, T, S, N, K, H = 2, 5, 7, 4, 2, 8

DEFAULTS = {
    "bias": None,
    "mask": None,
    "scale": None,
    "is_causal": False,
    "query_seq_lengths": None,
    "key_value_seq_lengths": None,
    "local_window_size": None,
    "segment_ids": None,
    "positions": None,
    "query_offset": 0,
    "logits_soft_cap": None,
    "sinks": None,
    "dropout": None,
    "layout": "BTNH",
}


def zeros(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def arrays(**changes):
    return {"query": zeros(B, T, N, H), "key": zeros(B, S, K, H), "value": zeros(B, S, K, H)} | (
        changes
    )


def check(**changes):
    return check_attention(**DEFAULTS | arrays() | changes)


def integers(*shape):
    return zeros(*shape, dtype=np.int32)


WRONG = {
    "layout": (
        {"layout": "BHTD"},
        r"layout='BHTD' is not known; use one of \('BTNH', 'BNTH'\)",
    ),
    "ranks differ": (
        {"query": zeros(T, N, H)},
        r"rank 4 \(or all rank 3.*shapes \(5, 4, 8\), \(2, 7, 2, 8\), \(2, 7, 2, 8\)",
    ),
    "rank 2": (
        {name: zeros(T, H) for name in ("query", "key", "value")},
        r"rank 4 \(or all rank 3.*shapes \(5, 8\)",
    ),
    "dtypes differ": (
        {"key": zeros(B, S, K, H, dtype=jnp.bfloat16)},
        r"share one dtype, got float32, bfloat16, float32; cast them, e\.g\. key\.astype",
    ),
    "integers": (
        {n: x.astype(np.int32) for n, x in arrays().items()},
        r"query, key and value must be floating point, one of .*; got int32",
    ),
    "batch of key": (
        {"key": zeros(3, S, K, H)},
        r"key has batch size 3, query has 2",
    ),
    "batch of value": (
        {"value": zeros(1, S, K, H)},
        r"value has batch size 1, query has 2",
    ),
    "length of value": (
        {"value": zeros(B, 6, K, H)},
        r"value has 6 positions and 2 heads, key has 7 and 2; they must agree \(is layout right",
    ),
    "heads of value": (
        {"value": zeros(B, S, 4, H)},
        r"value has 7 positions and 4 heads, key has 7 and 2",
    ),
    "head size of key": (
        {"key": zeros(B, S, K, 16)},
        r"key has head size 16, query has 8",
    ),
    "heads do not divide": (
        {"key": zeros(B, S, 3, H), "value": zeros(B, S, 3, H)},
        r"query has 4 heads and key has 3: .*multiple .*\(is layout right\?\)",
    ),
    "no key heads": (
        {"key": zeros(B, S, 0, H), "value": zeros(B, S, 0, H)},
        r"query has 4 heads and key has 0: ",
    ),
    "no keys": (
        {"key": zeros(B, 0, K, H), "value": zeros(B, 0, K, H)},
        r"S is 0 in shapes \(2, 4, 5, 8\), \(2, 2, 0, 8\)",
    ),
    "no queries": ({"query": zeros(B, 0, N, H)}, r"T is 0 in shapes"),
    "no heads": ({"query": zeros(B, T, 0, H)}, r"N is 0 in shapes"),
    "eight bits": (
        {n: x.astype(jnp.float8_e4m3fn) for n, x in arrays().items()},
        r"floating point, one of bfloat16, .*; got float8_e4m3fn",
    ),
    "no values": ({"value": zeros(B, S, K, 0)}, r"Hv is 0 in shapes"),
    "window of three": (
        {"local_window_size": (1, 2, 3)},
        r"local_window_size=\(1, 2, 3\) must be an int or a pair \(left, right\) of ints >= 0",
    ),
    "negative window": (
        {"local_window_size": (4, -1)},
        r"local_window_size=\(4, -1\) must be an int or a pair",
    ),
    "window of floats": (
        {"local_window_size": 2.5},
        r"local_window_size=2\.5 must be an int or a pair",
    ),
    "offset and positions": (
        {"query_offset": 3, "positions": Positions(integers(B, T), integers(B, S))},
        r"query_offset=3 and positions were both given.*leave query_offset out",
    ),
    "positions are an array": (
        {"positions": integers(B, T)},
        r"positions is a ndarray; pass Positions\(query=\[B, T\], key=\[B, S\]\)",
    ),
    "positions of another length": (
        {"positions": Positions(integers(B, T), integers(B, T))},
        r"positions\.key has shape \(2, 5\); \(2, 7\) is expected",
    ),
    "positions are floats": (
        {"positions": Positions(zeros(B, T), integers(B, S))},
        r"positions\.query has dtype float32; integers are expected",
    ),
    "offset is a float": (
        {"query_offset": 1.0},
        r"query_offset has dtype float32; integers are expected",
    ),
    "offset of another batch": (
        {"query_offset": integers(3)},
        r"query_offset must be an int or .* shape \(\) or \(2,\), got int32\[3\]",
    ),
    "segments are an array": (
        {"segment_ids": integers(B, T)},
        r"segment_ids is a ndarray; pass SegmentIds\(query=\[B, T\], key=\[B, S\]\)",
    ),
    "segments of another length": (
        {"segment_ids": SegmentIds(integers(B, S), integers(B, S))},
        r"segment_ids\.query has shape \(2, 7\); \(2, 5\) is expected",
    ),
    "query lengths are floats": (
        {"query_seq_lengths": zeros(B)},
        r"query_seq_lengths has dtype float32; integers are expected",
    ),
    "key lengths of another batch": (
        {"key_value_seq_lengths": integers(1)},
        r"key_value_seq_lengths must be integers of shape \(2,\).*got int32\[1\]",
    ),
    "mask of rank 1": (
        {"mask": integers(S)},
        r"mask has shape \(7,\); \[B, N, T, S\] = \[2, 4, 5, 7\] is expected",
    ),
    "mask of rank 5": (
        {"mask": integers(1, 1, 1, T, S)},
        r"mask has shape \(1, 1, 1, 5, 7\); \[B, N, T, S\] = \[2, 4, 5, 7\]",
    ),
    "mask turned": (
        {"mask": integers(S, T)},
        r"mask has shape \(7, 5\): its axis T \(queries\) has size 7, 1 or 5 is expected",
    ),
    "mask per key head": (
        {"mask": integers(B, K, T, S)},
        r"mask has shape \(2, 2, 5, 7\): its axis N \(query heads\) has size 2, 1 or 4 is "
        r"expected, so that it broadcasts to \[B, N, T, S\] = \[2, 4, 5, 7\]",
    ),
    "bias of another batch": (
        {"bias": zeros(3, N, T, S)},
        r"bias has shape \(3, 4, 5, 7\): its axis B \(batch\) has size 3, 1 or 2 is expected",
    ),
    "bias is a mask": (
        {"bias": zeros(T, S, dtype=bool)},
        r"bias has dtype bool; .*floating point\. Pass a boolean array as mask",
    ),
    "slopes per key head": (
        {"bias": Alibi(zeros(K))},
        r"bias=Alibi\(slopes\) has shape \(2,\); \(4,\) is expected, one number per query head",
    ),
    "sinks per batch row": (
        {"sinks": zeros(B, N)},
        r"sinks has shape \(2, 4\); \(4,\) is expected",
    ),
    "soft cap of zero": (
        {"logits_soft_cap": 0.0},
        r"logits_soft_cap=0\.0 must be positive and finite in float32",
    ),
    "dropout is a number": (
        {"dropout": 0.1},
        r"dropout is a float; pass Dropout\(rate=, key=, broadcast=\)",
    ),
    "dropout of everything": (
        {"dropout": Dropout(rate=1.0, key=jax.random.key(0))},
        r"dropout\.rate=1\.0 must lie in \[0, 1\) and be known",
    ),
    "bias of fewer keys": (
        {"bias": zeros(N, 1, 5)},
        r"bias has shape \(4, 1, 5\): its axis S \(keys\) has size 5, 1 or 7 is expected",
    ),
    "dropout of less than nothing": (
        {"dropout": Dropout(rate=-0.1, key=jax.random.key(0))},
        r"dropout\.rate=-0\.1 must lie in \[0, 1\)",
    ),
    "dropout of no number": (
        {"dropout": Dropout(rate=float("nan"), key=jax.random.key(0))},
        r"dropout\.rate=nan must lie in \[0, 1\)",
    ),
    "dropout without a key": (
        {"dropout": Dropout(rate=0.5, key=None)},  # pyright: ignore
        r"dropout\.rate=0\.5 needs a random key, got None: pass Dropout\(rate=, key=jax\.random",
    ),
    "scale per head": (
        {"scale": zeros(N)},
        r"scale must be a number, got an array float32\[4\]; .*multiplying query",
    ),
    "scale is an integer array": (
        {"scale": jnp.asarray(2)},
        r"scale must be a number, got an array int32\[\]",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_call(name):
    changes, message = WRONG[name]
    check()  # the call is right but for the change
    with pytest.raises(ValueError, match=message):
        check(**changes)


def test_public_function_checks_before_it_traces():
    """The error is the same under jit, and comes from the check."""
    key = zeros(B, S, 3, H)
    for call in (dot_product_attention, jax.jit(dot_product_attention)):
        with pytest.raises(ValueError, match=r"query has 4 heads and key has 3"):
            call(zeros(B, T, N, H), key, key)


@pytest.mark.parametrize(
    ("window", "is_causal", "band"),
    [
        (None, False, (None, None)),
        (None, True, (0, None)),
        (3, False, (-3, 3)),
        ((3, 1), False, (-1, 3)),
        ((3, 1), True, (0, 3)),
        (np.int64(3), False, (-3, 3)),
        (sys.maxsize, False, (None, None)),
        ((2**31, 0), False, (0, None)),
        ((2**40, 1), True, (0, None)),
    ],
)
def test_window_and_causality_are_one_band(window, is_causal, band):
    mask = check(local_window_size=window, is_causal=is_causal).mask
    assert (mask.lower, mask.upper) == band


def test_lengths_become_segments():
    mask = check(
        query_seq_lengths=np.array([2, 5]),
        segment_ids=SegmentIds(integers(B, T) + 6, integers(B, S) + 6),
        key_value_seq_lengths=np.array([7, 0]),
    ).mask
    np.testing.assert_array_equal(mask.segment_ids.query, [[6, 6, -1, -1, -1], [6, 6, 6, 6, 6]])
    np.testing.assert_array_equal(mask.segment_ids.key, [[6] * 7, [-1] * 7])


def test_arrays_come_out_heads_first():
    for layout, shapes in (
        ("BTNH", [(B, T, N, H), (B, S, K, H), (B, S, K, 3)]),
        ("BNTH", [(B, N, T, H), (B, K, S, H), (B, K, S, 3)]),
    ):
        call = check(
            layout=layout, **dict(zip(arrays(), [zeros(*shape) for shape in shapes], strict=True))
        )
        assert call.query.shape == (B, N, T, H)
        assert call.key.shape == (B, K, S, H)
        assert call.value.shape == (B, K, S, 3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"sharding": "data"}, r"sharding='data' must be AttentionSharding\(batch="),
        ({"tiles": 128}, r"tiles=128 must be Tiles\("),
    ],
)
def test_wrong_types_of_what_the_checks_do_not_see(changes, message):
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: dot_product_attention(**arrays(), **changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": "abc"}, "key='abc' is not an array"),
        ({"mask": "causal"}, "mask='causal' is not an array"),
        ({"dropout": Dropout(rate=0.1, key=3)}, "dropout.key=3 is not one random key"),  # pyright: ignore
        ({"dropout": Dropout(rate="0.1", key=None)}, "dropout.rate='0.1' must lie in"),  # pyright: ignore
        ({"logits_soft_cap": "high"}, "logits_soft_cap='high' must be a number"),
        ({"logits_soft_cap": np.inf}, "logits_soft_cap=inf must be positive and finite"),
        ({"logits_soft_cap": 1e39}, r"logits_soft_cap=1e\+39 must be positive and finite"),
        ({"is_causal": "no"}, "is_causal='no' must be True or False"),
        ({"scale": 1j}, r"scale must be a number, got an array complex64\[\]"),
        ({"local_window_size": (1,)}, r"local_window_size=\(1,\) must be an int or a pair"),
        (
            {"dropout": Dropout(rate=0.1, key=jax.random.split(jax.random.key(0)))},
            "is not one random key",
        ),
        ({"query_offset": 2**29}, "query_offset=536870912 is too far for positions in int32"),
        ({"query_offset": 2**40}, "query_offset=1099511627776 is too far"),
        ({"query_offset": np.array([0, -(2**30)])}, "query_offset=-1073741824 is too far"),
        ({"query_seq_lengths": np.full(B, 2**32)}, "query_seq_lengths holds 4294967296, which"),
        (
            {"segment_ids": SegmentIds(integers(B, T), np.full(S, 2**31, np.uint32))},  # pyright: ignore
            "segment_ids.key holds 2147483648, which int32 cannot",
        ),
        (
            {"positions": Positions([2**31] * T, integers(B, S))},  # pyright: ignore
            r"positions.query=\[2147483648, .* is not an array",
        ),
    ],
)
def test_wrong_types(changes, words):
    with pytest.raises(ValueError, match=words):
        check(**changes)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (lambda i, j: None, r"returns None for positions .* \(does it lack a return\?\)"),
        (lambda i: i > 3, "cannot be called: .*takes 1 positional argument"),
        (lambda i, j: (i - j) * 0.5, r"returns ShapeDtypeStruct\(shape=\(2, 3\), dtype=float32"),
        (lambda i, j: jnp.ones(7, bool), r"returns ShapeDtypeStruct\(shape=\(7,\)"),
    ],
)
def test_a_wrong_rule(rule, message):
    with pytest.raises(ValueError, match=message):
        check(mask=rule)


def test_a_rule_may_look_at_one_side():
    for rule in (lambda i, j: j % 3 != 1, lambda i, j: True):
        assert check(mask=rule).mask.rule is rule


@pytest.mark.parametrize(
    ("name", "wrap"),
    [
        ("is_causal", lambda x: x > 0),
        ("logits_soft_cap", lambda x: x),
        ("local_window_size", lambda x: x.astype(int)),
        ("dropout", lambda x: Dropout(rate=x, key=None)),
        ("mask", lambda x: lambda i, j: None),
    ],
)
def test_what_must_be_static_says_so(name, wrap):
    with pytest.raises(ValueError, match=f"^{name}"):
        jax.jit(lambda x: check(**{name: wrap(x)}) and None)(0.5)


def test_known_arrays_inside_jit_are_checked_too():
    """What jax computes of them there is traced; what is checked must not be."""
    ids = SegmentIds(jnp.ones((B, T), jnp.uint32), jnp.ones((B, S), jnp.uint32))
    offset = jnp.array([3, 4])
    query = jnp.ones((B, T, N, H))
    jax.eval_shape(lambda x: check(query=x, segment_ids=ids, query_offset=offset).query, query)


def test_lists_are_arrays():
    call = check(
        query_seq_lengths=[5, 5],
        positions=Positions([0] * T, [list(range(S))]),  # pyright: ignore
        mask=[[1] * S] * T,
    )
    assert call.mask.positions.query.shape == (B, T)
    assert call.mask.dense.shape == (1, 1, T, S)


def test_dropout_of_nothing_needs_no_key():
    assert check(dropout=Dropout(rate=0.0, key=None)).logits.used == ()  # pyright: ignore


@pytest.mark.parametrize(
    ("scale", "expected"),
    [(None, H**-0.5), (2, 2.0), (0.25, 0.25), (np.float32(0.5), 0.5)],
)
def test_scale_is_static_when_it_can_be(scale, expected):
    call = check(scale=scale)
    assert isinstance(call.scale, float)
    assert call.scale == expected
