"""The README's Python runs, from top to bottom, as a reader would run it."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.tpu_compile
def test_python_snippets_run():
    snippets = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert len(snippets) >= 7
    namespace: dict = {}
    for snippet in snippets:
        exec(compile(snippet, str(README), "exec"), namespace)
    assert namespace["output"].shape == (21, 8, 64)
    assert (namespace["program"].kernels, namespace["program"].temporary_bytes) == (
        ("flash_forward",),
        229280,
    )
    assert namespace["y"].shape == (2, 100, 64)
