"""Which tiles the flash kernels visit, and in which units.

A tile is computed in units. Where the mask is a band that is known while tracing
(causal, window), what it does to each unit of a tile that it cuts is known too: a unit that it
hides is not computed, and one that it leaves whole is not masked. The units of other masks are
listed (`unit_lists`).
"""

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from flax_pallas_attn.kernels.tiles import pad_to
from flax_pallas_attn.kernels.units import Unit
from flax_pallas_attn.masking import Mask, Span, tile_spans


@dataclasses.dataclass(frozen=True, kw_only=True)
class Walk:
    """The walk of one tile along the tiles of the other axis.

    Attributes:
      mask: Who may attend to whom.
      by_query: Whether a query tile walks along key tiles, or a key tile along query tiles.
      unit: Tokens of a unit at most, along both axes.
      query_size: Queries of a tile.
      key_size: Keys of a tile.
      chunk: Tokens of the other axis that are at hand at once.
      queries: T.
      keys: S.
      all_cut: Whether something other than the mask may hide a part of any unit.
      heads: Query heads that are at hand: each unit is one of each.
      most_written: Scores of a walk up to which all walks are written out whole. 0 where the other
        axis is not at hand all at once.
    """

    mask: Mask
    by_query: bool
    unit: int
    query_size: int
    key_size: int
    chunk: int
    queries: int
    keys: int
    all_cut: bool = False
    heads: int = 1
    most_written: int = 0

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
        """T where a unit may run over the end, or lie beyond it, else None."""
        return self._stop(self.queries, self.query_size, not self.by_query)

    @property
    def key_stop(self) -> int | None:
        """S where a unit may run over the end, or lie beyond it, else None."""
        return self._stop(self.keys, self.key_size, self.by_query)

    def _stop(self, count: int, size: int, is_other: bool) -> int | None:
        # A list ends with units that are hidden, some of which may be computed: of all at hand.
        extent = self.chunk if is_other and not self.is_band else size
        return count if count % extent else None

    @property
    def is_band(self) -> bool:
        """Whether what the mask does to a unit follows from its place alone."""
        own, other = self.sizes
        return self.mask.is_band and own % other == 0

    @property
    def may_cut(self) -> bool:
        """Whether the mask, or an end, may hide a part of a unit."""
        mask, stops = self.mask, (self.query_stop, self.key_stop)
        return self.all_cut or not self.is_band or (mask.lower, mask.upper, *stops) != (None,) * 4

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
    def sizes(self) -> tuple[int, int]:
        """Tokens of a tile of the axis that walks, and of the other one."""
        query, key = self.query_size, self.key_size
        return (query, key) if self.by_query else (key, query)

    @property
    def counts(self) -> tuple[int, int]:
        """Tokens of the axis that walks, and of the other one."""
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
            tiles = pl.cdiv(self.counts[0], self.sizes[0])
            base = (batch_index * tiles + tile) * 4
            return Span(*(spans_ref[base + i] for i in range(4)))
        span = self.mask.key_span if self.by_query else self.mask.query_span
        queries, keys = self.queries, self.keys
        if self.is_band:  # the ends are cut unit by unit
            queries, keys = pad_to(queries, self.query_size), pad_to(keys, self.key_size)
        return span(tile, self.query_size, self.key_size, queries, keys)

    def visit(self, tile, first, begin: Callable, body: Callable) -> None:
        """Calls `body` for the units that `tile` meets among the tokens at hand, of a band.

        Args:
          tile: The tile that walks; an int where there is only one.
          first: First of the other axis' tiles that are at hand; an int where all are.
          begin: Gets the units that the first call of `body` expects; not called where it expects
            none.
          body: Gets its units, those that the call before was told to expect (they hold its own, or
            there are none), and those to expect next; none at a known end.
        """
        if self._known_walks:
            for tiles, units in self._known_walks.items():
                is_one = functools.reduce(operator.or_, (tile == own for own in tiles))

                @_when(is_one if len(self._known_walks) > 1 else True)
                def _(units=units):
                    body(self.of_all_heads(units), [], [])

            return
        own_size, other_size = self.sizes
        tiles = self.chunk // other_size
        span = self.span(None, tile)
        usual = self.all_units()
        begin(self.of_all_heads(self._moved(usual, _clip(span.start - first, tiles - 1))))

        def visit_tile(other, units, expected=usual, following=usual):
            other = other - first
            after = _minimum(other + 1, tiles - 1)
            lists = ((units, other), (expected, other), (following, after))
            body(*(self.of_all_heads(self._moved(*units_and_tile)) for units_and_tile in lists))

        def visit_at(other, condition, units):
            if units:
                at_hand = (other >= first) & (other < first + tiles)
                _when(condition & at_hand)(lambda: visit_tile(other, units))

        other_count = self.counts[1]
        complete, last_size = divmod(other_count, other_size)
        ratio = own_size // other_size
        for is_case, own, own_extent, candidates in self._own_cases(tile):

            @_when(is_case)
            def _(own=own, own_extent=own_extent, candidates=candidates):
                def cut(step, distance):
                    other = own * ratio + step
                    is_complete = (other >= 0) & (other < complete)
                    visit_at(other, is_complete, self._units(distance, own_extent, other_size))
                    if last_size and any(own * ratio + step == complete for own in candidates):
                        units = self._units(distance, own_extent, last_size)
                        visit_at(other, other == complete, units)

                before, after = self._cut_steps()
                for step_and_distance in before:
                    cut(*step_and_distance)
                whole = self._units(None, own_extent, other_size)
                start, stop = (
                    _clip(bound - first, tiles) + first
                    for bound in (span.full_start, _minimum(span.full_stop, complete))
                )
                if not (isinstance(start, int) and isinstance(stop, int) and start >= stop):
                    pl.loop(start, stop)(lambda other: visit_tile(other, whole))
                if last_size and any(self._is_whole(own, complete) for own in candidates):
                    is_last = (span.full_start <= complete) & (complete < span.full_stop)
                    visit_at(complete, is_last, self._units(None, own_extent, last_size))
                if self.has_known_end and isinstance(first, int):
                    rounds = self._end()
                    expected = usual
                    for (step, units), (_, following) in zip(
                        rounds, [*rounds[1:], (None, [])], strict=True
                    ):
                        visit_tile(own * ratio + step, units, expected, following)
                        expected = following
                    return
                for step_and_distance in after:
                    cut(*step_and_distance)

    def _moved(self, units: list[Unit], other) -> list[Unit]:
        """The units as they stand in a tile of the other axis."""
        offset = other * self.sizes[1]
        if self.by_query:
            return [unit._replace(key=offset + unit.key) for unit in units]
        return [unit._replace(query=offset + unit.query) for unit in units]

    def of_all_heads(self, units: list[Unit]) -> list[Unit]:
        """Each of the units, which are of one head, once for each head."""
        return [
            unit._replace(number=unit.number * self.heads + head, head=head)
            for unit in units
            for head in range(self.heads)
        ]

    @property
    def is_known(self) -> bool:
        """Whether all walks are written out: `visit` calls `body` once for each tile, and of its
        queries, or keys, the first and the last units are known."""
        return bool(self._known_walks)

    @property
    def is_known_across(self) -> bool:
        """Whether of the other axis' tokens too the first and the last units are known."""
        return any(unit.is_first_across for units in self._known_walks.values() for unit in units)

    @property
    def has_known_end(self) -> bool:
        """Whether all walks end with units that are known to be the last, where all of the other
        axis is at hand."""
        return self.is_known or bool(self._end())

    @functools.cached_property
    def _known_walks(self) -> dict[tuple[int, ...], list[Unit]]:
        """The units that each tile meets, by the tiles that meet the same; none where those are too
        many, or leave some of a tile out."""
        tiles, others = (
            pl.cdiv(count, size) for count, size in zip(self.counts, self.sizes, strict=True)
        )
        most = self.most_written // (self.unit_queries * self.unit_keys)
        if not self.is_band or tiles * others > most:  # tiles of some units each
            return {}
        walks = collections.defaultdict(list)
        for tile in range(tiles):
            units = []
            for other in range(others):
                firsts = (tile * self.sizes[0], other * self.sizes[1])
                query, key = firsts if self.by_query else firsts[::-1]
                extents = [
                    min(size, count - at)
                    for size, count, at in zip(self.sizes, self.counts, firsts, strict=True)
                ]
                distance = self.mask.query_offset + query - key
                units += self._moved(self._units(distance, *extents), other)
            own = [self._own(unit) for unit in units]
            if len(units) > most or len(set(own)) < self.sizes[0] // self._own_unit:
                return {}
            walks[tuple(units)].append(tile)
        marked = [self._marked(units) for units in walks]
        across = [self._other(unit) for units in marked for unit in units]
        if len(walks) == tiles and len(set(across)) * self._other_unit >= self.counts[1]:
            firsts, lasts = _firsts(across), _firsts(across[::-1])[::-1]
            flags = iter(zip(firsts, lasts, strict=True))
            marked = [
                [
                    unit._replace(is_first_across=is_first, is_last_across=is_last)
                    for unit, (is_first, is_last) in zip(units, flags, strict=False)
                ]
                for units in marked
            ]
        return {tuple(tiles): units for tiles, units in zip(walks.values(), marked, strict=True)}

    def _marked(self, units: Sequence[Unit]) -> list[Unit]:
        """With which are the first and the last of their queries, or keys."""
        own = [self._own(unit) for unit in units]
        flags = zip(_firsts(own), _firsts(own[::-1])[::-1], strict=True)
        return [
            unit._replace(number=i, is_first=is_first, is_last=is_last)
            for i, (unit, (is_first, is_last)) in enumerate(zip(units, flags, strict=True))
        ]

    def _own(self, unit: Unit) -> int:
        return unit.query if self.by_query else unit.key

    def _other(self, unit: Unit) -> int:
        return unit.key if self.by_query else unit.query

    @property
    def _own_unit(self) -> int:
        return self.unit_queries if self.by_query else self.unit_keys

    @property
    def _other_unit(self) -> int:
        return self.unit_keys if self.by_query else self.unit_queries

    def _end(self) -> list[tuple[int, list[Unit]]]:
        """The cut tiles after the whole ones, as steps from `tile * own / other`, if all tiles of
        this axis meet them and each of its units ends there; else nothing."""
        own_size, other_size = self.sizes
        own_count, other_count = self.counts
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
                units.insert(0, unit._replace(is_last=self._own(unit) not in met))
                met.add(self._own(unit))
            rounds.insert(0, (step, units))
        return rounds if len(met) == own_size // self._own_unit else []

    def _own_cases(self, tile):
        """The tile that walks, complete or the last: condition, index, tokens, candidates."""
        size, count = self.sizes[0], self.counts[0]
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
        firsts = (own * self.sizes[0], other * self.sizes[1])
        query, key = firsts if self.by_query else firsts[::-1]
        distance = self.mask.query_offset + query - key
        return self._band(distance, self.query_size, self.key_size) == _WHOLE

    def _cut_steps(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Tiles that the band cuts, those before whole ones and those after.

        Each as its distance from tile `tile * own / other` and (query - key) of their firsts.
        """
        _, other_size = self.sizes
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
        return _CUT if any(self._cuts(distance, queries, keys)) else _WHOLE

    def _cuts(self, distance: int, queries: int, keys: int) -> tuple[bool, bool]:
        """Whether the band's lower and its upper edge hide something of such a block."""
        least, greatest = distance - (keys - 1), distance + (queries - 1)
        lower, upper = self.mask.lower, self.mask.upper
        return lower is not None and least < lower, upper is not None and greatest > upper

    def _units(self, distance: int | None, own_extent: int, other_extent: int) -> list[Unit]:
        """Units of a tile with so many tokens; None: the band leaves the tile whole."""
        queries, keys = own_extent, other_extent
        if not self.by_query:
            queries, keys = keys, queries
        units = []
        for unit in self.all_units():
            if unit.query >= queries or unit.key >= keys:
                continue
            size = (self.unit_queries, self.unit_keys)
            is_cut_by = (False, False)
            if distance is not None:
                apart = distance + unit.query - unit.key
                if self._band(apart, *size) == _HIDDEN:
                    continue
                is_cut_by = self._cuts(apart, *size)
            runs_over = unit.query + size[0] > queries or unit.key + size[1] > keys
            is_cut = unit.is_cut or any(is_cut_by) or runs_over
            units.append(unit._replace(is_cut=is_cut, is_cut_by=is_cut_by))
        return units

    def mask_of(self, unit: Unit) -> Mask:
        """The mask as far as it may hide a part of a unit."""
        edges = (self.mask.lower, self.mask.upper)
        lower, upper = (
            edge if cuts else None for edge, cuts in zip(edges, unit.is_cut_by, strict=True)
        )
        return dataclasses.replace(self.mask, lower=lower, upper=upper)

    def all_units(self) -> list[Unit]:
        """Units of a tile of one head, in the order in which they are computed."""
        places = itertools.product(
            range(0, self.key_size, self.unit_keys), range(0, self.query_size, self.unit_queries)
        )
        return [
            Unit(number, 0, query, key, self.all_cut) for number, (key, query) in enumerate(places)
        ]


def most_written(width: int, itemsize: int) -> int:
    """Scores of a walk up to which it is written out without a loop.

    Beyond, the compiler moves more out of the registers than the ends of a loop cost
    (benchmarks/LOG.md). The six passes of a float32 product cost time to compile.

    Args:
      width: Of heads and values, together.
      itemsize: Bytes of an element.
    """
    passes = 1 if itemsize <= 2 else 6
    return 100 * 256**2 * 256 // (width * passes)


_HIDDEN, _CUT, _WHOLE = range(3)


def _firsts(places: Sequence[int]) -> list[bool]:
    """Which are not among those before them."""
    first: dict[int, int] = {}
    return [first.setdefault(place, i) == i for i, place in enumerate(places)]


def _when(condition):
    """`pl.when`, decided while tracing where it can be."""
    if isinstance(condition, bool):
        return lambda function: function() if condition else None
    return pl.when(condition)


def _minimum(x, y: int):
    return min(x, y) if isinstance(x, int) else jnp.minimum(x, y)


def _clip(x, stop: int):
    return min(max(x, 0), stop) if isinstance(x, int) else jnp.clip(x, 0, stop)
