"""The wheels of a release, built once for all tests of them."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.kit.compiled_packages import UNOPTIMIZED, compiled_packages

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def unoptimized(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The target folder of builds with `UNOPTIMIZED`, which compile their dependencies once on a machine."""
    target = tmp_path_factory.mktemp("unoptimized") / "target"
    with compiled_packages("unoptimized", target, ROOT / "Cargo.lock", UNOPTIMIZED):
        yield target


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
