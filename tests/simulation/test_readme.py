"""The example of `llmnode.testing` runs as it is printed."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "python" / "llmnode" / "testing" / "README.md"


def test_the_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "simulate(main" in example
    exec(compile(example, str(README), "exec"), {"__name__": "example"})
