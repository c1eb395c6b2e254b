"""The example prints what its header says."""

import runpy
from pathlib import Path

EXAMPLE = Path(__file__).parent.parent / "examples" / "attention_in_your_flax_model.py"


def test_prints_what_its_header_shows(capsys):
    header = runpy.run_path(str(EXAMPLE))["__doc__"]
    _, _, shown = header.partition(f"$ python examples/{EXAMPLE.name}\n")
    printed = capsys.readouterr().out.splitlines()
    assert printed == [line.strip() for line in shown.strip().splitlines()]
    assert "False" not in "".join(printed)
    assert len(printed) == 5
