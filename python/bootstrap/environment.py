"""The environment of a checkout: what an earlier run has made of it, and whether that will do."""

import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from bootstrap.messages import SetupError

STAMP, MARKER = "llmnode.stamp", "llmnode.json"


@dataclass(frozen=True, slots=True)
class Setup:
    """The environment to set up, and its place."""

    root: Path
    venv: Path
    sources_sum: str
    dev: bool

    @property
    def python(self) -> Path:
        return self.venv / "bin" / "python"


@dataclass(frozen=True, slots=True)
class Installed:
    """The content of the marker in an environment that an earlier run made."""

    venv: str = ""  # where it was made: its scripts name this path
    made_by: str = ""
    python: str = ""  # what its bin/python led to; an upgrade of the system's Python changes that, and breaks it
    requirements: tuple[str, ...] = ()  # the lock's digest; nothing while its packages are being installed
    dev: bool = False


def is_current(setup: Setup) -> bool:
    installed = read_marker(setup.venv)
    try:
        stamped = (setup.venv / STAMP).read_text().splitlines()
    except FileNotFoundError:
        return False
    natives = list((setup.root / "python" / "llmnode").glob("_native*.so"))
    return (
        is_reusable(setup, installed)
        and stamped == [setup.sources_sum, os.path.realpath(setup.python)]
        and bool(natives)
        and installed.dev >= setup.dev
    )


def is_reusable(setup: Setup, installed: Installed) -> bool:
    """Whether the environment needs no more than an update."""
    return (
        installed.requirements != ()
        and installed.venv == str(setup.venv)  # else it was copied or moved, and its scripts start another one's Python
        and installed.python == os.path.realpath(setup.python)
        and os.access(setup.python, os.X_OK)
        and (not os.environ.get("LLMNODE_PYTHON") or installed.made_by == base_python())
    )


def base_python() -> str:
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def read_marker(venv: Path) -> Installed:
    try:
        fields = json.loads((venv / MARKER).read_text())
        return Installed(**{**fields, "requirements": tuple(fields["requirements"])})
    except (FileNotFoundError, NotADirectoryError, KeyError, TypeError, ValueError):
        return Installed()


def write_marker(venv: Path, installed: Installed) -> None:
    write_atomically(venv / MARKER, json.dumps(asdict(installed), indent=1))


def clear(venv: Path, *, ours: bool) -> None:
    """Remove what an earlier run left; nothing that it did not make."""
    if not ours and venv.is_dir() and any(venv.iterdir()):
        raise SetupError(f"{venv} was not made by llmnode: remove it, or name another place in LLMNODE_VENV, and retry")
    if venv.is_symlink() or venv.is_mount():  # someone chose where it lives
        for entry in venv.iterdir():
            shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    elif venv.exists():
        shutil.rmtree(venv)


def write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    temporary.replace(path)
