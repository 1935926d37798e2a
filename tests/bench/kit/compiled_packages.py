"""Packages that cargo has compiled, kept in the user's cache for the next clean checkout, as Go and uv keep theirs.

Each target folder gets a copy, so that no two builds share one. The crates of this repository are not kept: cargo
judges by time, and might take a crate that was built from another checkout.

`tests/run` calls this as a program, `begin TARGET` before its first build of this repository and `keep TARGET` after
its last one. Any Python runs it, since there is no environment yet.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from llmnode.machine.cache_folder import cache_folder, make_in_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

UNOPTIMIZED = {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_LTO": "off"}
"""Settings for builds that tests neither time nor compute with: optimizing is most of a build. All other tests use an
environment that is built as users build it."""
OWN = shutil.ignore_patterns("llmnode*", "libllmnode*", "incremental", "maturin", "wheels")
ROOT = Path(__file__).resolve().parents[3]
NAME = "checkout"
"""The packages of all builds of `tests/run`."""


@contextmanager
def compiled_packages(name: str, target: Path, lock: Path, settings: Mapping[str, str]) -> Iterator[None]:
    """Build in `target` within this context: it begins with the packages that earlier builds have compiled.

    They are those of the same `name`, `lock` file and cargo, and of the same `settings` of the environment. The next
    packages of this name replace them. Raises ConfigError if the cache is not safe.
    """
    if shutil.which("cargo") is None:
        yield
        return
    kept = _place(name, lock, settings)
    _begin(target, kept)
    yield
    _keep(target, kept)


def main(argv: Sequence[str]) -> int:
    """Raises ConfigError if the cache is not safe."""
    if shutil.which("cargo") is not None:  # else set-up names what is missing
        act = {"begin": _begin, "keep": _keep}[argv[0]]
        act(Path(argv[1]), _place(NAME, ROOT / "Cargo.lock", {"profiles": (ROOT / "Cargo.toml").read_text()}))
    return 0


def _place(name: str, lock: Path, settings: Mapping[str, str]) -> Path:
    """The folder in the cache."""
    version = subprocess.run(["cargo", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(json.dumps([version, lock.read_text(), sorted(settings.items())]).encode()).hexdigest()[:16]
    return cache_folder("cargo", f"{name}-{key}")


def _begin(target: Path, kept: Path) -> None:
    if kept.exists() and not target.exists():
        try:
            shutil.copytree(kept, target)
        except shutil.Error:  # another checkout, with another lock, has just removed them
            shutil.rmtree(target)


def _keep(target: Path, kept: Path) -> None:
    if kept.exists():
        return
    make_in_cache(kept.parent)
    for former in kept.parent.glob(f"{kept.name.rpartition('-')[0]}-*"):
        shutil.rmtree(former, ignore_errors=True)
    partly = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copytree(target, partly, ignore=_own)
        partly.rename(kept)
    except OSError:  # another one was faster, or the disk is full
        shutil.rmtree(partly, ignore_errors=True)


def _own(folder: str, names: list[str]) -> set[str]:
    """The names of what is made of this repository: its crates, and the programs of their tests."""
    programs = {name for name in names if "." not in name} if Path(folder).name == "deps" else set()
    return OWN(folder, names) | programs


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
