"""A model on the Hugging Face hub as a model folder. Only files that are read are downloaded.

Opening it gets the config, the tokenizer and the headers of the safetensors. From these few bytes of every shard all
peers compute the same digest, whatever part they have. A shard comes whole when a part of it is read. It lies in
huggingface_hub's own cache, where other programs find it, and we find theirs. A model of a single file is downloaded
whole too. Ranges of it would take less, but no other program could use them, nor another span offline.

Files that run code when they are read (pickles, and Python) are never downloaded.
"""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from llmnode.errors import ModelError
from llmnode.machine.cache_folder import cache_folder, check_disk_space, write_in_cache
from llmnode.models.sources.checkpoint import ADAPTER_FILE, CONFIG_FILE, is_index, shard_names, weights_file
from llmnode.models.sources.folder import Header, ModelFolder, index_tensors, no_model, open_config, read_header
from llmnode.models.sources.identity import hub_weights
from llmnode.models.sources.online import hub_access, is_offline
from llmnode.models.sources.repository import fetch, locate, obtain, partly_here

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path

    from llmnode.models.sources.repository import HubName, Snapshot

_CONFIGS = (CONFIG_FILE, ADAPTER_FILE)
_SMALL_FILES = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_HEADERS_AT_ONCE = 8


def open_hub(name: HubName, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """Get the files for the digest and the tokenizer, and no shard: those are downloaded as the folder is read.

    Without a network, or with `LLMNODE_OFFLINE`, the cache is used. `report` gets a line before each slow step, also
    when the folder is read. Both raise ConfigError (no such model, no access, network, disk) and ModelError (we cannot
    run it).
    """
    offline = is_offline()
    with hub_access(str(name)):
        snapshot = locate(name, offline, report, _is_opened)
        _fetch(snapshot, _CONFIGS)
        config = open_config(snapshot.path, str(name), snapshot.names)  # before anything large
        headers = _headers(snapshot, _shards(snapshot, config))
    index = index_tensors(snapshot.path, headers, hub_weights(snapshot.commit))
    return ModelFolder(snapshot.path, name.repo, *index, partial(obtain, snapshot, report))


def _is_opened(snapshot: Snapshot) -> bool:
    """Whether all that opening it takes is here. The headers are written last."""
    return (snapshot.path / CONFIG_FILE).is_file() and _headers_file(snapshot).is_file()


def _headers_file(snapshot: Snapshot) -> Path:
    """Where we keep its shards' headers: the cache of huggingface_hub has no place for a part of a file.

    They are of all files that are the model, so that it is known later, without the hub, which those are.
    """
    return cache_folder("hub", snapshot.name.repo.replace("/", "--"), f"{snapshot.commit}.headers.json")


def _fetch(snapshot: Snapshot, patterns: Iterable[str]) -> None:
    if not _is_opened(snapshot):
        fetch(snapshot, patterns)


def _shards(snapshot: Snapshot, config: Mapping[str, Any]) -> list[str]:
    """The files that are the model, as the hub has them; without the hub, as it had them, or else the cache has."""
    if not snapshot.remote_files and (known := _known_headers(snapshot)):
        return [*known]
    remote = snapshot.remote_files
    file = weights_file(config, lambda each: each in remote if remote else (snapshot.path / each).is_file())
    if file is None:
        raise partly_here(snapshot) if not remote else no_model(snapshot.path, str(snapshot.name), remote)
    _fetch(snapshot, (*_SMALL_FILES, *((file,) if is_index(file) else ())))
    return shard_names(snapshot.path, file)


def _headers(snapshot: Snapshot, shards: Sequence[str]) -> dict[str, Header]:
    """The header of each of `shards`, here or not."""
    known = _known_headers(snapshot)
    here = [shard for shard in shards if shard not in known and (snapshot.path / shard).exists()]
    known |= {shard: read_header(snapshot.path / shard) for shard in here}
    missing = [shard for shard in shards if shard not in known]
    if missing and snapshot.unreachable is not None:
        raise partly_here(snapshot)
    if strange := [shard for shard in missing if snapshot.remote_files and shard not in snapshot.remote_files]:
        raise ModelError(
            f"{snapshot.name} has an index that names {strange[0]}, which it lacks: choose another model or revision"
        )
    if missing:
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            known |= dict(zip(missing, pool.map(partial(_fetch_header, snapshot), missing), strict=True))
    headers = {shard: known[shard] for shard in shards}
    kept = _headers_file(snapshot)
    if missing or here or not kept.exists():
        check_disk_space(kept.parent, 0)
        write_in_cache(kept, json.dumps(headers))
    return headers


def _known_headers(snapshot: Snapshot) -> dict[str, Header]:
    kept = _headers_file(snapshot)
    if not kept.is_file():
        return {}
    try:
        stored: dict[str, dict[str, Any]] = json.loads(kept.read_text())
        return {
            shard: {tensor: (str(dtype), [int(size) for size in shape]) for tensor, (dtype, shape) in header.items()}
            for shard, header in stored.items()
        }
    except (ValueError, TypeError, AttributeError):  # damaged: got once more
        return {}


def _fetch_header(snapshot: Snapshot, shard: str) -> Header:
    """Gets the header of a shard, as ranges of bytes."""
    from huggingface_hub import HfApi

    fetched = HfApi().parse_safetensors_file_metadata(snapshot.name.repo, shard, revision=snapshot.commit)
    return {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in fetched.tensors.items()}
