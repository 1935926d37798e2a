"""The wheels of a release, built once for all tests of them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def unoptimized(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target folder of builds without optimization, which compile their dependencies once for all of them."""
    return tmp_path_factory.mktemp("target")


@pytest.fixture(scope="session")
def release(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that `.ci/release` fills."""
    folder = tmp_path_factory.mktemp("release")
    environment = {**os.environ, "LLMNODE_VENV": sys.prefix}
    answer = subprocess.run(
        [ROOT / ".ci" / "release", folder], env=environment, capture_output=True, text=True, check=False
    )
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(release: Path) -> Path:
    """The wheel of llmnode."""
    (wheel,) = release.glob("llmnode-*.whl")
    return wheel
