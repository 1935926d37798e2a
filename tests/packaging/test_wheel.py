"""The files that are shipped: the wheel, the source distribution, and the wheel that somebody builds from that."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from bench.kit.compiled_packages import UNOPTIMIZED

ROOT = Path(__file__).parents[2]
EXPECTED = {
    "llmnode/__init__.py",
    "llmnode/_native.pyi",
    "llmnode/errors.py",
    "llmnode/node/__main__.py",
    "llmnode/node/app.py",
    "llmnode/node/cli.py",
    "llmnode/ports.py",
    "llmnode/py.typed",
}

pytestmark = [pytest.mark.packaging, pytest.mark.slow, pytest.mark.timeout(900)]


def run(*command: str | Path, cwd: Path, **changes: str) -> str:
    environment = os.environ | changes
    environment["PATH"] += os.pathsep + os.path.expanduser("~/.cargo/bin")
    answer = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stdout + answer.stderr
    return answer.stdout


def maturin(command: str, source: Path, out: Path, *options: str, **changes: str) -> Path:
    run(sys.executable, "-m", "maturin", command, "--out", out, *options, cwd=source, **changes)
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return maturin("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


def wheel_names(wheel: Path) -> list[str]:
    return sorted(name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name)


def sdist_names(sdist: Path) -> list[str]:
    with tarfile.open(sdist) as archive:
        return sorted(name.partition("/")[2] for name in archive.getnames())


def library_files() -> set[str]:
    """Every Python file of the library and of the program, by its name in an archive. Set-up is in none."""
    library = {path.relative_to(ROOT / "python") for path in (ROOT / "python" / "llmnode").rglob("*.py")}
    program = {Path("llmnode/node") / path.relative_to(ROOT / "node") for path in (ROOT / "node").rglob("*.py")}
    return {str(path) for path in library | program}


def test_the_wheel_has_the_library_the_program_and_the_extension(wheel: Path) -> None:
    names = wheel_names(wheel)
    assert set(names) >= EXPECTED | library_files()
    assert [name for name in names if name.startswith("llmnode/_native") and name.endswith(".so")], names


def test_the_wheel_has_nothing_else(wheel: Path) -> None:
    names = wheel_names(wheel)
    assert len(names) == len(set(names))
    assert {name.partition("/")[0] for name in names} == {"llmnode"}
    assert [
        name for name in names if not name.endswith((".py", ".pyi", ".so", "py.typed", ".html", ".css", ".js"))
    ] == []
    assert [name for name in names if "bench" in name] == ["llmnode/node/commands/bench.py"], (
        "which says where they are"
    )


def test_the_sdist_has_all_sources_once_and_nothing_built(sdist: Path) -> None:
    names = sdist_names(sdist)
    assert len(names) == len(set(names))
    assert set(names) >= {f"python/{name}" for name in EXPECTED | library_files()}
    assert set(names) >= {
        "Cargo.lock",
        "Cargo.toml",
        "LICENSE",
        "README.md",
        "pyproject.toml",
        "transport_rs/src/lib.rs",
    }
    assert [name for name in names if name.endswith((".so", ".pyc"))] == []
    assert not [name for name in names if name.endswith("node/llmnode") or "bootstrap" in name]


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, sdist: Path, unoptimized: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    for path in source.rglob("*.rs"):
        path.touch()  # cargo judges by time: it would take what it has built from other sources
    built = maturin("build", source, tmp_path / "out", "--release", CARGO_TARGET_DIR=str(unoptimized), **UNOPTIMIZED)
    assert wheel_names(built) == wheel_names(wheel)
