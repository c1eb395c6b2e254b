"""The table of errors is that of the results file, and says nothing bad of us."""

import json

import pytest

from benchmarks.accuracy import DOCUMENT, document
from benchmarks.results_file import RESULTS

RESULTS_OF = json.loads((RESULTS / "accuracy.json").read_text())


def test_document_is_that_of_the_results():
    assert DOCUMENT.read_text() == document(RESULTS_OF)


@pytest.mark.parametrize("attention", ["pallas", "xla"])
def test_errors_are_no_larger_than_those_of_others(attention):
    """By the mean over the elements; twice is what the order of sums may do."""

    def rms(name, part):
        return [row[part]["rms"] for row in RESULTS_OF["rows"] if row["attention"] == name]

    for part in ("output", "gradients"):
        for ours, theirs in zip(rms(attention, part), rms("jax.nn", part), strict=True):
            assert 0 < ours <= 2 * theirs
