"""The examples of `llmnode.testing` run as they are printed."""

from __future__ import annotations

import re
from pathlib import Path

README = Path(__file__).parents[2] / "python" / "llmnode" / "testing" / "README.md"


def test_the_examples_run() -> None:
    whole, throughputs = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert "simulate(main" in whole
    assert "two_classes(" in throughputs
    for example in (whole, throughputs):
        exec(compile(example, str(README), "exec"), {"__name__": "example"})
