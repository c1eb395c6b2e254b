"""One suite that every implementation of attention must pass.

An implementation is a function with the signature of `reference.attend`. `checks` lists what it
must pass: cases, whose values and gradients are compared with the reference in float64, and
promises that need no tolerance (what is hidden has no effect at all). A test file says

    @pytest.mark.parametrize("check", conformance.checks(), ids=str)
    def test_conforms(check):
        check(attend)
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from flax_pallas_attn import reference
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Positions, SegmentIds

# Largest error as a share of the largest value, or of 1 where all values are smaller: gradients
# are differences of products of that size. Rounding alone gives at most a third of these.
TOLERANCE = {"float64": 1e-13, "float32": 3e-6, "float16": 2.5e-3, "bfloat16": 1.8e-2}

# What these tests spend their time on is compiling; no optimization halves it. The pass left out
# makes of some bfloat16 products what XLA cannot run on a CPU (jax 0.12: "Unsupported element type
# for DotThunk::Execute").
quick_jit = functools.partial(
    jax.jit,
    compiler_options={
        "xla_backend_optimization_level": 0,
        "xla_disable_hlo_passes": "transpose-folding",
    },
)

Attend = Callable[..., tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A call of attention. Arrays are standard normal, independent, and drawn from the name.

    Attributes:
      name: Says what is looked at.
      mask: Makes the mask from the case and a generator.
      logits: Likewise the logits' options.
      query_factor: Factor on the queries.
      dtypes: In which the case is tried.
    """

    name: str
    batch: int = 2
    heads: int = 4
    kv_heads: int = 2
    queries: int = 40
    keys: int = 56
    head_size: int = 16
    value_size: int = 16
    mask: Callable[["Case", np.random.Generator], Mask] = lambda case, random: Mask()
    logits: Callable[["Case", np.random.Generator], Logits] = lambda case, random: Logits()
    query_factor: float = 1.0
    dtypes: tuple[str, ...] = ("float32",)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """The arrays of a case, in NumPy.

    Attributes:
      arrays: "query", "key", "value", and "bias" and "sinks" where there are any: all that has a
        gradient.
      mask: Who may attend to whom.
      logits: Without what `arrays` holds.
      cotangents: Of output and logsumexp.
    """

    arrays: dict[str, np.ndarray]
    mask: Mask
    logits: Logits
    cotangents: tuple[np.ndarray, np.ndarray]


def make_call(case: Case, dtype: str) -> Call:
    random = np.random.default_rng(zlib.crc32(case.name.encode()))

    def normal(*shape):
        return random.standard_normal(shape).astype(dtype)

    arrays = {
        "query": normal(case.batch, case.heads, case.queries, case.head_size),
        "key": normal(case.batch, case.kv_heads, case.keys, case.head_size),
        "value": normal(case.batch, case.kv_heads, case.keys, case.value_size),
    }
    arrays["query"] = (arrays["query"] * case.query_factor).astype(dtype)
    sums = np.promote_types(dtype, np.float32) if dtype != "bfloat16" else np.float32
    cotangents = (
        normal(case.batch, case.heads, case.queries, case.value_size),
        normal(case.batch, case.heads, case.queries).astype(sums),
    )
    mask, logits = case.mask(case, random), case.logits(case, random)
    arrays |= {
        name: getattr(logits, name).astype(sums)
        for name in ("bias", "sinks")
        if getattr(logits, name) is not None
    }
    logits = dataclasses.replace(logits, bias=None, sinks=None)
    return Call(arrays=arrays, mask=mask, logits=logits, cotangents=cotangents)


def run(attend: Attend, call: Call, *, compiled: bool = True) -> dict[str, np.ndarray]:
    """Output, logsumexp, and "d<name>", the gradient of each array."""
    function = _program(attend) if compiled else functools.partial(_values_and_gradients, attend)
    arguments = (call.arrays, call.mask, call.logits, call.cotangents)
    return jax.tree.map(np.asarray, function(*jax.tree.map(jnp.asarray, arguments)))


