"""Packages that cargo has compiled, kept in the user's cache for the next clean checkout, as Go and uv keep theirs.

Each target folder gets a copy, so that no two builds share one. The crates of this repository are not kept: cargo
judges by time, and might take a crate that was built from another checkout.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import shutil
import subprocess
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmnode.machine.cache_folder import cache_folder, make_in_cache

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

UNOPTIMIZED = {"CARGO_PROFILE_RELEASE_OPT_LEVEL": "0", "CARGO_PROFILE_RELEASE_LTO": "off"}
"""Settings for builds that tests neither time nor compute with: optimizing is most of a build. All other tests use an
environment that is built as users build it."""
OWN = shutil.ignore_patterns("llmnode*", "libllmnode*", "incremental", "maturin", "wheels")


@contextmanager
def compiled_packages(name: str, target: Path, lock: Path, settings: Mapping[str, str]) -> Iterator[None]:
    """Build in `target` within this context: it begins with the packages that earlier builds have compiled.

    They are those of the same `name`, `lock` file and cargo, and of the same `settings` of the environment. The next
    packages of this name replace them. Raises ConfigError if the cache is not safe.
    """
    if shutil.which("cargo") is None:
        yield
        return
    version = subprocess.run(["cargo", "--version"], capture_output=True, text=True, check=True).stdout
    key = hashlib.sha256(json.dumps([version, lock.read_text(), sorted(settings.items())]).encode()).hexdigest()[:16]
    kept = cache_folder("cargo", f"{name}-{key}")
    if kept.exists() and not target.exists():
        try:
            shutil.copytree(kept, target)
        except shutil.Error:  # another checkout, with another lock, has just removed them
            shutil.rmtree(target)
    yield
    if not kept.exists():
        _keep(target, kept)


def _keep(target: Path, kept: Path) -> None:
    make_in_cache(kept.parent)
    for former in kept.parent.glob(f"{kept.name.rpartition('-')[0]}-*"):
        shutil.rmtree(former, ignore_errors=True)
    partly = kept.with_name(f"{kept.name}.{secrets.token_hex(4)}.partial")
    try:
        shutil.copytree(target, partly, ignore=OWN)
        partly.rename(kept)
    except OSError:  # another one was faster, or the disk is full
        shutil.rmtree(partly, ignore_errors=True)
