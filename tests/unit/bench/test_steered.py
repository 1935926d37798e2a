"""Building the peers of other implementations."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from bench.transport import steered
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.skipif(shutil.which("go") is None, reason="there is no Go")
def test_a_build_that_takes_too_long_is_one_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steered, "BUILD_S", 0)
    with pytest.raises(ConfigError, match="took longer than 0 s"):
        steered.go_peer(tmp_path)
