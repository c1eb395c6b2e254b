"""The blockwise form: the conformance suite, and what is its own."""

import functools

import pytest

from flax_pallas_attn import blockwise
from tests import conformance

# Tiles that divide neither T nor S, so that every case has several, of every kind.
attend = functools.partial(blockwise.attend, tiles=(16, 24))


@pytest.mark.parametrize("check", conformance.checks(), ids=str)
def test_conforms(check):
    check(attend)
