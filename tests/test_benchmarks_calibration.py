"""What the calibration says, of points and simulations that are known."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import calibration
from benchmarks.simulate import FLOP_PER_CYCLE, GIGAHERTZ, Cycles
from flax_pallas_attn import aot_cli

HERE = Path(calibration.__file__).parent
POINT = {
    "topology": "v6e", "operation": "forward", "batch": 2, "length": 1024, "heads": 8,
    "head_size": 128, "config": {}, "milliseconds": 0.5, "file": "f.json",
}  # fmt: skip


def test_published_points():
    points = json.loads((HERE / "published.json").read_text())["points"]
    assert len(points) >= 20
    for point in points:
        share = calibration.flop(point) / (
            point["milliseconds"] * 1e6 * GIGAHERTZ[point["topology"]]
        )
        assert 0.02 < share / FLOP_PER_CYCLE[point["topology"]] < 1


def test_a_simulation_of_half_the_time_has_the_ratio_one_half():
    assert calibration.flop(POINT) == 4 * 2 * 8 * 1024**2 * 128
    cycles = round(0.25 * 1e6 * 1.75)
    around = round(4 * 2 * (2 * 1024 * 8 * 128 * 2) / 1640 * 1.75)  # four arrays, in and out
    row = calibration.compare(POINT, Cycles(count=cycles - around))
    assert row["transpose_cycles"] == around
    assert row["ratio"] == 0.5
    assert row["simulated_share"] == pytest.approx(
        calibration.flop(POINT) / cycles / 524_288, abs=1e-4
    )
    assert calibration.compare(POINT, Cycles(error="why")) == {"error": "why"}


def test_summary_and_lines():
    rows = [
        {
            "point": POINT,
            "measured_share": 0.5,
            "simulated_share": 0.5 / ratio,
            "ratio": ratio,
            "kernel_cycles": 3,
            "transpose_cycles": 1,
        }
        for ratio in (0.5, 0.6, 0.8, 1.0, 1.2)
    ]
    rows.append({"point": POINT, "measured_share": 0.5, "error": "a | b"})
    assert calibration.summary(rows) == (
        "5 of 6 points simulated: simulated time over measured time has the median 0.80, half of "
        "the points lie between 0.60 and 1.00, all between 0.50 and 1.20."
    )
    assert calibration.group_lines(rows) == [
        "| forward, v6e | 5 | 0.80 | 0.50 | 1.20 | 0.60 to 1.00 |"
    ]
    assert "| 1.000 | 25% | 0.50 |" in calibration.line(rows[0])
    assert "failed: a / b |" in calibration.line(rows[-1])


def test_the_command_line_says_what_the_calibration_found():
    rows = json.loads((HERE / "results" / "calibration.json").read_text())["rows"]
    assert sum("ratio" in row for row in rows) >= 20
    text = (HERE / "calibration.md").read_text()
    assert calibration.summary(rows) in text
    figures = re.findall(r"\d\.\d\d", aot_cli.CALIBRATION)
    assert figures == re.findall(r"\d\.\d\d", calibration.summary(rows))
