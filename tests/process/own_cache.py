"""A cache folder for one test: with this machine's models, and without the peers that it remembers or runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.machine.cache_folder import cache_folder
from llmnode.swarm.former_peers import FILE
from llmnode.swarm.own_nodes import FOLDER

if TYPE_CHECKING:
    from pathlib import Path


def cache_without_peers(folder: Path) -> Path:
    """Makes `folder`, a cache that has what this machine's has, except the peers."""
    folder.mkdir()
    for each in cache_folder().iterdir():
        if each.name not in (FILE, FOLDER):
            (folder / each.name).symlink_to(each)
    return folder
