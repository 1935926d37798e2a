"""The folder for files that can be made again."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from llmnode.core.user_input import home_folder, path_from
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path


def cache_folder() -> Path:
    """`$LLMNODE_CACHE`, else `llmnode` in the user's cache folder. Raises ConfigError if the user has none."""
    if (chosen := path_from(os.environ, "LLMNODE_CACHE")) is not None:
        return chosen
    return home_folder(os.environ, "XDG_CACHE_HOME", ".cache") / "llmnode"


def require_room(folder: Path, needed_bytes: int, variable: str = "LLMNODE_CACHE") -> None:
    """Make `folder`, which the environment `variable` moves elsewhere. Raises ConfigError if the disk is too full."""
    try:
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