@functools.cache
def _program(attend: Attend):
    return quick_jit(functools.partial(_values_and_gradients, attend))


def _values_and_gradients(attend, arrays, mask, logits, cotangents):
    def differentiable(arrays):
        options = {name: arrays[name] for name in ("bias", "sinks") if name in arrays}
        return attend(
            arrays["query"],
            arrays["key"],
            arrays["value"],
            mask,
            dataclasses.replace(logits, **options),
            scale=arrays["query"].shape[-1] ** -0.5,
        )

    (output, logsumexp), pullback = jax.vjp(differentiable, arrays)
    (gradients,) = pullback(cotangents)
    gradients = {f"d{name}": gradient for name, gradient in gradients.items()}
    return {"output": output, "logsumexp": logsumexp, **gradients}


@functools.cache
def truth(case: Case, dtype: str) -> dict[str, np.ndarray]:
    """The reference in float64, on inputs rounded to `dtype`."""
    call = make_call(case, dtype)
    arrays, cotangents = jax.tree.map(
        lambda x: x.astype(np.float64), (call.arrays, call.cotangents)
    )
    with jax.enable_x64(True):
        exact = dataclasses.replace(call, arrays=arrays, cotangents=cotangents)
        return run(reference.attend, exact)


def check_case(
    attend: Attend, case: Case, dtype: str = "float32", *, compiled: bool = True
) -> None:
    """Compares an implementation with the truth, in value and in every gradient."""
    call = make_call(case, dtype)
    actual, expected = run(attend, call, compiled=compiled), truth(case, dtype)
    assert actual["output"].dtype == np.dtype(dtype)
    assert actual["logsumexp"].dtype == call.cotangents[1].dtype
    for name, value in expected.items():
        assert_close(actual[name], value, TOLERANCE[dtype], name)


def assert_close(
    actual: np.ndarray, expected: np.ndarray, tolerance: float, name: str, least: float = 1.0
) -> None:
    """Compares by the largest value, or by `least` where all values are smaller."""
    assert actual.shape == expected.shape, name
    actual = actual.astype(np.float64)
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(actual[~finite], expected[~finite], name)
    largest = max(least, np.abs(expected[finite]).max(initial=0))
    error = np.abs(actual[finite] - expected[finite]).max(initial=0) / largest
    # Written so that a NaN fails.
    assert error <= tolerance, f"{name}: relative error {error:.1e}, at most {tolerance:.1e}"


# Masks.


def segments(case: Case, random: np.random.Generator, padding: bool = True) -> SegmentIds:
    """Three documents a row, cut elsewhere in each row, and padding at the end."""

    def ids(count):
        cuts = np.sort(random.integers(0, count + 1, (case.batch, 3 if padding else 2)), axis=1)
        index = (np.arange(count)[None, :, None] >= cuts[:, None]).sum(-1)
        return np.where(index == 3, -1, index).astype(np.int32)

    return SegmentIds(ids(case.queries), ids(case.keys))


def lengths(case: Case, random: np.random.Generator) -> SegmentIds:
    """Row 0 has all its queries and a few keys, row 1 few queries and all its keys."""

    def ids(count, short):
        length = np.full((case.batch, 1), count)
        length[short % case.batch] = 1 + count // 4
        return np.where(np.arange(count) < length, 0, -1).astype(np.int32)

    return SegmentIds(ids(case.queries, 1), ids(case.keys, 0))


def positions(case: Case, random: np.random.Generator) -> Positions:
    """Any order, and gaps."""

    def draw(count):
        rows = [random.permutation(count + 9)[:count] for _ in range(case.batch)]
        return np.stack(rows).astype(np.int32)

    return Positions(draw(case.queries), draw(case.keys))


