"""Attention in plain XLA, tile by tile: O(T) memory, on CPU and on any device without a kernel.

The forward pass walks the key tiles of each query tile with a running softmax; the backward pass
walks the query tiles of each key tile and computes the probabilities again from the logsumexp.
Tiles that hold nothing are skipped, those that hide nothing run without a mask. What fits in one
tile runs without a loop.

Scores are held keys first, `[B, K, s, G, t]`, and keys and values are turned once before the
loops, so that no product has to turn a tile of scores: on CPU that is twice as fast. The group of
query heads that share a key head is an axis of the queries' side, so keys and values are never
repeated.

What is not finite is taken out of the products once, before the loops, and put back as NaN where
the mask can hide it: in the scores going forward, in the logsumexp of the row going backward.

Source: Milakov and Gimelshein, 2018 (arXiv 1805.02867), the running softmax; Dao, 2023
(arXiv 2307.08691), section 3.1, the passes.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp

from flax_pallas_attn import input_checks
from flax_pallas_attn import logits as logits_lib
from flax_pallas_attn.logits import Logits
from flax_pallas_attn.masking import Mask, Span, Tokens, tile_spans
from flax_pallas_attn.residuals import named
from flax_pallas_attn.sharding import vary_alike

TILE_SCORES = 2**19
"""Scores in a tile, batch and heads included: 2 MiB in float32, which a CPU's cache can hold."""


