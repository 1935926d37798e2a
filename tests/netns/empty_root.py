"""A root folder with Debian's Python and the C library in it, and nothing to compile with: as in a slim container."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

PYTHON = Path("/usr/bin/python3")
LINKED = ("bin", "lib", "lib64")
"""Links of Debian's root into /usr."""
PROGRAMS = ("cat", "dash", "env", "sh", "uname")
READ = (
    "/dev",
    "/etc/group",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/passwd",
    "/etc/resolv.conf",
    "/etc/ssl",
    "/proc",
    "/sys",
    "/usr/share/ca-certificates",
    "/usr/share/python-wheels",
)
PASSED_ON = ("PIP_", "UV_", "SSL_", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "http_proxy", "https_proxy", "no_proxy")
"""The settings by which this machine reaches its packages, as they begin."""


@dataclass(frozen=True, slots=True)
class EmptyRoot:
    """`binds` are more files and folders of this machine, by their paths in the root. They can be read and written."""

    folder: Path
    binds: Mapping[str, Path]

    def command(self, *words: str | Path) -> list[str]:
        """The command that runs these words in the root, with a view of the file system that ends with it."""
        mounts = [(source, self.folder / str(source).lstrip("/")) for source in _read_from_host()]
        mounts += [(source, self.folder / place.lstrip("/")) for place, source in self.binds.items()]
        lines = ["set -e"]
        for source, target in mounts:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.mkdir(exist_ok=True) if source.is_dir() else target.touch()
            lines.append(f"mount --rbind {shlex.quote(str(source))} {shlex.quote(str(target))}")
        lines.append(f'exec {shutil.which("chroot")} {shlex.quote(str(self.folder))} "$@"')
        return ["unshare", "--mount", "--propagation=private", "sh", "-c", "\n".join(lines), "sh", *map(str, words)]

    def environment(self, **more: str) -> dict[str, str]:
        passed_on = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        return {**passed_on, "HOME": "/root", "PATH": "/env/bin:/usr/bin", "LANG": "C.UTF-8", **more}

    def run(self, *words: str | Path, timeout_s: float = 300, answers: str = "") -> str:
        """Runs a command in the root, with `answers` as its input. Returns its output."""
        answer = subprocess.run(
            self.command(*words),
            env=self.environment(),
            input=answers,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_s,
        )
        assert answer.returncode == 0, answer.stdout + answer.stderr
        return answer.stdout


def why_not() -> str | None:
    """The reason for which there can be no such root here."""
    if os.geteuid() != 0 or subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode:
        return "a root of its own needs root and namespaces"
    version = subprocess.run([PYTHON, "-c", "import ensurepip, sys; assert sys.version_info >= (3, 11)"], check=False)
    return f"{PYTHON} is not a Python 3.11 that makes environments" if version.returncode else None


@contextmanager
def open_empty_root(folder: Path, binds: Mapping[str, Path]) -> Iterator[EmptyRoot]:
    """A new root in an empty folder, which is removed with it."""
    for name in LINKED:
        (folder / "usr" / name).mkdir(parents=True)
        (folder / name).symlink_to(f"usr/{name}")
    for name in ("root", "tmp"):
        (folder / name).mkdir()
    python = PYTHON.resolve()
    for name in PROGRAMS:
        shutil.copy(f"/usr/bin/{name}", folder / "usr" / "bin" / name)
    shutil.copy(python, folder / "usr" / "bin" / python.name)
    (folder / "usr" / "bin" / "python3").symlink_to(python.name)
    yield EmptyRoot(folder, binds)
    shutil.rmtree(folder)


def _read_from_host() -> list[Path]:
    libraries = list(Path("/usr/lib").glob("*-linux-gnu*"))
    loaders = [Path("/usr/lib64")] if Path("/usr/lib64").is_dir() else []
    pythons = list(Path("/usr/lib").glob("python3*"))
    return [*libraries, *loaders, *pythons, *(Path(path) for path in READ if Path(path).exists())]
