"""What a run reports."""

import io
import json

import numpy as np
import pytest
import rich.console

from train.config import InputError
from train.metrics import MetricsFile, Progress, plot_loss, read_metrics


def records(*steps):
    return [{"step": step, "loss": 3 / step, "tokens_per_s": 10.5} for step in steps]


def test_resuming_drops_what_will_be_written_again(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, resume_step=0)
    for record in records(1, 2, 3, 4):
        file.append(record)
    with path.open("a") as handle:
        handle.write('{"step": 5, "lo')  # killed in the middle of a write
    assert read_metrics(path) == records(1, 2, 3, 4)
    file = MetricsFile(path, resume_step=2)
    file.append(records(3)[0])
    assert file.read() == records(1, 2, 3)
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]


@pytest.mark.parametrize(
    "line", [b"junk", b"\xff\x00", b"[1]", b"3", b"", b'{"loss": 1}', b'{"step": 1}']
)
def test_a_line_that_is_no_record_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1, "loss": 2.5}\n' + line + b"\n")
    with pytest.raises(InputError, match=r"metrics\.jsonl, line 2 is not a record"):
        MetricsFile(path, resume_step=1)


def test_progress_is_plain_lines_without_a_terminal():
    output = io.StringIO()
    with Progress(rich.console.Console(file=output), start_step=0, steps=40) as progress:
        progress.begin()
        progress.update({"step": 10, "loss": 2.5, "tokens_per_s": 1234.4, "val_loss": 2.75})
        progress.update({"step": 20, "loss": 2.25, "tokens_per_s": 1234.4})
    lines = output.getvalue().splitlines()
    assert lines == [
        "step 10/40  loss 2.500  validation 2.750  1,234 tokens/s  0:00 left",
        "step 20/40  loss 2.250  1,234 tokens/s  0:00 left",
    ]


def test_progress_is_a_live_bar_on_a_terminal():
    output = io.StringIO()
    console = rich.console.Console(file=output, force_terminal=True, width=100)
    with Progress(console, start_step=0, steps=40) as progress:
        progress.begin()
        progress.update({"step": 10, "loss": 2.5, "tokens_per_s": 1234.4, "val_loss": 2.75})
        progress.update({"step": 20, "loss": 2.25, "tokens_per_s": 1234.4})
    shown = output.getvalue()
    for part in ("20/40", "loss 2.250  validation 2.750", "1,234 tokens/s", "left", "━"):
        assert part in shown


@pytest.mark.parametrize("validated", [[], [9], [-1], [9, -1]])
def test_the_loss_curve_is_a_picture(tmp_path, validated):
    curve = records(*range(1, 30))
    for index in validated:
        curve[index]["val_loss"] = 1.0
    path = tmp_path / "loss.png"
    plot_loss(curve, path, title="a run", last_step=29)
    from matplotlib import image

    pixels = image.imread(path)
    assert pixels.shape[:2] == (675, 1200)
    orange = np.abs(pixels[..., :3] - np.array([1, 127 / 255, 14 / 255])).max(-1) < 0.02
    assert orange.any() == bool(validated), "validation is drawn in orange"
