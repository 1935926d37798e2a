"""A LoRA adapter of PEFT on the Hugging Face hub, as a folder. Only its two files are downloaded. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import AdapterError
from llmnode.models.sources.checkpoint import ADAPTER_FILE, ADAPTER_PICKLE_FILE, ADAPTER_WEIGHTS_FILE
from llmnode.models.sources.download import Shard, size_of
from llmnode.models.sources.online import hub_access, is_offline
from llmnode.models.sources.repository import fetch, locate, obtain, partly_here

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from llmnode.models.sources.repository import HubName, Snapshot


def hub_adapter(name: HubName, most_bytes: int, report: Callable[[str], None] = lambda _line: None) -> Path:
    """The folder of the adapter `name` in huggingface_hub's cache. Missing files are downloaded.

    Without a network, or with `LLMNODE_OFFLINE`, the cache must have it. `report` gets a line before each slow step.
    Raises ConfigError (no such repository, no access, network, disk), AdapterError if it holds no adapter, or one
    larger than `most_bytes`, and ModelError if a file in the cache is damaged.
    """
    offline = is_offline()
    with hub_access(str(name)):
        snapshot = locate(name, offline, report, _is_here)
        _check(snapshot, most_bytes)
        fetch(snapshot, (ADAPTER_FILE,))
    if not (snapshot.path / ADAPTER_FILE).is_file():
        raise partly_here(snapshot)
    obtain(snapshot, report, [snapshot.path / ADAPTER_WEIGHTS_FILE])
    return snapshot.path


def _is_here(snapshot: Snapshot) -> bool:
    return all((snapshot.path / file).is_file() for file in (ADAPTER_FILE, ADAPTER_WEIGHTS_FILE))


def _check(snapshot: Snapshot, most_bytes: int) -> None:
    """Raises AdapterError for a repository that holds no adapter that we read. Asks about its size."""
    there, name = snapshot.remote_files, snapshot.name
    if not there or _is_here(snapshot):
        return
    if ADAPTER_FILE not in there:
        raise AdapterError(f"{name} on the hub has no {ADAPTER_FILE}, so it is no adapter of PEFT: name another")
    if ADAPTER_WEIGHTS_FILE not in there:
        why = "it is a pickle, which runs code when it is read" if ADAPTER_PICKLE_FILE in there else "it is not there"
        raise AdapterError(f"{name} on the hub has no {ADAPTER_WEIGHTS_FILE} ({why}): name another revision or adapter")
    size_bytes = size_of(Shard(name.repo, snapshot.commit, ADAPTER_WEIGHTS_FILE)).size_bytes
    if size_bytes > most_bytes:
        raise AdapterError(
            f"{name} on the hub has {size_bytes >> 20} MiB, and servers hold {most_bytes >> 20}: use one of lower rank"
        )
