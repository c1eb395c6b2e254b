"""The repository itself: what is in the wheel, what is pinned, what a tracked file may say."""

import doctest
import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REQUIREMENTS = {  # the extras that each file pins
    "requirements.txt": ["tpu", "train", "dev"],
    "requirements-lowest.txt": ["tpu", "train", "dev"],
    "requirements-peers.txt": ["tpu", "peers"],
}


def pins(file: str) -> dict[str, str]:
    """Version by package. Fails on a line that is not `name==version`, marker or not."""
    pin = re.compile(r"([a-z0-9-]+)==([0-9][\w.]*)(?: ; [\w. ='!()]+)?")
    lines = [pin.fullmatch(line) for line in (ROOT / file).read_text().splitlines()]
    assert None not in lines
    return {line[1]: line[2] for line in lines}


def modules_with_examples() -> list[str]:
    return [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "flax_pallas_attn").rglob("*.py"))
        if ">>> " in path.read_text()
    ]


def tracked_text() -> dict[str, str]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    paths = [ROOT / file for file in files if file]
    return {
        str(path.relative_to(ROOT)): path.read_text()
        for path in paths
        if path.is_file() and path.suffix not in {".png"}
    }


def test_wheel_holds_the_library_alone(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        check=True,
    )
    (wheel,) = tmp_path.iterdir()
    assert wheel.name == f"flax_pallas_attn-{PROJECT['version']}-py3-none-any.whl"
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].split("-")[0] for name in names} == {"flax_pallas_attn"}
    assert {"flax_pallas_attn/py.typed", "flax_pallas_attn/aot.py"} <= set(names)


@pytest.mark.parametrize(
    "module",
    [
        pytest.param(name, marks=pytest.mark.tpu_compile if name.endswith(".aot") else ())
        for name in modules_with_examples()
    ],
)
def test_examples_in_docstrings(module):
    results = doctest.testmod(importlib.import_module(module))
    assert results.attempted > 0
    assert results.failed == 0


def test_library_needs_jax_and_flax_alone():
    assert PROJECT["dependencies"] == ["flax>=0.12.12", "jax>=0.11.2"]
    code = (
        "import sys, jax, flax.linen, flax.nnx, jax.experimental.pallas.tpu\n"
        "before = set(sys.modules)\n"
        "import flax_pallas_attn, flax_pallas_attn.linen, flax_pallas_attn.nnx\n"
        "new = {name.split('.')[0] for name in set(sys.modules) - before}\n"
        "print(*sorted(new - set(sys.stdlib_module_names)))\n"
    )
    imported = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    ).stdout.split()
    assert set(imported) <= {"flax", "flax_pallas_attn", "jax", "jaxlib"}


def test_every_extra_is_pinned():
    assert set().union(*REQUIREMENTS.values()) == set(PROJECT["optional-dependencies"])


@pytest.mark.parametrize("file", REQUIREMENTS)
def test_everything_that_the_project_names_is_pinned(file):
    pinned = pins(file)
    extras = [
        name for extra in REQUIREMENTS[file] for name in PROJECT["optional-dependencies"][extra]
    ]
    for requirement in PROJECT["dependencies"] + extras:
        assert re.match(r"[\w-]+", requirement)[0] in pinned
    assert "libtpu" in pinned


def test_lowest_requirements_are_the_lowest_supported():
    pinned = pins("requirements-lowest.txt")
    for requirement in PROJECT["dependencies"]:
        name, version = requirement.split(">=")
        assert pinned[name] == version
    assert pinned["jaxlib"] == pinned["jax"]


def test_peers_are_measured_with_the_same_compiler():
    pinned, ours = pins("requirements-peers.txt"), pins("requirements.txt")
    for package in ("jax", "jaxlib", "libtpu"):
        assert pinned[package] == ours[package]


def test_versions_agree():
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(r"^## \[(.*?)\]", changelog, re.MULTILINE)[1] == PROJECT["version"]
    python = (ROOT / ".python-version").read_text().strip()
    assert f"Programming Language :: Python :: {python}" in PROJECT["classifiers"]


def test_table_of_versions_is_what_is_pinned():
    table = (ROOT / "docs" / "versions.md").read_text()
    newest, lowest = pins("requirements.txt"), pins("requirements-lowest.txt")
    for name in ("jax", "jaxlib", "flax", "libtpu"):
        assert f"| {name} | {newest[name]} | {lowest[name]} |" in table
    python = (ROOT / ".python-version").read_text().strip()
    lowest_python = PROJECT["requires-python"].removeprefix(">=")
    assert f"| Python | {python} | {lowest_python} |" in table


def test_tracked_files_name_no_machine_and_no_registry():
    forbidden = re.compile(
        r"(?<![\w./])/(?:root|home|Users|work)/\w"  # a path on someone's machine
        r"|(?:pypi|pythonhosted|npmjs|anaconda)\.(?:org|com)"
        r"|--(?:extra-)?index-url|--find-links"
    )
    found = [
        f"{file}: {match[0]}"
        for file, text in tracked_text().items()
        for match in forbidden.finditer(text)
        if file != f"tests/{Path(__file__).name}"
    ]
    assert found == []


@pytest.mark.parametrize(
    "target", ["train", "test", "test-all", "peers", "lint", "typecheck", "lock"]
)
def test_make_help_lists_every_command(target):
    help_text = subprocess.run(
        ["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    assert f"make {target} " in help_text


def test_find_python_takes_the_one_named_or_says_why_not():
    def find_python(python):
        return subprocess.run(
            ["sh", "scripts/find_python.sh"],
            cwd=ROOT,
            env={**os.environ, "PYTHON": python},
            capture_output=True,
            text=True,
            check=False,
        )

    assert find_python(sys.executable).stdout.strip() == sys.executable
    missing = find_python("/no/such/python")
    assert missing.returncode == 1
    assert "PYTHON=/no/such/python is not a Python 3.12 or later" in missing.stderr
