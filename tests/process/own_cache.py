"""Cache folders of tests: with this machine's models, and without what its user's commands remember."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.machine.cache_folder import cache_folder
from llmnode.swarm.former_peers import FILE
from llmnode.swarm.own_nodes import FOLDER

if TYPE_CHECKING:
    from pathlib import Path

MADE = ("models", "quantized", "digests", "hub", "blueprints", "torchinductor")
"""Takes long to make, and is the same for everybody."""


def cache_of_models(folder: Path) -> Path:
    """Links in `folder` what this machine's cache has made out of models. Tests put there what they make of models."""
    for name in MADE:
        made = cache_folder(name)
        made.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(made)
    return folder


def cache_without_peers(folder: Path) -> Path:
    """Makes `folder`, a cache that has what this machine's has, except the peers."""
    folder.mkdir()
    for each in cache_folder().iterdir():
        if each.name not in (FILE, FOLDER):
            (folder / each.name).symlink_to(each)
    return folder
