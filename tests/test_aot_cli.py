"""The command line of aot: what it prints, takes and refuses, and how it ends."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from flax_pallas_attn import aot, aot_cli
from tests.test_aot import double  # noqa: F401, named on the command line


@pytest.mark.tpu_compile
def test_command_line(capsys):
    function = f"{__name__}:double"
    arguments = ["--arg", "f32[256,256]", "--donate", "0", "--no-cycles"]
    assert aot_cli.main([*arguments, "--topology", "v5e", "--topology", "v6e", function]) == 0
    output = capsys.readouterr().out.splitlines()
    assert "    argument            262,144 B        0.2 MiB" in output
    assert output.count("    double") == 2

    assert aot_cli.main([function, *arguments, "--topology", "v7"]) == 1
    assert "ValueError: topology='v7'" in capsys.readouterr().out


@pytest.mark.tpu_compile
def test_command_line_takes_several_values_of_each_option(capsys):
    arguments = ["--no-cycles", "--arg", "f32[256,256]", "f32[256,256]", "--topology", "v5e", "v6e"]
    assert aot_cli.main([*arguments, "jax.numpy:add"]) == 0
    assert capsys.readouterr().out.count("  argument            524,288 B") == 2


@pytest.mark.tpu_compile
def test_command_line_says_that_it_simulates_and_prints_what_went_right(capsys, monkeypatch):
    def crash(*args, **options):
        raise RuntimeError("libtpu fails to simulate it")

    monkeypatch.setattr(aot, "simulate", crash)
    arguments = [f"{__name__}:double", "--arg", "f32[256,256]", "--topology"]
    assert aot_cli.main([*arguments, "v4"]) == 0
    shown = capsys.readouterr()
    assert "  cycles: not available on v4" in shown.out.splitlines()
    assert shown.err == ""

    assert aot_cli.main([*arguments, "v5e"]) == 1
    shown = capsys.readouterr()
    assert "    double\n  RuntimeError: libtpu fails to simulate it\n" in shown.out
    assert shown.err.startswith("Simulating double on v5e, which may take minutes; --no-cycles")


@pytest.mark.tpu_compile
@pytest.mark.parametrize(("option", "says_what_binds"), [("--units", True), ("--no-units", False)])
def test_command_line_says_which_unit_binds(option, says_what_binds, capsys):
    assert aot_cli.main([f"{__name__}:double", "--arg", "f32[1024,1024]", option]) == 0
    output = capsys.readouterr().out
    assert "cycles, simulated and not measured" in output
    assert "benchmarks/calibration.md" in output
    assert (" double" in output, " bound by transfers: " in output) == (True, says_what_binds)


@pytest.mark.tpu_compile
def test_command_line_leaves_out_notes_on_a_traceback_that_is_not_shown(capsys):
    assert aot_cli.main(["jax.numpy:add", "--arg", "f32[2]", "--no-cycles"]) == 1
    output = capsys.readouterr().out
    assert "missing 1 required positional argument" in output
    assert "While compiling " in output
    assert "JAX" not in output


def test_command_line_ends_when_nobody_reads_it():
    read_end, write_end = os.pipe()
    os.close(read_end)
    ended = subprocess.run(
        [sys.executable, "-m", "flax_pallas_attn.aot", "jax.numpy:add", "--no-cycles"],
        stdout=write_end,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write_end)
    assert (ended.returncode, ended.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["flax_pallas_attn.aot:nothing"], "has no attribute 'nothing'"),
        (["no_such_module:f"], "No module named 'no_such_module'"),
        (["jax.numpy:add", "--arg", "f32"], "'f32' is not like bf16"),
        (["jax.numpy:add", "--arg", "f31[2]"], "'f31[2]' has no dtype"),
    ],
)
def test_command_line_errors(arguments, message, capsys):
    with pytest.raises(SystemExit) as caught:
        aot_cli.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "shape", "dtype"),
    [
        ("bf16[8,4096,16,128]", (8, 4096, 16, 128), jnp.bfloat16),
        ("s32[]", (), jnp.int32),
        ("f8e4m3fn[2]", (2,), jnp.float8_e4m3fn),
        ("bool[2, 3]", (2, 3), jnp.bool_),
    ],
)
def test_arguments_on_the_command_line(text, shape, dtype):
    assert aot_cli._parse_argument(text) == jax.ShapeDtypeStruct(shape, dtype)
