"""Result files: figures with the versions that they were measured with."""

import importlib.metadata
import json
import platform
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def write_results(name: str, command: str, rows: list[dict[str, Any]]) -> Path:
    """Writes `benchmarks/results/<name>.json`.

    Args:
      name: Of the file.
      command: That writes it again.
      rows: What was measured, one object a row.

    Returns:
      The file's path.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    content = {"command": command, "versions": installed_versions(), "rows": rows}
    part = path.with_suffix(".part")  # a run that is stopped leaves the file whole
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    return path


def read_results(name: str) -> list[dict[str, Any]]:
    """Rows of `benchmarks/results/<name>.json`; none where it is absent or of other versions."""
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return []
    content = json.loads(path.read_text())
    return content["rows"] if content["versions"] == installed_versions() else []


def installed_versions() -> dict[str, str | None]:
    """Of Python and the packages that figures depend on; None of one that is not there."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "flax", "libtpu"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return versions
