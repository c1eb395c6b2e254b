"""The command line, as a user runs it: separate processes on one CPU device."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import pytest

from train.__main__ import main, parse
from train.config import RECIPES, InputError
from train.loop import StopSignals, locked, open_run
from train.metrics import MetricsFile

REPOSITORY = Path(__file__).parent.parent
STEPS = 12
SETTINGS = [
    "--name=run",
    f"--steps={STEPS}",
    "--batch-size=8",
    "--row-tokens=32",
    "--log-every-steps=1",
    "--model.num-layers=1",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.width=32",
    "--model.mlp-width=64",
    "--model.dropout-rate=0.1",
    "--optimizer.learning-rate=0.01",
    "--optimizer.warmup-steps=2",
    "--evaluation.every-steps=4",
    "--evaluation.tokens=200",
    "--checkpoint.every-steps=1",
    "--sample.new-tokens=12",
]


def write_text(directory):
    directory.mkdir()
    words = [
        "the",
        "of",
        "and",
        "to",
        "a",
        "in",
        "that",
        "it",
        "was",
        "she",
        "her",
        "he",
        "as",
        "for",
        "with",
        "had",
    ]
    for name, stride in (("one", 3), ("two", 5), ("held", 7)):
        text = " ".join(words[(stride * i + i // 4) % len(words)] for i in range(300))
        (directory / f"{name}.txt").write_text(text)


def flags(runs_directory, text):
    return [
        *SETTINGS,
        f"--runs-directory={runs_directory}",
        f"--data.directory={text}",
        "--data.validation-file=held.txt",
    ]


def command(runs_directory, text):
    return [sys.executable, "-m", "train", *flags(runs_directory, text)]


def environment(cache):
    """One device; and programs compiled once for all processes, which halves the time of it all."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }


