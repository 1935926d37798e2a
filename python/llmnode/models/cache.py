"""Where llmnode keeps what can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$LLMNODE_CACHE`, else `llmnode` in the user's cache folder."""
    if chosen := os.environ.get("LLMNODE_CACHE"):
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "llmnode"
