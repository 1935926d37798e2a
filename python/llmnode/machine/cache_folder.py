"""The folder for files that can be made again."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from llmnode.core.user_input import home_folder, path_from
from llmnode.errors import ConfigError
from llmnode.machine.private_folder import find_stranger

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

CACHE = "LLMNODE_CACHE"
"""The variable of the environment that moves it."""
TORCH_CACHE = "torchinductor"
"""The folder in it for what torch compiles."""


def cache_folder(*parts: str) -> Path:
    """`$LLMNODE_CACHE`, else `llmnode` in the user's cache folder; or the folder or file `parts` in it.

    Raises ConfigError if the user has none, or if somebody else could write there: what is read from the cache
    stands for models, and for compiled code.
    """
    chosen = path_from(os.environ, CACHE)
    whole = home_folder(os.environ, "XDG_CACHE_HOME", ".cache") / "llmnode" if chosen is None else chosen
    place = whole.joinpath(*parts)
    if why := find_stranger(whole) or find_stranger(place):
        raise ConfigError(
            f"the cache {place} is not safe: {why}; set LLMNODE_CACHE to a folder that only you may write, or take that"
            " right away (chmod go-w) if the folder is yours alone, and not the system's"
        )
    return place


def torch_folder() -> Path | None:
    """The folder that torch has to have, even if it compiles nothing; None if it is not there and cannot be made.

    Then torch makes one in the system's folder for temporary files. Raises ConfigError as `cache_folder`.
    """
    folder = cache_folder(TORCH_CACHE)
    return folder if os.path.isdir(folder) or is_writable(folder) else None


def is_writable(place: Path) -> bool:
    """Whether a folder can be written, or be made where it is to be."""
    return os.path.isdir(existing := nearest(place)) and os.access(existing, os.W_OK | os.X_OK)


def nearest(place: Path) -> Path:
    """The file or folder itself, or the nearest folder around it that can be seen."""
    return next(each for each in (place, *place.parents) if os.path.exists(each))  # `Path.exists` may raise


def make_in_cache(folder: Path) -> None:
    """Make `folder`, which is of the cache, and all above it that lack, for the user alone to write.

    Raises OSError, or ConfigError if somebody else was faster.
    """
    for each in reversed([folder, *folder.parents]):
        if not each.exists():
            each.mkdir(mode=0o755, exist_ok=True)
    if why := find_stranger(folder):
        raise ConfigError(f"the cache {folder} is not safe: {why}")


def write_in_cache(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file of the cache, and make its folder. Raises OSError or ConfigError."""
    make_in_cache(file.parent)
    write_whole(file, text, mode)


@contextmanager
def alone_with(file: Path) -> Iterator[None]:
    """Holds the lock of a file of the cache, so that the body may read the file and write it anew.

    It waits for other programs, so call it with `cache_disk.in_time`. On a disk that knows no locks there is none.

    Raises OSError, or ConfigError as `make_in_cache`.
    """
    make_in_cache(file.parent)
    with open(os.open(file.with_name(f".{file.name}.lock"), os.O_WRONLY | os.O_CREAT, 0o644), "w") as opened:
        with suppress(OSError):
            fcntl.flock(opened, fcntl.LOCK_EX)
        yield


def write_whole(file: Path, text: str, mode: int = 0o644) -> None:
    """Write a file whole or not at all, even if others write it too. A new one has this `mode`. Raises OSError."""
    partly = file.with_name(f".{secrets.token_hex(8)}.partial")
    try:
        with open(os.open(partly, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "w", encoding="utf-8") as opened:
            opened.write(text)
        partly.replace(file)
    finally:
        partly.unlink(missing_ok=True)


def check_disk_space(folder: Path, needed_bytes: int, variable: str = CACHE) -> None:
    """Make `folder`, which the environment `variable` moves elsewhere. Raises ConfigError if the disk is too full."""
    try:
        if variable == CACHE:
            make_in_cache(folder)
        else:
            folder.mkdir(parents=True, exist_ok=True)
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        raise ConfigError(f"cannot write to the cache {folder} ({error}): set {variable} to another folder") from error
    if free_bytes < needed_bytes:
        raise ConfigError(
            f"{folder} has {show_bytes(free_bytes)} free and the model needs {show_bytes(needed_bytes)}: "
            f"free some space or set {variable} to another disk"
        )


def show_bytes(size_bytes: int) -> str:
    """A size for people to read: in MiB, and from 10 GiB on in GiB."""
    return f"{size_bytes >> 30} GiB" if size_bytes >= 10 << 30 else f"{-(-size_bytes >> 20)} MiB"
