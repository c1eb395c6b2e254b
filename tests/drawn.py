"""Combinations of everything that a call of attention may have, for hypothesis to draw."""

import dataclasses
import itertools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np

from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Positions
from tests import conformance
from tests.conformance import Attend, Case


@dataclasses.dataclass(frozen=True, kw_only=True)
class Combination:
    """A call, said in values that print: what a failing example shows can be pasted back.

    Attributes:
      batch: B.
      kv_heads: K.
      group: Query heads of each.
      queries: T.
      keys: S.
      head_size: H.
      value_size: Hv.
      lower: As in `Mask`; 0 is causal.
      upper: As in `Mask`.
      query_offset: As in `Mask`; nothing where there are positions.
      rule: Whether there is a rule, that of a prefix-LM.
      rows: None, or segment ids: "segments" of packed rows, "lengths".
      positions: None, "any order", or "offsets": of the queries, one for each row.
      dense: Axes of a dense mask, of "BNTS"; None for none.
      bias: Axes of a bias, a part of it -inf; likewise.
      soft_cap: As in `Logits`.
      alibi: Whether there is ALiBi.
      sinks: Whether there are sinks.
      dropout: None, "own" pattern of each row and head, or "shared".
      mapped: Whether the rows of the batch come one by one, under `jax.vmap`.
      seed: Of all values.
    """

    batch: int
    kv_heads: int
    group: int
    queries: int
    keys: int
    head_size: int
    value_size: int
    lower: int | None
    upper: int | None
    query_offset: int
    rule: bool
    rows: str | None
    positions: str | None
    dense: str | None
    bias: str | None
    soft_cap: float | None
    alibi: bool
    sinks: bool
    dropout: str | None
    mapped: bool
    seed: int

    def case(self) -> Case:
        return Case(
            name=f"drawn with {self.seed}",
            batch=self.batch,
            heads=self.kv_heads * self.group,
            kv_heads=self.kv_heads,
            queries=self.queries,
            keys=self.keys,
            head_size=self.head_size,
            value_size=self.value_size,
            mask=self._mask,
            logits=self._logits,
        )

    def check(self, attend: Attend, dtype: str = "float32") -> None:
        """Compares `attend` with the truth, in value and in every gradient.

        A gradient of few numbers may be small where what it sums is not, and then holds the
        rounding of that: all gradients are measured by the largest of them, and the tolerance is
        twice that of cases whose sizes are chosen.
        """
        case = self.case()
        attend = row_by_row(attend) if self.mapped else attend
        actual = conformance.run(attend, conformance.make_call(case, dtype))
        expected = conformance.truth(case, dtype)
        largest = max(np.abs(expected[name]).max() for name in expected if name.startswith("d"))
        for name, value in expected.items():
            tolerance = 2 * conformance.TOLERANCE[dtype]
            least = max(1.0, largest) if name.startswith("d") else 1.0
            conformance.assert_close(actual[name], value, tolerance, name, least)

    def _mask(self, case: Case, random: np.random.Generator) -> Mask:
        make_rows = {"segments": conformance.segments, "lengths": conformance.lengths}
        make_positions = {"any order": conformance.positions, "offsets": _offsets}
        return Mask(
            lower=self.lower,
            upper=self.upper,
            rule=conformance.prefix if self.rule else None,
            query_offset=0 if self.positions else self.query_offset,
            segment_ids=make_rows[self.rows](case, random) if self.rows else None,
            positions=make_positions[self.positions](case, random) if self.positions else None,
            dense=None
            if self.dense is None
            else conformance.dense(*self.dense)(case, random).dense,
        )

    def _logits(self, case: Case, random: np.random.Generator) -> Logits:
        options = conformance.everything(case, random)
        bias = None
        if self.bias is not None:
            bias = conformance.bias(*self.bias, hidden=0.2)(case, random).bias
        dropout = {}
        if self.dropout:
            dropout = conformance.dropout(0.4, broadcast=self.dropout == "shared")
        return Logits(
            soft_cap=self.soft_cap,
            bias=bias,
            slopes=options.slopes if self.alibi else None,
            sinks=options.sinks if self.sinks else None,
            **dropout,
        )


def combinations(most: int = 70, **fixed: st.SearchStrategy) -> st.SearchStrategy[Combination]:
    """Any combination, with at most `most` queries and keys; `fixed` fields as they say."""
    sizes = st.sampled_from([1, most]) | st.integers(1, most)
    head_sizes = st.integers(1, 24) | st.sampled_from([64, 80])
    seldom = st.sampled_from([False, False, True])
    axes = st.sampled_from(
        ["".join(axes) for count in range(5) for axes in itertools.combinations("BNTS", count)]
    )
    strategies = {
        "batch": st.integers(1, 2),
        "kv_heads": st.integers(1, 2),
        "group": st.integers(1, 3),
        "queries": sizes,
        "keys": sizes,
        "head_size": head_sizes,
        "value_size": head_sizes,
        "lower": st.sampled_from([None, 0]) | st.integers(-most // 2, 5),
        "upper": st.none() | st.integers(-5, most // 2),
        "query_offset": st.just(0) | st.integers(-most, most),
        "rule": seldom,
        "rows": st.none() | st.sampled_from(["segments", "lengths"]),
        "positions": st.none() | st.sampled_from(["any order", "offsets"]),
        "dense": st.none() | axes,
        "bias": st.none() | axes,
        "soft_cap": st.sampled_from([None, None, 1.5]),
        "alibi": seldom,
        "sinks": seldom,
        "dropout": st.none() | st.sampled_from(["own", "shared"]),
        "mapped": seldom,
        "seed": st.integers(0, 2**32 - 1),
    }
    return st.builds(Combination, **(strategies | fixed))


def row_by_row(attend: Attend) -> Attend:
    """`attend` of each row of the batch by itself, under `jax.vmap`."""

    def mapped(query, key, value, mask, logits, *, scale):
        batch = query.shape[0]

        def rows(x):
            return jnp.broadcast_to(x, (batch, *x.shape[1:]))[:, None]

        def one(query, key, value, mask, bias, index):
            first = None if logits.dropout_seed is None else index
            options = dataclasses.replace(logits, bias=bias, first_batch=first)
            return attend(query, key, value, mask, options, scale=scale)

        arrays = jax.tree.map(rows, (query, key, value, mask, logits.bias))
        output, logsumexp = jax.vmap(one)(*arrays, jnp.arange(batch))
        return output[:, 0], logsumexp[:, 0]

    return mapped


def _offsets(case: Case, random: np.random.Generator) -> Positions:
    """Queries that stand elsewhere among the keys in each row, as in chunks of a prompt."""
    offset = random.integers(-case.queries, case.keys + 1, (case.batch, 1))
    query, key = np.arange(case.queries) + offset, np.arange(case.keys)
    shape = (case.batch, case.keys)
    return Positions(query.astype(np.int32), np.broadcast_to(key, shape).astype(np.int32))