def dense(*axes: str) -> Callable[[Case, np.random.Generator], Mask]:
    """A random mask that varies along the named axes of `BNTS` and broadcasts over the others."""

    def make(case, random):
        allowed = random.random(_broadcast_shape(case, axes)) < 0.6
        return Mask(dense=allowed.astype(np.int8))

    return make


def _broadcast_shape(case: Case, axes: Iterable[str]) -> tuple[int, ...]:
    sizes = {"B": case.batch, "N": case.heads, "T": case.queries, "S": case.keys}
    return tuple(size if axis in axes else 1 for axis, size in sizes.items())


def prefix(query_position, key_position):
    """Prefix-LM: causal, but all see the first ten."""
    return (key_position <= query_position) | (key_position < 10)


def half_padding(case: Case, random: np.random.Generator) -> Mask:
    """Rows that see nothing: half a row of the batch, and all of another."""
    query = np.zeros((case.batch, case.queries), np.int32)
    key = np.zeros((case.batch, case.keys), np.int32)
    query[0, case.queries // 2 :] = -1
    key[-1] = -1
    return Mask(lower=0, segment_ids=SegmentIds(query, key))


def empty_rows(case: Case, random: np.random.Generator) -> Mask:
    allowed = random.random((case.batch, 1, case.queries, case.keys)) < 0.6
    allowed[0, :, 3] = False
    allowed[1, :, case.queries // 2 :] = False
    return Mask(dense=allowed.astype(np.float32))


# Options of the logits.


def bias(*axes: str, hidden: float = 0.0) -> Callable[[Case, np.random.Generator], Logits]:
    """A bias that varies along the named axes, a share of it -inf."""

    def make(case, random):
        shape = _broadcast_shape(case, axes)
        values = random.standard_normal(shape).astype(np.float32)
        return Logits(bias=np.where(random.random(shape) < hidden, -np.inf, values))

    return make


def dropout(rate: float, broadcast: bool = False) -> dict[str, Any]:
    return {
        "dropout_seed": np.array([17, 4_000_000_000], np.uint32),
        "dropout_rate": rate,
        "dropout_broadcast": broadcast,
    }


def everything(case: Case, random: np.random.Generator) -> Logits:
    return Logits(
        soft_cap=1.5,
        bias=random.standard_normal((1, case.heads, case.queries, case.keys)).astype(np.float32),
        slopes=np.linspace(0.05, 0.2, case.heads, dtype=np.float32),
        sinks=random.standard_normal(case.heads).astype(np.float32),
        **dropout(0.3),
    )


def cases(queries: int = 40, keys: int = 56) -> list[Case]:
    """All cases; those about no size in particular have this one."""
    case = functools.partial(Case, queries=queries, keys=keys)
    both = ("float32", "bfloat16")
    return [
        case(name="nothing hidden"),
        case(name="causal", mask=lambda c, r: Mask(lower=0), dtypes=both),
        case(
            name="causal, aligned at the end, shared by a group of two",
            mask=lambda c, r: Mask(lower=0, query_offset=c.keys - c.queries),
        ),
        case(
            name="causal, queries from far behind the keys see all",
            mask=lambda c, r: Mask(lower=0, query_offset=10 * c.keys),
        ),
        case(name="window", mask=lambda c, r: Mask(lower=-3, upper=5, query_offset=7)),
        case(
            name="causal window of one key, one head",
            heads=1,
            kv_heads=1,
            mask=lambda c, r: Mask(lower=0, upper=0),
        ),
        case(name="segments", mask=lambda c, r: Mask(segment_ids=segments(c, r))),
        case(
            name="segments, causal, window",
            mask=lambda c, r: Mask(lower=0, upper=12, segment_ids=segments(c, r)),
            dtypes=both,
        ),
        case(name="lengths", mask=lambda c, r: Mask(segment_ids=lengths(c, r))),
        case(
            name="lengths, causal",
            mask=lambda c, r: Mask(lower=0, query_offset=3, segment_ids=lengths(c, r)),
        ),
        case(name="dense", mask=dense("B", "N", "T", "S")),
        case(name="dense, shared by batch and heads", mask=dense("T", "S")),
        case(name="dense, of keys", mask=dense("B", "S")),
        case(name="dense, of queries and heads", mask=dense("N", "T")),
        case(
            name="dense, causal, segments",
            mask=lambda c, r: dataclasses.replace(
                dense("B", "T", "S")(c, r), lower=0, segment_ids=segments(c, r)
            ),
        ),
        case(
            name="rule, window, offset",
            mask=lambda c, r: Mask(rule=prefix, upper=20, query_offset=5),
        ),
        case(
            name="positions, causal, window",
            mask=lambda c, r: Mask(lower=0, upper=25, positions=positions(c, r)),
        ),
        case(
            name="positions, segments, causal, rule",
            mask=lambda c, r: Mask(
                lower=0, rule=prefix, positions=positions(c, r), segment_ids=segments(c, r)
            ),
        ),
        case(
            name="six heads, three KV heads, sizes 40 and 24",
            heads=6,
            kv_heads=3,
            head_size=40,
            value_size=24,
            mask=lambda c, r: Mask(lower=0),
            dtypes=both,
        ),
        Case(name="one query", queries=1, keys=129, mask=lambda c, r: Mask(lower=-90)),
        Case(name="one key", queries=127, keys=1, mask=lambda c, r: Mask(lower=0)),
        Case(name="one of each", queries=1, keys=1, heads=2, head_size=1, value_size=1),
        Case(
            name="129 queries, 127 keys",
            kv_heads=1,
            queries=129,
            keys=127,
            mask=lambda c, r: Mask(lower=0, query_offset=-2),
        ),
        Case(
            name="a thousand of each",
            batch=1,
            heads=2,
            kv_heads=1,
            queries=1000,
            keys=1000,
            mask=lambda c, r: Mask(lower=0),
        ),
        case(name="half a row and a whole row of padding", mask=half_padding),
        case(name="dense rows without keys", mask=empty_rows),
        case(
            name="all keys in the future",
            mask=lambda c, r: Mask(lower=0, query_offset=-c.queries),
        ),
        Case(
            name="large logits, more queries than keys",
            queries=96,
            keys=8,
            query_factor=3.0,
            mask=lambda c, r: Mask(lower=0),
        ),
        case(
            name="soft cap",
            mask=lambda c, r: Mask(lower=0),
            logits=lambda c, r: Logits(soft_cap=1.5),
        ),
        case(name="bias", logits=bias("B", "N", "T", "S")),
        case(
            name="bias, shared by batch and heads, causal",
            mask=lambda c, r: Mask(lower=0),
            logits=bias("T", "S"),
        ),
        case(name="bias, of keys, a third -inf", logits=bias("B", "S", hidden=0.3)),
        case(name="bias, of queries, most -inf", logits=bias("N", "T", hidden=0.8)),
        case(
            name="ALiBi, positions",
            mask=lambda c, r: Mask(lower=0, positions=positions(c, r)),
            logits=lambda c, r: Logits(slopes=np.linspace(0.01, 0.3, c.heads, dtype=np.float32)),
        ),
        case(
            name="sinks, rows without keys",
            mask=empty_rows,
            logits=lambda c, r: Logits(sinks=r.standard_normal(c.heads).astype(np.float32)),
        ),
        case(
            name="a sink that takes all",
            logits=lambda c, r: Logits(sinks=np.full(c.heads, 300, np.float32)),
        ),
        case(
            name="dropout, offset",
            mask=lambda c, r: Mask(lower=0, query_offset=3),
            logits=lambda c, r: Logits(**dropout(0.3)),
        ),
        case(
            name="dropout, shared by batch and heads, positions",
            mask=lambda c, r: Mask(positions=positions(c, r)),
            logits=lambda c, r: Logits(**dropout(0.6, broadcast=True)),
        ),
        case(
            name="every option, segments, causal",
            mask=lambda c, r: Mask(lower=0, segment_ids=segments(c, r)),
            logits=everything,
            dtypes=both,
        ),
    ]


# Promises without a tolerance.


def check_hidden_keys(
    attend: Attend, poison: float, mask: Mask, hidden: np.ndarray, *, compiled: bool = True
) -> None:
    """Keys that nobody sees have no effect, whatever they hold, and no gradient.

    Args:
      attend: The implementation.
      poison: What the hidden keys and their values hold.
      mask: For a batch of two.
      hidden: Which keys nobody sees, bool `[2, S]`.
    """
    batch, keys = hidden.shape
    case = Case(name="hidden keys", batch=batch, keys=keys, mask=lambda c, r: mask)
    call = make_call(case, "float32")
    clean = run(attend, call, compiled=compiled)
    where = hidden[:, None, :, None]
    changed = {name: np.where(where, poison, call.arrays[name]) for name in ("key", "value")}
    arrays = call.arrays | {name: x.astype(np.float32) for name, x in changed.items()}
    poisoned = run(attend, dataclasses.replace(call, arrays=arrays), compiled=compiled)
    for name, value in clean.items():
        np.testing.assert_array_equal(poisoned[name], value, name)
    for name in ("dkey", "dvalue"):
        assert not np.where(where, poisoned[name], 0).any(), name


def hidden_keys(queries: int, keys: int) -> dict[str, tuple[Mask, np.ndarray]]:
    """Masks for `queries` and `keys`, with the keys that nobody sees."""
    shape = (2, keys)
    index = np.broadcast_to(np.arange(keys), shape)
    of_length = index < np.array([[keys // 3], [keys]])
    padding = np.where(of_length, 0, -1).astype(np.int32)
    some = (index % 5 == 2) | (index > keys - 9)
    return {
        "future": (Mask(lower=0), index >= queries),
        "left of the window": (Mask(upper=4, query_offset=keys), index < keys - 4),
        "beyond the length": (
            Mask(segment_ids=SegmentIds(np.zeros((2, queries), np.int32), padding)),
            ~of_length,
        ),
        "masked": (Mask(dense=~some[:, None, None, :]), some),
        "of a rule": (Mask(rule=lambda i, j: j % 3 != 1), index % 3 == 1),
    }


def check_padding_queries(attend: Attend, *, compiled: bool = True) -> None:
    """Queries of a padding segment come out zero and have no effect, whatever they hold."""
    ids = np.zeros((2, 40), np.int32)
    ids[0, 13:] = -1
    keys = np.zeros((2, 56), np.int32)
    case = Case(name="padding queries", mask=lambda c, r: Mask(segment_ids=SegmentIds(ids, keys)))
    call = make_call(case, "float32")
    clean = run(attend, call, compiled=compiled)
    query = np.where(ids[:, None, :, None] < 0, np.float32(np.nan), call.arrays["query"])
    arrays = call.arrays | {"query": query}
    poisoned = run(attend, dataclasses.replace(call, arrays=arrays), compiled=compiled)
    for name, value in clean.items():
        np.testing.assert_array_equal(poisoned[name], value, name)
    for name in ("output", "dquery"):
        assert not clean[name][0, :, 13:].any(), name


def check_documents(attend: Attend, poison: float, causal: bool, *, compiled: bool = True) -> None:
    """What happens in one document of a packed row leaves the other bit-equal, gradients too."""
    size, first = 48, 21
    ids = np.broadcast_to((np.arange(size) >= first).astype(np.int32), (2, size))
    case = Case(
        name="documents",
        queries=size,
        keys=size,
        mask=lambda c, r: Mask(lower=0 if causal else None, segment_ids=SegmentIds(ids, ids)),
    )
    call = make_call(case, "float32")
    arrays = {name: x.copy() for name, x in call.arrays.items()}
    # Row 0: an entry of a key and one of a query. Row 1: of a value.
    arrays["key"][0, :, 5, 3] += poison
    arrays["query"][0, :, 9, 2] += poison
    arrays["value"][1, :, 7, 1] += poison
    clean = run(attend, call, compiled=compiled)
    poisoned = run(attend, dataclasses.replace(call, arrays=arrays), compiled=compiled)
    for name, value in clean.items():
        np.testing.assert_array_equal(poisoned[name][:, :, first:], value[:, :, first:], name)
    seen_from = 9 if causal else 0
    output = poisoned["output"][:, :, seen_from:first]
    if np.isnan(poison):
        assert np.isnan(output).all(), "what sees it is not NaN as a whole"
    else:  # an infinite key gives NaN, or a score of -inf, which hides it
        rows = (output != clean["output"][:, :, seen_from:first]).any(axis=(1, 3))
        assert rows.all(), "what sees it does not change"


def check_nan_query(attend: Attend, *, compiled: bool = True) -> None:
    """A query that holds NaN is NaN in output and logsumexp, and the others are as before."""
    # XLA's CPU backend passes over a NaN in a maximum of rows of such a length.
    case = Case(name="nan query", queries=40, keys=200, heads=2, mask=lambda c, r: Mask(lower=0))
    call = make_call(case, "float32")
    query = call.arrays["query"].copy()
    query[0, :, 30, 3] = np.nan
    clean = run(attend, call, compiled=compiled)
    poisoned = run(
        attend, dataclasses.replace(call, arrays=call.arrays | {"query": query}), compiled=compiled
    )
    others = np.ones(query.shape[:3], bool)
    others[0, :, 30] = False
    for name in ("output", "logsumexp"):
        assert np.isnan(poisoned[name][~others]).all(), name
        np.testing.assert_array_equal(poisoned[name][others], clean[name][others], name)


@dataclasses.dataclass(frozen=True)
class Check:
    """Something to pass: call it with the implementation.

    Attributes:
      name: For the test's id.
      function: Takes the implementation, and `compiled`.
      uses: The logits' options that it needs, as `Logits.used` names them.
    """

    name: str
    function: Callable[..., None]
    uses: tuple[str, ...] = ()

    def __call__(self, attend: Attend, *, compiled: bool = True) -> None:
        self.function(attend, compiled=compiled)

    def __str__(self) -> str:
        return self.name


def checks(
    *,
    queries: int = 40,
    keys: int = 56,
    dtypes: Iterable[str] = ("float32", "bfloat16"),
    without: Iterable[str] = (),
) -> list[Check]:
    """Everything that an implementation must pass.

    Args:
      queries: T, where a case is about no size in particular: a few tiles.
      keys: S, likewise.
      dtypes: That the implementation has.
      without: Options of the logits that it does not have, as `Logits.used` names them.
    """
    found = []
    for case in cases(queries, keys):
        uses = case.logits(case, np.random.default_rng(0)).used
        for dtype in case.dtypes:
            if dtype in dtypes:
                function = functools.partial(check_case, case=case, dtype=dtype)
                found.append(Check(f"{case.name}, {dtype}", function, uses))
    for name, (mask, hidden) in hidden_keys(40, keys).items():
        for poison in (np.nan, np.inf):
            function = functools.partial(check_hidden_keys, poison=poison, mask=mask, hidden=hidden)
            found.append(Check(f"{poison} in keys {name}", function))
    found.append(Check("nan in padding queries", check_padding_queries))
    found.append(Check("nan in a query", check_nan_query))
    for poison in (np.nan, -np.inf, 1.5):
        for causal in (False, True):
            function = functools.partial(check_documents, poison=poison, causal=causal)
            name = f"{poison} in another document{', causal' if causal else ''}"
            found.append(Check(name, function))
    return [check for check in found if not set(check.uses) & set(without)]