def run(arguments, cache):
    return subprocess.run(
        arguments,
        cwd=REPOSITORY,
        env=environment(cache),
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def kill_during_a_save(arguments, cache, checkpoints):
    """Starts a run and kills it when a checkpoint after the third is half written."""
    process = subprocess.Popen(
        arguments,
        cwd=REPOSITORY,
        env=environment(cache),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    while process.poll() is None:
        names = os.listdir(checkpoints) if checkpoints.exists() else []
        if "3" in names and any("tmp" in name for name in names):
            process.send_signal(signal.SIGKILL)
        time.sleep(0.001)
    assert process.returncode == -signal.SIGKILL, "it ended before a save was seen"
    return sorted(os.listdir(checkpoints))


def refusing_large_files(arguments):
    """A file may grow to 32 blocks of 512 bytes: the system refuses more, as on a full disk."""
    return ["sh", "-c", 'ulimit -f 32 && exec "$@"', "sh", *arguments]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run without interruption; another, killed, then out of disk, then finished, run again."""
    root = tmp_path_factory.mktemp("runs")
    write_text(root / "text")
    results = {"root": root}
    cache = root / "cache"
    results["whole"] = run(command(root / "whole", root / "text"), cache)
    broken = command(root / "broken", root / "text")
    checkpoints = root / "broken" / "run" / "checkpoints"
    results["killed"] = kill_during_a_save(broken, cache, checkpoints)
    results["full"] = run(refusing_large_files(broken), cache)
    results["after full"] = sorted(os.listdir(checkpoints))
    results["resumed"] = run(broken, cache)
    return results


def complete(names):
    return sorted(int(name) for name in names if name.isdigit())


def read_lines(runs, name):
    lines = (runs["root"] / name / "run" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_reports_and_ends_with_a_sample(runs):
    whole = runs["whole"]
    assert whole.returncode == 0, whole.stderr
    assert whole.stderr == ""
    directory = runs["root"] / "whole" / "run"
    assert (directory / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((directory / "config.json").read_text())["steps"] == STEPS
    assert complete(os.listdir(directory / "checkpoints")) == [STEPS - 1, STEPS]
    lines = read_lines(runs, "whole")
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line.keys() - {"val_loss"} == {"step", "loss", "grad_norm", "tokens_per_s"}
        assert ("val_loss" in line) == (line["step"] % 4 == 0)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.1
    assert "step 12/12  loss" in whole.stdout
    sample, result = re.split("─+\n", whole.stdout)[1:]
    assert sample.startswith("She had ")
    assert len(sample.encode()) >= len(b"She had ") + 12
    assert f"Validation loss {lines[-1]['val_loss']:.3f} nats per byte, on all of held" in result
    assert (directory / "sample.txt").read_text() == sample


def test_a_run_killed_during_a_save_goes_on_from_the_last_complete_one(runs):
    """Case 34."""
    assert any("tmp" in name for name in runs["killed"]), "the kill met no save"
    last = complete(runs["killed"])[-1]
    resumed = runs["resumed"]
    assert resumed.returncode == 0, resumed.stderr
    assert f"goes on after step {last}." in resumed.stdout
    names = os.listdir(runs["root"] / "broken" / "run" / "checkpoints")
    assert sorted(names, key=int) == [str(STEPS - 1), str(STEPS)]


def test_a_resumed_run_equals_one_without_interruption_bit_for_bit(runs):
    """Case 36: batches, dropout, losses and validation losses."""
    whole, broken = read_lines(runs, "whole"), read_lines(runs, "broken")
    for line in (*whole, *broken):
        del line["tokens_per_s"]
    assert whole == broken


def test_a_full_disk_is_said_and_loses_nothing(runs):
    full = runs["full"]
    assert full.returncode == 1
    assert "Traceback" not in full.stderr
    assert full.stderr.startswith("error: a checkpoint could not be written to ")
    last = complete(runs["killed"])[-1]
    assert f"step {last} is complete" in full.stderr
    assert complete(runs["after full"])[-1] == last


def test_a_finished_run_says_so(runs, capsys):
    arguments = flags(runs["root"] / "broken", runs["root"] / "text")
    assert main(arguments) == 0
    shown = capsys.readouterr()
    assert "is finished: all 12 steps are done. To start another run" in shown.out
    directory = runs["root"] / "broken" / "run"
    assert f"on all of held.txt; the curve is in {directory / 'loss.png'}." in shown.out
    assert f"python -m train.sample {directory} --prompt" in shown.out
    assert shown.err == ""


def test_other_settings_are_named(runs, capsys):
    arguments = flags(runs["root"] / "broken", runs["root"] / "text")
    assert main([*arguments, "--optimizer.learning-rate=0.001"]) == 1
    shown = capsys.readouterr().err
    assert "optimizer.learning_rate: 0.01 then, 0.001 now" in shown
    assert "--name" in shown


def test_a_checkpoint_of_another_model_is_named(runs, tmp_path, capsys):
    """Its settings are gone, or of a program that had others."""
    shutil.copytree(runs["root"] / "whole", tmp_path / "copy")
    (tmp_path / "copy" / "run" / "config.json").unlink()
    arguments = flags(tmp_path / "copy", runs["root"] / "text")
    assert main([*arguments, "--steps=20", "--model.mlp-width=48"]) == 1
    shown = capsys.readouterr().err
    assert "parameters/blocks/0/mlp/up/kernel: float32[32, 64] in the checkpoint" in shown
    assert "float32[32, 48] in this run" in shown


def test_sigterm_writes_a_checkpoint(tmp_path, monkeypatch, capsys):
    """Case 35 in short: the signal comes in the fifth step."""
    write_text(tmp_path / "text")
    append = MetricsFile.append

    def append_and_stop(self, record):
        append(self, record)
        if record["step"] == 5:
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(MetricsFile, "append", append_and_stop)
    arguments = flags(tmp_path / "runs", tmp_path / "text")
    assert main([*arguments, "--checkpoint.every-steps=100"]) == 128 + signal.SIGTERM
    assert "Stopped after step 5; the same command continues" in capsys.readouterr().out
    assert os.listdir(tmp_path / "runs" / "run" / "checkpoints") == ["5"]
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_second_signal_of_any_kind_is_obeyed():
    obeyed = []
    previous = signal.signal(signal.SIGTERM, lambda number, _: obeyed.append(number))
    try:
        with StopSignals() as signals:
            signal.raise_signal(signal.SIGINT)
            assert (signals.received, obeyed) == (signal.SIGINT, [])
            signal.raise_signal(signal.SIGTERM)
            assert obeyed == [signal.SIGTERM]
    finally:
        signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (KeyboardInterrupt(), 130, "\nInterrupted; the same command continues"),
        (MemoryError("Unable to allocate 9 TiB"), 1, "error: out of memory: Unable to allocate 9"),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: x"), 1, "error: out of memory: RESOURCE"),
    ],
)
def test_what_ends_a_run_anywhere_is_a_message(monkeypatch, capsys, error, code, message):
    def fail(*_):
        raise error

    monkeypatch.setattr("train.__main__.train", fail)
    assert main([]) == code
    assert capsys.readouterr().err.startswith(message)


def test_a_loss_that_is_not_finite_ends_the_run_and_is_not_saved(tmp_path, capsys):
    write_text(tmp_path / "text")
    changes = [
        "--optimizer.learning-rate=1e30",
        "--log-every-steps=100",
        "--evaluation.every-steps=100",
    ]
    assert main([*flags(tmp_path / "runs", tmp_path / "text"), *changes]) == 1
    shown = re.match(
        r"error: step (\d+): parameters that are not finite\..*that of step (\d+) is the last kept",
        capsys.readouterr().err,
    )
    assert shown, "both steps are named"
    stopped, last = map(int, shown.groups())
    assert stopped == last + 1 > 1
    assert str(last) in os.listdir(tmp_path / "runs" / "run" / "checkpoints")


def test_one_process_at_a_time(tmp_path, capsys):
    write_text(tmp_path / "text")
    with locked(tmp_path / "runs" / "run"):
        assert main(flags(tmp_path / "runs", tmp_path / "text")) == 1
    assert "error: another process is training" in capsys.readouterr().err
    with locked(tmp_path / "runs" / "run"):
        pass


def test_a_run_that_ended_before_its_sample_makes_it(runs, tmp_path, capsys):
    shutil.copytree(runs["root"] / "whole", tmp_path / "runs")
    directory = tmp_path / "runs" / "run"
    for name in ("sample.txt", "loss.png"):
        (directory / name).unlink()
    assert main(flags(tmp_path / "runs", runs["root"] / "text")) == 0
    assert "goes on after step 12." in capsys.readouterr().out
    assert (directory / "sample.txt").read_text().startswith("She had ")
    assert (directory / "loss.png").exists()


def test_a_finished_run_without_its_checkpoint_says_so(runs, tmp_path, capsys):
    shutil.copytree(runs["root"] / "whole", tmp_path / "runs")
    checkpoint = tmp_path / "runs" / "run" / "checkpoints" / str(STEPS)
    shutil.rmtree(checkpoint)
    checkpoint.mkdir()
    assert main(flags(tmp_path / "runs", runs["root"] / "text")) == 1
    shown = capsys.readouterr().err
    assert f"error: the checkpoint {checkpoint} cannot be read: it is incomplete" in shown


def test_a_text_that_changed_is_named(tmp_path):
    write_text(tmp_path / "text")
    config = parse(flags(tmp_path / "runs", tmp_path / "text"))
    config.run_directory.mkdir(parents=True)
    open_run(config, is_begun=False)
    open_run(config, is_begun=True)
    (tmp_path / "text" / "new.txt").write_text("new")
    with pytest.raises(InputError, match=r"text\.new\.txt\.bytes: absent then, 3 now"):
        open_run(config, is_begun=True)
    open_run(config, is_begun=False)
    (tmp_path / "text" / "new.txt").write_text("old")
    with pytest.raises(InputError, match=r"text\.new\.txt\.sha256: 11507a0e\w+ then"):
        open_run(config, is_begun=True)


@pytest.mark.parametrize("content", [b"", b"[1]", b"\xff"])
def test_damaged_settings_are_named(tmp_path, content):
    write_text(tmp_path / "text")
    config = parse(flags(tmp_path / "runs", tmp_path / "text"))
    config.run_directory.mkdir(parents=True)
    (config.run_directory / "config.json").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.json is damaged.*Delete it"):
        open_run(config, is_begun=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("--model.implementation=pallas", "model.implementation='pallas' runs on TPU, and the"),
        ("--batch-size=12", "batch_size=12 does not divide among the 8 devices"),
        ("--data.directory=nowhere", "data.directory='nowhere' is not a directory"),
        ("--data.validation-file=x.txt", "data.validation_file='x.txt' is not in"),
        ("--row-tokens=128", "the training text has 100 bytes, too few for one row"),
    ],
)
def test_wrong_input_is_a_message(tmp_path, capsys, change, message):
    write_text(tmp_path / "text")
    for name in ("one", "two"):
        (tmp_path / "text" / f"{name}.txt").write_text("short" * 10)
    assert main([*flags(tmp_path / "runs", tmp_path / "text"), change]) == 1
    assert capsys.readouterr().err.startswith(f"error: {message}")
    assert not (tmp_path / "runs").exists(), "nothing is written before the input is known good"


def test_flags_change_what_the_preset_says():
    config = parse(["--preset", "gpt2", "--steps=900", "--model.num-layers", "3"])
    assert config.model.num_layers == 3
    assert config.model.width == 768
    assert config.steps == 900
    assert parse([]) == RECIPES["tiny"]
    assert parse(["--preset=llama-1b"]) == RECIPES["llama-1b"]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--preset", "huge"], ["huge", "tiny", "gpt2-medium"]),
        (["--steps", "0"], ["steps=0 must be at least 1"]),
        (["--model.num-heads", "3"], ["num_heads=3 does not divide width=128"]),
        (["--optimizer.learning-rate", "fast"], ["learning-rate"]),
    ],
)
def test_a_wrong_command_line_is_a_message(arguments, parts, capsys):
    with pytest.raises(SystemExit) as error:
        parse(arguments)
    assert error.value.code == 2
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    for part in parts:
        assert part in shown


def test_a_reader_that_leaves_is_no_error_of_the_disk():
    """`python -m train --help | head -3`: the pipe is closed while there is more to print."""
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(
        [sys.executable, "-m", "train", "--help"],
        cwd=REPOSITORY,
        stdout=write_end,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (128 + signal.SIGPIPE, "")


def test_help_explains_every_setting(capsys):
    with pytest.raises(SystemExit) as error:
        parse(["--help"])
    assert error.value.code == 0
    shown = capsys.readouterr().out
    for part in ("--preset {tiny,gpt2,gpt2-medium,llama-1b}", "--steps", "--optimizer.beta2"):
        assert part in shown
