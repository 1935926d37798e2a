"""Digests of large files, which are computed once: a file that is what it was is not read again to identify it.

They are kept in our cache, which nobody else may write, by the file's path, and hold while its size, its inode and both
of its times are the same. A program may set a file's time of modification, but not that of its change (ctime).
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from llmnode.errors import ModelError
from llmnode.machine.cache_folder import cache_folder, show_bytes, write_in_cache

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

SETTLED_S = 2.0
"""A file that changed later than this before it was read may change again without another time: some file systems
count in seconds. Its digests are not kept."""


SHA256 = "sha256"
TOLD_BYTES = 1 << 30
"""A file of this size takes seconds to read, which is told."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """Two stamps of a path are equal if its file has not been written or replaced meanwhile."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int


def stamp_of(file: Path) -> Stamp:
    """Raises ModelError if the file cannot be looked at."""
    try:
        found = os.stat(file)
    except OSError as error:
        raise ModelError(f"cannot read {file} ({error.strerror})") from error
    return Stamp(found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def digests_of(file: Path, kind: str, compute: Callable[[Path], Mapping[str, str]]) -> Mapping[str, str]:
    """Gives the result of `compute` for the file: digests by name, in hex. `kind` names the function.

    Raises ModelError if the file cannot be read, or is written meanwhile; ConfigError for an unsafe cache.
    """
    before = stamp_of(file)
    kept = _place_of(file, kind)
    if (digests := _read(kept, before)) is not None:
        return digests
    digests = compute(file)
    if stamp_of(file) != before:
        raise ModelError(f"{file} was written while it was read: run again when it is whole")
    if time.time() - before.changed_ns / 1e9 > SETTLED_S:
        keep(file, kind, digests)
    return digests


def keep(file: Path, kind: str, digests: Mapping[str, str]) -> None:
    """For a file that we have just written and that nobody writes to any more."""
    described = {"file": str(file), "stamp": astuple(stamp_of(file)), "digests": dict(digests)}
    with suppress(OSError):  # a full disk, or a cache that may only be read: they are computed again
        write_in_cache(_place_of(file, kind), json.dumps(described))


def sha256_of(file: Path, report: Callable[[str], None] = lambda _line: None) -> str:
    """In hex. `report` is told in a line what takes long. Raises as `digests_of`."""

    def compute(file: Path) -> Mapping[str, str]:
        try:
            if (size_bytes := file.stat().st_size) >= TOLD_BYTES:
                report(f"computing the SHA-256 of {file.name}, once ({show_bytes(size_bytes)})")
            with file.open("rb") as opened:
                return {SHA256: hashlib.file_digest(opened, SHA256).hexdigest()}
        except OSError as error:
            raise ModelError(f"cannot read {file} ({error.strerror})") from error

    return digests_of(file, SHA256, compute)[SHA256]


def _place_of(file: Path, kind: str) -> Path:
    named = hashlib.sha256(os.fsencode(file.resolve())).hexdigest()
    return cache_folder("digests", f"{named}.{kind}.json")


def _read(kept: Path, stamp: Stamp) -> Mapping[str, str] | None:
    try:
        described = json.loads(kept.read_text(encoding="utf-8"))
        digests = described["digests"]
        is_of_now = Stamp(*described["stamp"]) == stamp and all(isinstance(each, str) for each in digests.values())
    except (OSError, ValueError, TypeError, KeyError, AttributeError):  # there is none, or it is damaged
        return None
    return digests if is_of_now else None
