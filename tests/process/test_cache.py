"""The embedded model is converted once, by one of the processes that start at once, and is whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from llmnode.models.embedded import open_embedded
from process.forked import Forked

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200)]

PROGRAM = """
from llmnode.models.embedded import open_embedded
print(open_embedded(print).digest.hex())
"""


def test_two_processes_at_once_convert_once(tmp_path: Path) -> None:
    expected = open_embedded()
    left_behind = tmp_path / "models" / f"{expected.path.name}.partial-killed"
    left_behind.mkdir(parents=True)
    environment = {**os.environ, "LLMNODE_CACHE": str(tmp_path), "TQDM_DISABLE": "1"}
    both = [
        Forked([sys.executable, "-P", "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(2)
    ]
    lines = [process.communicate(timeout=180)[0].splitlines() for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert [printed[-1] for printed in lines] == [expected.digest.hex()] * 2
    assert len({entry.name for entry in (tmp_path / "models").iterdir()} - {f"{expected.path.name}.lock"}) == 1
