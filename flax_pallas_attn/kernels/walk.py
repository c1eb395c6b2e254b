"""Which tiles the flash kernels visit, and in which units.

A tile is computed in units. Where the mask is a band that is known while tracing
(causal, window), what it does to each unit of a tile that it cuts is known too: a unit that it
hides is not computed, and one that it leaves whole is not masked.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_pallas_attn.kernels.tiles import pad_to
from flax_pallas_attn.masking import Mask, Span, tile_spans


class Unit(NamedTuple):
    """A part of a tile.

    Attributes:
      query: Of its first query in the tile.
      key: Of its first key in the tile.
      is_cut: Whether the mask hides a part of it.
      is_last: Whether it is known to be the last that its queries meet.
    """

    query: int
    key: int
    is_cut: bool
    is_last: bool = False

    @property
    def place(self) -> tuple[int, int]:
        return self.query, self.key


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The walk of one tile along the tiles of the other axis.

    Attributes:
      mask: Who may attend to whom.
      by_query: Whether a query tile walks along key tiles, or a key tile along query tiles.
      unit: Tokens of a unit at most, along both axes.
      query_size: Queries of a tile.
      key_size: Keys of a tile.
      queries: T.
      keys: S.
      all_cut: Whether something other than the mask may hide a part of any unit.
    """

    mask: Mask
    by_query: bool
    unit: int
    query_size: int
    key_size: int
    queries: int
    keys: int
    all_cut: bool = False

    @property
    def unit_queries(self) -> int:
        """Queries of a unit, as many as divide a tile."""
        return math.gcd(self.unit, self.query_size)

    @property
    def unit_keys(self) -> int:
        """Keys of a unit."""
        return math.gcd(self.unit, self.key_size)

    @property
    def query_stop(self) -> int | None:
        """T where a tile runs over the end, else None."""
        return self.queries if self.queries % self.query_size else None

    @property
    def key_stop(self) -> int | None:
        """S where a tile runs over the end, else None."""
        return self.keys if self.keys % self.key_size else None

    @property
    def is_band(self) -> bool:
        """Whether what the mask does to a unit follows from its place alone."""
        own, other = self._sizes
        return self.mask.is_band and own % other == 0

    @property
    def scores(self) -> int:
        """Scores that are computed for one head: exact for a static mask, else an upper bound."""
        query_size, key_size = self.query_size, self.key_size
        if self.is_band:
            query_size, key_size = self.unit_queries, self.unit_keys
        mask = Mask() if self.mask.positions is not None else self.mask
        spans = (
            mask.key_span(i, query_size, key_size, self.queries, self.keys)
            for i in range(pl.cdiv(self.queries, query_size))
        )
        return query_size * key_size * sum(span.stop - span.start for span in spans)

    @property
    def _sizes(self) -> tuple[int, int]:
        query, key = self.query_size, self.key_size
        return (query, key) if self.by_query else (key, query)

    @property
    def _counts(self) -> tuple[int, int]:
        queries, keys = self.queries, self.keys
        return (queries, keys) if self.by_query else (keys, queries)

    def spans(self) -> jax.Array | None:
        """For scalar memory: spans of all tiles, flat int32, where the mask is data; else None."""
        if self.mask.is_static:
            return None
        spans = tile_spans(self.mask, self.query_size, self.key_size, self.queries, self.keys)
        span = spans[0] if self.by_query else spans[1]
        return jnp.stack(span, axis=-1).astype(jnp.int32).reshape(-1)

    def span(self, batch_index, tile, spans_ref=None) -> Span:
        """The span of a tile, by arithmetic or from what `spans` has put into scalar memory."""
        if spans_ref is not None:
            tiles = pl.cdiv(self._counts[0], self._sizes[0])
            base = (batch_index * tiles + tile) * 4
            return Span(*(spans_ref[base + i] for i in range(4)))
        span = self.mask.key_span if self.by_query else self.mask.query_span
        queries, keys = self.queries, self.keys
        if self.is_band:  # the ends are cut unit by unit
            queries, keys = pad_to(queries, self.query_size), pad_to(keys, self.key_size)
        return span(tile, self.query_size, self.key_size, queries, keys)

    def visit(self, tile, span: Span, first, tiles: int, body: Callable) -> None:
        """Calls `body` for what `tile` meets among `first .. first + tiles`.

        One after another, from `first_visited` on, without a gap.

        Args:
          tile: The tile that walks; an int where there is only one.
          span: Its span.
          first: First of the other axis' tiles that are at hand; an int where all are.
          tiles: How many are at hand.
          body: Gets the other tile, counted from `first`, the static list of its units, that of
            the units that the body before was told to expect (of the first one: `all_units`), and
            that of those to expect next; none at a known end.
        """
        start, full_start, full_stop, stop = span
        usual = self.all_units(False)
        if not self.is_band:
            for lower, upper, is_cut in (
                (start, full_start, True),
                (full_start, full_stop, False),
                (full_stop, stop, True),
            ):
                units = self.all_units(is_cut)
                self._loop(lower, upper, first, tiles, body, (units, usual, usual))
            return
        own_size, other_size = self._sizes
        other_count = self._counts[1]
        complete, last_size = divmod(other_count, other_size)
        ratio = own_size // other_size
        for is_case, own, own_extent, candidates in self._own_cases(tile):

            @_when(is_case)
            def _(own=own, own_extent=own_extent, candidates=candidates):
                def cut(step, distance):
                    other = own * ratio + step
                    is_complete = (other >= 0) & (other < complete)
                    units = self._units(distance, own_extent, other_size)
                    self._at(other, is_complete, first, tiles, body, (units, usual, usual))
                    if last_size and any(own * ratio + step == complete for own in candidates):
                        units = self._units(distance, own_extent, last_size)
                        is_last = other == complete
                        self._at(other, is_last, first, tiles, body, (units, usual, usual))

                before, after = self._cut_steps()
                for step_and_distance in before:
                    cut(*step_and_distance)
                whole = self._units(None, own_extent, other_size)
                stop = _minimum(full_stop, complete)
                self._loop(full_start, stop, first, tiles, body, (whole, usual, usual))
                if last_size and any(self._is_whole(own, complete) for own in candidates):
                    is_last = (full_start <= complete) & (complete < full_stop)
                    whole = self._units(None, own_extent, last_size)
                    self._at(complete, is_last, first, tiles, body, (whole, usual, usual))
                if self.has_known_end and isinstance(first, int):
                    rounds = self._end()
                    expected = usual
                    for (step, units), (_, following) in zip(
                        rounds, [*rounds[1:], (None, [])], strict=True
                    ):
                        body(own * ratio + step - first, units, expected, following)
                        expected = following
                    return
                for step_and_distance in after:
                    cut(*step_and_distance)

    @property
    def has_known_end(self) -> bool:
        """Whether every tile ends with the same cut tiles, which all its units meet."""
        return bool(self._end())

    def _end(self) -> list[tuple[int, list[Unit]]]:
        """The cut tiles after the whole ones, as steps from `tile * own / other`, if all tiles of
        this axis meet them and each of its units ends there; else nothing."""
        own_size, other_size = self._sizes
        own_count, other_count = self._counts
        if not self.is_band or own_count % own_size:
            return []
        ratio, complete = own_size // other_size, other_count // other_size
        own_last = own_count // own_size - 1
        rounds, met = [], set()
        for step, distance in reversed(self._cut_steps()[1]):
            if step < 0 or own_last * ratio + step >= complete:
                return []
            units = []
            for unit in reversed(self._units(distance, own_size, other_size)):
                own = unit.query if self.by_query else unit.key
                units.insert(0, unit._replace(is_last=own not in met))
                met.add(own)
            rounds.insert(0, (step, units))
        own_unit = self.unit_queries if self.by_query else self.unit_keys
        return rounds if len(met) == own_size // own_unit else []

    def first_visited(self, span: Span, first, tiles: int):
        """The tile that `visit` begins with, counted from `first`; some tile if there is none."""
        return _clip(span.start - first, tiles - 1)

    def _own_cases(self, tile):
        """The tile that walks, complete or the last: condition, index, tokens, candidates."""
        size, count = self._sizes[0], self._counts[0]
        complete, last_size = divmod(count, size)
        if isinstance(tile, int):
            return [(True, tile, min(size, count), [tile])]
        if not last_size:
            return [(True, tile, size, range(complete))]
        return [
            (tile < complete, tile, size, range(complete)),
            (tile == complete, complete, last_size, [complete]),
        ]

    def _is_whole(self, own: int, other: int) -> bool:
        """Whether the band hides nothing where two tiles meet."""
        firsts = (own * self._sizes[0], other * self._sizes[1])
        query, key = firsts if self.by_query else firsts[::-1]
        distance = self.mask.query_offset + query - key
        return self._band(distance, self.query_size, self.key_size) == _WHOLE

    def _cut_steps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Tiles that the band cuts, those before whole ones and those after.

        Each as its distance from tile `tile * own / other` and (query - key) of their firsts.
        """
        _, other_size = self._sizes
        sign = -1 if self.by_query else 1
        offset = self.mask.query_offset
        edges = [edge for edge in (self.mask.lower, self.mask.upper) if edge is not None]
        before, after = [], []
        if not edges:
            return before, after
        least = min(edges) - self.query_size
        greatest = max(edges) + self.key_size
        steps = sorted(sign * (distance - offset) // other_size for distance in (least, greatest))
        # Keys go by from the band's upper edge to its lower one, queries the other way.
        first_edge = self.mask.upper if self.by_query else self.mask.lower
        for step in range(steps[0] - 1, steps[1] + 2):
            distance = offset + sign * step * other_size
            if self._band(distance, self.query_size, self.key_size) == _CUT:
                ends = (distance - self.key_size + 1, distance + self.query_size - 1)
                is_before = first_edge is not None and ends[0] <= first_edge <= ends[1]
                (before if is_before else after).append((step, distance))
        return before, after

    def _band(self, distance: int, queries: int, keys: int) -> int:
        """What the band does to a block whose first query and first key are `distance` apart."""
        least, greatest = distance - (keys - 1), distance + (queries - 1)
        lower, upper = self.mask.lower, self.mask.upper
        if (lower is not None and greatest < lower) or (upper is not None and least > upper):
            return _HIDDEN
        if (lower is None or least >= lower) and (upper is None or greatest <= upper):
            return _WHOLE
        return _CUT

    def _units(self, distance: int | None, own_extent: int, other_extent: int) -> list[Unit]:
        """Units of a tile with so many tokens; None: the band leaves the tile whole."""
        queries, keys = own_extent, other_extent
        if not self.by_query:
            queries, keys = keys, queries
        units = []
        for unit in self.all_units(False):
            if unit.query >= queries or unit.key >= keys:
                continue
            size = (self.unit_queries, self.unit_keys)
            state = _WHOLE
            if distance is not None:
                state = self._band(distance + unit.query - unit.key, *size)
            runs_over = unit.query + size[0] > queries or unit.key + size[1] > keys
            if state != _HIDDEN:
                units.append(unit._replace(is_cut=unit.is_cut or state == _CUT or runs_over))
        return units

    def all_units(self, is_cut: bool) -> list[Unit]:
        """Units of a tile, in the order in which they are computed."""
        return [
            Unit(query, key, is_cut or self.all_cut)
            for key in range(0, self.key_size, self.unit_keys)
            for query in range(0, self.query_size, self.unit_queries)
        ]

    def _loop(self, start, stop, first, tiles, body, lists) -> None:
        if isinstance(start, int) and isinstance(stop, int) and start >= stop:
            return
        pl.loop(_clip(start - first, tiles), _clip(stop - first, tiles))(
            lambda other: body(other, *lists)
        )

    def _at(self, other, condition, first, tiles, body, lists) -> None:
        if not lists[0]:
            return
        at_hand = (other >= first) & (other < first + tiles)
        _when(condition & at_hand)(lambda: body(other - first, *lists))


_HIDDEN, _CUT, _WHOLE = range(3)


def _when(condition):
    """`pl.when`, decided while tracing where it can be."""
    if isinstance(condition, bool):
        return lambda function: function() if condition else None
    return pl.when(condition)


def _minimum(x, y: int):
    return min(x, y) if isinstance(x, int) else jnp.minimum(x, y)


def _clip(x, stop: int):
    return min(max(x, 0), stop) if isinstance(x, int) else jnp.clip(x, 0, stop)
