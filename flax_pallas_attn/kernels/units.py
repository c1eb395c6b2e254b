"""The parts of a tile that a flash kernel computes one after another."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax


class Unit(NamedTuple):
    """A part of a tile.

    Attributes:
      number: Which of the units that may be computed at a time.
      head: Of the query heads that are at hand.
      query: Of its first query: in the tile, or among those at hand if queries walk by.
      key: Of its first key; likewise.
      is_cut: Whether the mask hides a part of it.
      is_cut_by: Whether the lower and the upper edge of the mask's band may.
      is_first: Whether it is known to be the first that its queries (or keys, if they walk) meet.
      is_last: Whether it is known to be the last.
      is_first_across: Whether it is known to be the first that its keys (or queries, if keys walk)
        meet, of all tiles' units.
      is_last_across: Whether it is known to be the last.
    """

    number: int
    head: int
    query: Any  # an int, or int32 where it is traced
    key: Any
    is_cut: bool
    is_cut_by: tuple[bool, bool] = (True, True)
    is_first: bool = False
    is_last: bool = False
    is_first_across: bool = False
    is_last_across: bool = False


def traced_once(function: Callable) -> Callable:
    """`function(unit, *arrays)`, which jax traces once for units that differ in place alone."""

    @functools.cache
    def of_kind(kind: Unit):
        def at_place(query, key, *arrays):
            return function(kind._replace(query=query, key=key), *arrays)

        return jax.jit(at_place, inline=True)

    @functools.wraps(function)
    def of_unit(unit: Unit, *arrays):
        kind = unit._replace(number=0, query=0, key=0, is_last=False, is_last_across=False)
        return of_kind(kind)(unit.query, unit.key, *arrays)

    return of_unit