def reasons_against(query: jax.Array, key: jax.Array, value: jax.Array) -> list[str]:
    """Why this form cannot take a call; empty when it can. Arguments as `attend`."""
    symbolic = input_checks.symbolic_sizes(query, key, value, axes="NTKSH")
    return [f"{symbolic}: it takes a symbolic batch size, no other"] if symbolic else []


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    mask: Mask,
    logits: Logits,
    *,
    scale: float,
    precision: jax.lax.PrecisionLike = None,
    tiles: tuple[int, int] | None = None,
) -> tuple[jax.Array, jax.Array]:
    """softmax(scale * query key^T, masked) value, heads first; see `reference.attend`.

    Args:
      query: `[B, N, T, H]`.
      key: `[B, K, S, H]`, K divides N.
      value: `[B, K, S, Hv]`.
      mask: Who may attend to whom.
      logits: Soft cap, bias, ALiBi (not differentiated), sinks, dropout.
      scale: Factor on the scores.
      precision: Of all products.
      tiles: Queries and keys in a tile at most; None chooses.

    Returns:
      Output `[B, N, T, Hv]` in the query's dtype and logsumexp `[B, N, T]` in float32 (float64
      for float64 inputs).

    Raises:
      NotImplementedError: Sizes that are not known while tracing.
    """
    if reasons := reasons_against(query, key, value):
        raise NotImplementedError(
            f'implementation="xla" cannot take this call: {"; ".join(reasons)}. Use '
            'implementation="reference", whose memory grows with T * S, or export once for each '
            "of the sizes."
        )
    most_queries, most_keys = tiles or (_largest_tile(query.shape[0] * query.shape[1]),) * 2
    plan = _Plan(
        scale=scale,
        precision=precision,
        query_size=_tile_size(query.shape[2], most_queries),
        key_size=_tile_size(key.shape[2], most_keys),
    )
    return _attend(plan, *vary_alike((query, key, value, mask, logits)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Plan:
    """What is known while tracing, beyond shapes.

    Attributes:
      scale: Factor on the scores.
      precision: Of all products.
      query_size: Queries in a tile.
      key_size: Keys in a tile.
    """

    scale: float
    precision: jax.lax.PrecisionLike
    query_size: int
    key_size: int


def _largest_tile(rows: int) -> int:
    """The power of two, from 64 to 512, that keeps `rows` squares within `TILE_SCORES`."""
    if jax.export.is_symbolic_dim(rows):
        return 64
    return min(max(64, 2 ** int(math.log2(TILE_SCORES / rows) / 2)), 512)


def _tile_size(tokens: int, most: int) -> int:
    """As few tiles as `most` allows, of one size, so that little is padded."""
    return -(-tokens // -(-tokens // most))


@functools.partial(jax.custom_vjp, nondiff_argnames=("plan",))
def _attend(plan, query, key, value, mask, logits):
    return _forward(plan, query, key, value, mask, logits)


def _forward_and_save(plan, query, key, value, mask, logits):
    output, logsumexp = named(*_forward(plan, query, key, value, mask, logits))
    return (output, logsumexp), (query, key, value, mask, logits, output, logsumexp)


def _backward_from_saved(plan, saved, cotangents):
    return _backward(plan, *saved, *cotangents)


_attend.defvjp(_forward_and_save, _backward_from_saved)


def _forward(plan, query, key, value, mask, logits):
    """Output and logsumexp, a query tile at a time."""
    tiles = _Tiles(plan, query, key, mask, logits)
    batch, kv_heads, group = tiles.batch, tiles.kv_heads, tiles.group
    value_size = value.shape[-1]
    sums = jnp.promote_types(query.dtype, jnp.float32)
    poison = _poison(key) + _poison(value)
    q = tiles.grouped((query + _poison(query)).astype(query.dtype))
    k = tiles.pad_keys((key + poison).astype(key.dtype), 2)
    v_turned = _turned(tiles.pad_keys(jnp.where(poison == 0, value, 0), 2))

    def query_tile(i, results):
        q_tile = tiles.cut_queries(q, i, 3)

        def key_tile(j, running, is_full):
            greatest, total, weighted = running
            scores, _, visible = tiles.scores(q_tile, tiles.cut_keys(k, j, 2), i, j, is_full)
            scores = _where(visible, scores, -jnp.inf)
            new_greatest = jnp.maximum(greatest, scores.max(axis=2))
            base = jnp.where(new_greatest == -jnp.inf, 0, new_greatest)
            fade = jnp.exp(greatest - base)
            weights = jnp.exp(scores - base[:, :, None])
            total = total * fade + weights.sum(axis=2)
            if logits.dropout_seed is not None:
                weights = jnp.where(tiles.keep(i, j), weights / (1 - logits.dropout_rate), 0)
            weighted *= fade[:, :, None]
            weighted += tiles.dot(
                "bkhs,bksgt->bkhgt", tiles.cut_keys(v_turned, j, 3), weights.astype(value.dtype)
            )
            return new_greatest, total, weighted

        row = (batch, kv_heads, group, plan.query_size)
        weighted_row = (batch, kv_heads, value_size, group, plan.query_size)
        greatest, total, weighted = _visit(
            tiles.key_span(i),
            key_tile,
            (
                jax.lax.full_like(query, -jnp.inf, sums, row),
                jax.lax.full_like(query, 0, sums, row),
                jax.lax.full_like(query, 0, sums, weighted_row),
            ),
        )
        is_empty = total == 0  # XLA's maximum on CPU may pass over a NaN, the sum does not
        base = jnp.where(is_empty, 0, greatest)
        if logits.sinks is not None:
            sinks = logits.sinks.astype(sums).reshape(kv_heads, group, 1)
            new_base = jnp.maximum(base, sinks)
            fade = jnp.exp(base - new_base)
            total = total * fade + jnp.exp(sinks - new_base)
            weighted *= fade[:, :, None]
            base = new_base
        total = jnp.where(is_empty, 1, total)
        output = jnp.moveaxis(weighted / total[:, :, None], 2, -1).astype(query.dtype)
        logsumexp = jnp.where(is_empty, -jnp.inf, base + jnp.log(total))
        return _put(results[0], output, i, 3), _put(results[1], logsumexp, i, 3)

    rows = (batch, kv_heads, group, tiles.query_tiles * plan.query_size)
    output, logsumexp = _loop(
        0,
        tiles.query_tiles,
        query_tile,
        (
            jax.lax.full_like(query, 0, query.dtype, (*rows, value_size)),
            jax.lax.full_like(query, 0, sums, rows),
        ),
    )
    return tiles.ungrouped(output), tiles.ungrouped(logsumexp)


def _backward(
    plan,
    query,
    key,
    value,
    mask,
    logits,
    output,
    logsumexp,
    output_gradient,
    logsumexp_gradient,
):
    """Gradients, a key tile at a time; with P the probabilities and D their dropout,

    dV = D^T dO,  dP = D'(dO V^T),  dS = P (dP - rowsum(dO O) + dlogsumexp),  dQ = dS K,
    dK = dS^T Q.
    """
    tiles = _Tiles(plan, query, key, mask, logits)
    sums = logsumexp.dtype
    # rowsum(dO O) - dlogsumexp, which each row's dP is compared with.
    offset = (output_gradient.astype(sums) * output.astype(sums)).sum(-1) - logsumexp_gradient
    logsumexp = jnp.where(jnp.isfinite(offset), logsumexp, jnp.nan)
    # A row that is NaN, or that sees nothing, says so in its logsumexp alone.
    row_is_finite = jnp.isfinite(logsumexp)[..., None]
    key_is_finite = _poison(key) + _poison(value) == 0
    q, do = (tiles.grouped(jnp.where(row_is_finite, x, 0)) for x in (query, output_gradient))
    k, v = (tiles.pad_keys(jnp.where(key_is_finite, x, 0), 2) for x in (key, value))
    k_turned = _turned(k)
    offset, lse = tiles.grouped(offset), tiles.grouped(logsumexp)

    def key_tile(j, results):
        dq, dk, dv, dbias = results
        k_tile, v_tile = (tiles.cut_keys(x, j, 2) for x in (k, v))

        def query_tile(i, running, is_full):
            dq, dk_tile, dv_tile, dbias = running
            q_tile, do_tile, lse_tile, offset_tile = (
                tiles.cut_queries(x, i, 3) for x in (q, do, lse, offset)
            )
            scores, capped, visible = tiles.scores(q_tile, k_tile, i, j, is_full)
            p = _where(visible, jnp.exp(scores - lse_tile[:, :, None]), 0)
            dp = tiles.dot("bksh,bkgth->bksgt", v_tile, do_tile)
            kept = p
            if logits.dropout_seed is not None:
                keep = tiles.keep(i, j)
                kept, dp = (jnp.where(keep, x / (1 - logits.dropout_rate), 0) for x in (p, dp))
            dv_tile += tiles.dot("bksgt,bkgth->bksh", kept.astype(do.dtype), do_tile)
            ds = _where(visible, p * (dp - offset_tile[:, :, None]), 0)
            if logits.bias is not None:
                dbias = tiles.add_pairs(dbias, ds, i, j)
            if logits.soft_cap is not None:
                ds *= 1 - jnp.square(capped / logits.soft_cap)
            ds = ds.astype(q.dtype)
            dk_tile += tiles.dot("bksgt,bkgth->bksh", ds, q_tile)
            dq_tile = tiles.dot("bkhs,bksgt->bkhgt", tiles.cut_keys(k_turned, j, 3), ds)
            dq = _put(dq, tiles.cut_queries(dq, i, 4) + dq_tile, i, 4)
            return dq, dk_tile, dv_tile, dbias

        zeros = (jax.lax.full_like(x, 0, sums, x.shape) for x in (k_tile, v_tile))
        dq, dk_tile, dv_tile, dbias = _visit(tiles.query_span(j), query_tile, (dq, *zeros, dbias))
        dk = _put(dk, (dk_tile * plan.scale).astype(dk.dtype), j, 2)
        dv = _put(dv, dv_tile.astype(dv.dtype), j, 2)
        return dq, dk, dv, dbias

    dq_shape = (*q.shape[:2], q.shape[4], *q.shape[2:4])
    dbias = None
    if logits.bias is not None:
        assert tiles.bias is not None
        dbias = jax.lax.full_like(query, 0, sums, tiles.bias.shape)
    dq, dk, dv, dbias = _loop(
        0,
        tiles.key_tiles,
        key_tile,
        (
            jax.lax.full_like(query, 0, sums, dq_shape),
            jnp.zeros_like(k),
            jnp.zeros_like(v),
            dbias,
        ),
    )
    dq = tiles.ungrouped((jnp.moveaxis(dq, 2, -1) * plan.scale).astype(query.dtype))
    dk, dv = (x[:, :, : tiles.keys] for x in (dk, dv))
    dsinks = None
    if logits.sinks is not None:
        rows = logits_lib.sinks_gradient(
            logits.sinks.astype(sums)[:, None], logsumexp, tiles.ungrouped(offset)
        )
        dsinks = rows.sum((0, 2)).astype(logits.sinks.dtype)
    if logits.bias is not None:
        assert dbias is not None
        dbias = dbias[:, :, : tiles.queries, : tiles.keys].astype(logits.bias.dtype)
    no_gradients = jax.tree.map(lambda _: None, logits)
    return dq, dk, dv, None, dataclasses.replace(no_gradients, bias=dbias, sinks=dsinks)


class _Tiles:
    """Arrays cut into tiles: query tiles are counted by `i`, key tiles by `j`."""

    def __init__(self, plan: _Plan, query, key, mask: Mask, logits: Logits):
        self.plan = plan
        self.batch, self.heads, self.queries, _ = query.shape
        self.kv_heads, self.keys = key.shape[1:3]
        self.group = self.heads // self.kv_heads
        self.query_tiles = -(-self.queries // plan.query_size)
        self.key_tiles = -(-self.keys // plan.key_size)
        self.mask = mask
        self.logits = logits
        self.dense = None if mask.dense is None else self._pad_pairs(mask.dense)
        self.bias = None if logits.bias is None else self._pad_pairs(logits.bias)
        self._sizes = (plan.query_size, plan.key_size, self.queries, self.keys)
        self._data_spans = None
        if not mask.is_static and self.query_tiles * self.key_tiles > 1:
            self._data_spans = [_over_batch(span) for span in tile_spans(mask, *self._sizes)]

    def dot(self, spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(
            spec,
            a,
            b,
            precision=self.plan.precision,
            preferred_element_type=jnp.promote_types(a.dtype, jnp.float32),
        )

    def pad_queries(self, x: jax.Array, axis: int) -> jax.Array:
        return _pad(x, axis, self.query_tiles * self.plan.query_size)

    def pad_keys(self, x: jax.Array, axis: int) -> jax.Array:
        return _pad(x, axis, self.key_tiles * self.plan.key_size)

    def _pad_pairs(self, x: jax.Array) -> jax.Array:
        return self.pad_keys(self.pad_queries(x, 2), 3)

    def cut_queries(self, x: jax.Array, i, axis: int) -> jax.Array:
        return _cut(x, i, self.plan.query_size, axis)

    def cut_keys(self, x: jax.Array, j, axis: int) -> jax.Array:
        return _cut(x, j, self.plan.key_size, axis)

    def grouped(self, x: jax.Array) -> jax.Array:
        """`[B, N, T, ...]`, padded, as `[B, K, G, T, ...]`."""
        x = self.pad_queries(x, 2)
        return x.reshape(self.batch, self.kv_heads, self.group, *x.shape[2:])

    def ungrouped(self, x: jax.Array) -> jax.Array:
        """The inverse of `grouped`."""
        return x.reshape(self.batch, self.heads, *x.shape[3:])[:, :, : self.queries]

    def cut_pairs(self, x: jax.Array, i, j) -> jax.Array:
        """Where two tiles meet in `[B, N, T, S]`: `[B, K, s, G, t]`; an axis of 1 stays 1."""
        tile = self.cut_keys(self.cut_queries(x, i, 2), j, 3)
        heads = (1, 1) if x.shape[1] == 1 else (self.kv_heads, self.group)
        return jnp.moveaxis(tile.reshape(x.shape[0], *heads, *tile.shape[2:]), -1, 2)

    def add_pairs(self, sums: jax.Array, tile: jax.Array, i, j) -> jax.Array:
        """Adds `[B, K, s, G, t]` where it belongs in `[B, N, T, S]`, summed over axes of 1."""
        tile = jnp.moveaxis(tile, 2, -1)
        tile = tile.reshape(self.batch, self.heads, *tile.shape[3:])
        shared = [axis for axis in range(4) if sums.shape[axis] == 1]
        tile = tile.sum(shared, keepdims=True)
        old = self.cut_keys(self.cut_queries(sums, i, 2), j, 3)
        query_start = 0 if sums.shape[2] == 1 else i * self.plan.query_size
        key_start = 0 if sums.shape[3] == 1 else j * self.plan.key_size
        start = [jnp.asarray(index, jnp.int32) for index in (0, 0, query_start, key_start)]
        return jax.lax.dynamic_update_slice(sums, old + tile, start)

    def key_span(self, i) -> Span:
        """The key tiles that query tile `i` meets."""
        if self._data_spans is not None:
            return Span(*(bound[i] for bound in self._data_spans[0]))
        if not self.mask.is_static:
            return Span(0, 0, 0, 1)
        return self.mask.key_span(i, *self._sizes)

    def query_span(self, j) -> Span:
        """The query tiles that key tile `j` meets."""
        if self._data_spans is not None:
            return Span(*(bound[j] for bound in self._data_spans[1]))
        if not self.mask.is_static:
            return Span(0, 0, 0, 1)
        return self.mask.query_span(j, *self._sizes)

    def tokens(self, i, j) -> tuple[Tokens, Tokens]:
        """Queries and keys of two tiles, to broadcast against `[B, K, s, G, t]`."""
        query_index = i * self.plan.query_size + jnp.arange(self.plan.query_size)
        key_index = j * self.plan.key_size + jnp.arange(self.plan.key_size)
        query = self.mask.query_tokens(query_index, axis=1)
        key = self.mask.key_tokens(key_index, axis=0)
        query = query.map(lambda x: x.reshape(-1, 1, 1, 1, x.shape[-1]))
        key = key.map(lambda x: x.reshape(-1, 1, x.shape[-2], 1, 1))
        queries_run_over = self.queries % self.plan.query_size
        keys_run_over = self.keys % self.plan.key_size
        return (
            dataclasses.replace(query, stop=self.queries if queries_run_over else None),
            dataclasses.replace(key, stop=self.keys if keys_run_over else None),
        )

    def scores(self, query, key, i, j, is_full: bool):
        """Scores of query tile `i` and key tile `j`.

        Args:
          query: `[B, K, G, t, H]`.
          key: `[B, K, s, H]`.
          i: Which query tile.
          j: Which key tile.
          is_full: Whether the mask is known to hide nothing here.

        Returns:
          Scores `[B, K, s, G, t]` with bias, the same without (the soft cap's derivative asks for
          it), and who may attend to whom, or None where all may.
        """
        query_tokens, key_tokens = self.tokens(i, j)
        visible = None
        if not is_full:
            dense = None if self.dense is None else self.cut_pairs(self.dense, i, j)
            visible = self.mask.visible(query_tokens, key_tokens, dense)
        capped = self.dot("bksh,bkgth->bksgt", key, query) * self.plan.scale
        if self.logits.soft_cap is not None:
            capped = logits_lib.cap(capped, self.logits.soft_cap)
        scores = capped
        if self.bias is not None:
            bias = self.cut_pairs(self.bias, i, j).astype(scores.dtype)
            scores += bias
            is_finite = bias != -jnp.inf
            visible = is_finite if visible is None else visible & is_finite
        if self.logits.slopes is not None:
            slopes = self.logits.slopes.reshape(self.kv_heads, 1, self.group, 1)
            scores += logits_lib.alibi(slopes, query_tokens, key_tokens)
        return scores, capped, visible

    def keep(self, i, j) -> jax.Array:
        """Which pairs of two tiles survive dropout, to broadcast against `[B, K, s, G, t]`."""
        assert self.logits.dropout_seed is not None, "asked for where there is dropout"
        query, key = self.tokens(i, j)
        rows, columns = self.logits.dropout_indices(self.batch, self.heads)
        per_head = (self.kv_heads, 1, self.group, 1) if columns.size > 1 else (1, 1, 1, 1)
        dropout_rows = logits_lib.dropout_rows(
            self.logits.dropout_seed,
            rows[:, None, None, None, None],
            columns.reshape(per_head),
            query.position,
        )
        return logits_lib.dropout_keep(dropout_rows, self.logits.dropout_rate, key.position)


def _over_batch(span: Span) -> Span:
    """One span of `[tiles]` for all rows of `[B, tiles]`: visited by any row, full in all."""
    is_empty = span.start == span.stop
    stop = span.stop.max(0)
    start = jnp.where(is_empty, stop, span.start).min(0)
    full_start = jnp.clip(span.full_start.max(0), start, stop)
    full_stop = jnp.clip(span.full_stop.min(0), full_start, stop)
    return Span(start, full_start, full_stop, stop)


def _visit(span: Span, step: Callable[..., Any], running: Any) -> Any:
    """Runs `step(tile, running, is_full)` over a span: first the tiles that need a mask."""
    before = span.full_start - span.start
    partial = before + span.stop - span.full_stop

    def partial_step(n, running):
        tile = jnp.where(n < before, span.start + n, span.full_stop + n - before)
        return step(tile, running, False)

    running = _loop(0, partial, partial_step, running)
    return _loop(span.full_start, span.full_stop, lambda n, r: step(n, r, True), running)


def _loop(start, stop, step: Callable[..., Any], running: Any) -> Any:
    """`fori_loop`, but what is known to run once or never is no loop."""
    if isinstance(start, int) and isinstance(stop, int) and stop - start <= 1:
        return step(start, running) if stop > start else running
    return jax.lax.fori_loop(start, stop, step, running)


def _poison(x: jax.Array) -> jax.Array:
    """NaN for rows that hold NaN or inf, else 0: `[..., 1]`.

    On CPU a sum is several times as fast as `isfinite(x).all()`.
    """
    return (x.astype(jnp.promote_types(x.dtype, jnp.float32)) * 0).sum(-1, keepdims=True)


def _turned(x: jax.Array) -> jax.Array:
    """`[..., n, H]` as `[..., H, n]` in memory.

    Without the barrier XLA may undo it inside a product, which its CPU backend then runs slowly,
    or for some batches of bfloat16 not at all.
    """
    return jax.lax.optimization_barrier(x.mT)


def _where(condition: jax.Array | None, x: jax.Array, otherwise) -> jax.Array:
    return x if condition is None else jnp.where(condition, x, otherwise)


def _pad(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Zeros at the end up to `size`; an axis of 1 is one that broadcasts."""
    missing = size - x.shape[axis]
    if missing == 0 or x.shape[axis] == 1:
        return x
    return jnp.pad(x, [(0, missing if n == axis else 0) for n in range(x.ndim)])


def _cut(x: jax.Array, index, size: int, axis: int) -> jax.Array:
    """Tile `index`; all of an axis that is one tile, or that broadcasts."""
    if x.shape[axis] in (1, size):
        return x
    return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)


def _put(x: jax.Array, tile: jax.Array, index, axis: int) -> jax.Array:
    """Writes what `_cut` reads."""
    if x.shape == tile.shape:
        return tile
    return jax.lax.dynamic_update_slice_in_dim(x, tile, index * tile.shape[axis], axis)
