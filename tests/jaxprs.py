"""Reads what was traced: every equation, those inside loops, branches and kernels too."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def equations(fn: Callable[..., Any], *args: Any) -> list[JaxprEqn]:
    """All equations of `fn(*args)`; arguments may be `jax.ShapeDtypeStruct`."""
    return list(_walk(jax.make_jaxpr(fn)(*args).jaxpr))


def kernels(fn: Callable[..., Any], *args: Any) -> dict[str, JaxprEqn]:
    """The Pallas calls of `fn(*args)` by name, one of each."""
    return {
        eqn.params["name"]: eqn
        for eqn in equations(fn, *args)
        if eqn.primitive.name == "pallas_call"
    }


def inside(eqn: JaxprEqn) -> list[JaxprEqn]:
    """All equations of the functions that `eqn` calls."""
    return [inner for jaxpr in _called(eqn.params) for inner in _walk(jaxpr)]


def largest_size(fn: Callable[..., Any], *args: Any) -> int:
    """Most elements that any one array made on the way has."""
    return max(
        math.prod(variable.aval.shape)
        for eqn in equations(fn, *args)
        for variable in eqn.outvars
        if hasattr(variable.aval, "shape")
    )


def _walk(jaxpr: Jaxpr) -> Iterator[JaxprEqn]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in _called(eqn.params):
            yield from _walk(inner)


def _called(params: Any) -> Iterator[Jaxpr]:
    for leaf in jax.tree.leaves(params):
        if isinstance(leaf, ClosedJaxpr):
            yield leaf.jaxpr
        elif isinstance(leaf, Jaxpr):
            yield leaf
