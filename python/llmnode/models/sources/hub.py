"""A model on the Hugging Face hub as a model folder. Only files that are read are downloaded.

Opening it gets the config, the tokenizer and the headers of the safetensors. From these few bytes of every shard all
peers compute the same digest, whatever part they have. A shard comes whole when a part of it is read. It lies in
huggingface_hub's own cache, where other programs find it, and we find theirs. A model of a single file is downloaded
whole too. Ranges of it would take less, but no other program could use them, nor another span offline.

Files that run code when they are read (pickles, and Python) are never downloaded.
"""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmnode.core.hub_names import split_hub_name
from llmnode.errors import ConfigError, ModelError
from llmnode.machine.cache_folder import cache_folder, check_disk_space, write_in_cache, write_whole
from llmnode.models.sources.checkpoint import (
    ADAPTER_FILE,
    CONFIG_FILE,
    is_index,
    names_in,
    shard_names,
    weights_file,
)
from llmnode.models.sources.download import Shard, download, size_of
from llmnode.models.sources.file_digests import sha256_of
from llmnode.models.sources.folder import Header, ModelFolder, index_tensors, no_model, open_config, read_header
from llmnode.models.sources.identity import hub_weights
from llmnode.models.sources.online import hub_access, is_offline, is_out_of_reach

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
"""The name of a large file in huggingface_hub's cache: its digest, as the hub says it."""
_NEWEST = "main"
_CONFIGS = (CONFIG_FILE, ADAPTER_FILE)
_SMALL_FILES = (
    *("generation_config.json", "tokenizer*.json", "tokenizer.model*", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "vocab.txt", "merges.txt", "spiece.model", "sentencepiece*.model", "*.tiktoken"),
    *("chat_template.json", "chat_template.jinja", "additional_chat_templates/*.jinja"),
)
_TIMEOUT_S = 30.0  # for one answer of the hub's API
_HEADERS_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, and a branch, a tag or a commit of it."""

    repo: str
    revision: str = _NEWEST

    def __str__(self) -> str:
        return self.repo if self.revision == _NEWEST else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One commit of a repository. `unreachable` says why the hub cannot be asked, if it cannot."""

    name: HubName
    commit: str
    unreachable: str | None
    remote_files: Collection[str]  # in the repository; none if it is unreachable or need not be asked

    @property
    def path(self) -> Path:
        """Where huggingface_hub's cache has its files, as far as they are there."""
        return _repository(self.name.repo) / "snapshots" / self.commit

    @property
    def names(self) -> Collection[str]:
        """The names of its files: those that are known here, without the hub."""
        return self.remote_files or (names_in(self.path) if self.path.is_dir() else ())

    @property
    def headers_file(self) -> Path:
        """Where we keep its shards' headers: the cache of huggingface_hub has no place for a part of a file.

        They are of all files that are the model, so that it is known later, without the hub, which those are.
        """
        return cache_folder("hub", self.name.repo.replace("/", "--"), f"{self.commit}.headers.json")


def parse_hub_name(text: str) -> HubName | None:
    """None if it cannot be the name of a model on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented as being there

    if (split := split_hub_name(text)) is None:
        return None
    try:
        validate_repo_id(split.repo)
    except HFValidationError:
        return None
    return HubName(split.repo, split.revision or _NEWEST)


def open_hub(name: HubName, report: Callable[[str], None] = lambda _line: None) -> ModelFolder:
    """Get the files for the digest and the tokenizer, and no shard: those are downloaded as the folder is read.

    Without a network, or with `LLMNODE_OFFLINE`, the cache is used. `report` gets a line before each slow step, also
    when the folder is read. Both raise ConfigError (no such model, no access, network, disk) and ModelError (we cannot
    run it).
    """
    offline = is_offline()
    with hub_access(str(name)):
        snapshot = _locate(name, offline, report)
        _fetch(snapshot, _CONFIGS)
        config = open_config(snapshot.path, str(name), snapshot.names)  # before anything large
        headers = _headers(snapshot, _shards(snapshot, config))
    index = index_tensors(snapshot.path, headers, hub_weights(snapshot.commit))
    return ModelFolder(snapshot.path, name.repo, *index, partial(_obtain, snapshot, report))


def _locate(name: HubName, offline: bool, report: Callable[[str], None]) -> _Snapshot:
    """The commit that the revision is now; or, if the hub cannot be asked, the one that it was last time."""
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if _COMMIT.fullmatch(name.revision) and _is_opened(pinned := _Snapshot(name, name.revision, None, ())):
        return pinned if not offline else _Snapshot(name, name.revision, _switched_off(), ())
    if offline:
        return _locate_in_cache(name, _switched_off())
    report(f"asking the hub for {name}")
    try:
        info = HfApi().model_info(name.repo, revision=name.revision, timeout=_TIMEOUT_S)
    except (httpx2.HTTPError, HfHubHTTPError) as error:
        if not is_out_of_reach(error) or _cached_commit(name) is None:
            raise
        snapshot = _locate_in_cache(name, f"{constants.ENDPOINT} cannot be reached")
        report(f"{constants.ENDPOINT} cannot be reached: using {name} as it was last, {snapshot.commit[:12]}")
        return snapshot
    if info.sha is None or not _COMMIT.fullmatch(info.sha):
        raise ConfigError(f"{constants.ENDPOINT} names no commit of {name}: check HF_ENDPOINT")
    remote_files = frozenset(sibling.rfilename for sibling in info.siblings or ())
    _remember(name, info.sha)
    return _Snapshot(name, info.sha, None, remote_files)


def _switched_off() -> str:
    return "the network is switched off (LLMNODE_OFFLINE or HF_HUB_OFFLINE is set)"


def _locate_in_cache(name: HubName, unreachable: str) -> _Snapshot:
    from huggingface_hub import constants

    commit = _cached_commit(name)
    if commit is None or not (snapshot := _Snapshot(name, commit, unreachable, ())).path.is_dir():
        raise ConfigError(
            f"{name} is not in the cache {constants.HF_HUB_CACHE}, and {unreachable}: run once with the network"
        )
    return snapshot


def _cached_commit(name: HubName) -> str | None:
    if _COMMIT.fullmatch(name.revision):
        return name.revision
    reference = _repository(name.repo) / "refs" / name.revision
    commit = reference.read_text().strip() if reference.is_file() else ""
    return commit if _COMMIT.fullmatch(commit) else None


def _remember(name: HubName, commit: str) -> None:
    """Remember the commit of the branch, like huggingface_hub when a file is asked for by a branch. We ask by the
    commit, so that all files are of one.
    """
    if commit == _cached_commit(name):
        return
    reference = _repository(name.repo) / "refs" / name.revision
    with suppress(OSError):  # a cache that may only be read, and has all: next time the hub is asked again
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_whole(reference, commit)


def _repository(repo: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE) / repo_folder_name(repo_id=repo, repo_type="model")


def _matching(files: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """A pattern is for a folder's files, not for those of the folders in it."""
    patterns = list(patterns)
    return sorted(
        file
        for file in files
        if any(fnmatch(file, pattern) and file.count("/") == pattern.count("/") for pattern in patterns)
    )


def _is_opened(snapshot: _Snapshot) -> bool:
    """Whether all that opening it takes is here. The headers are written last."""
    return (snapshot.path / CONFIG_FILE).is_file() and snapshot.headers_file.is_file()


def _fetch(snapshot: _Snapshot, patterns: Iterable[str]) -> None:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import silent_tqdm

    silent: Any = silent_tqdm  # Any: made by huggingface_hub to be given here, and not typed so
    if not _is_opened(snapshot):
        for file in _matching(snapshot.remote_files, patterns):
            hf_hub_download(snapshot.name.repo, file, revision=snapshot.commit, tqdm_class=silent)


def _shards(snapshot: _Snapshot, config: Mapping[str, Any]) -> list[str]:
    """The files that are the model, as the hub has them; without the hub, as it had them, or else the cache has."""
    if not snapshot.remote_files and (known := _known_headers(snapshot)):
        return [*known]
    remote = snapshot.remote_files
    file = weights_file(config, lambda each: each in remote if remote else (snapshot.path / each).is_file())
    if file is None:
        raise _partly(snapshot) if not remote else no_model(snapshot.path, str(snapshot.name), remote)
    _fetch(snapshot, (*_SMALL_FILES, *((file,) if is_index(file) else ())))
    return shard_names(snapshot.path, file)


def _partly(snapshot: _Snapshot) -> ConfigError:
    return ConfigError(
        f"the cache has only a part of {snapshot.name}, and {snapshot.unreachable}: run once with the network"
    )


def _headers(snapshot: _Snapshot, shards: Sequence[str]) -> dict[str, Header]:
    """The header of each of `shards`, here or not."""
    known = _known_headers(snapshot)
    here = [shard for shard in shards if shard not in known and (snapshot.path / shard).exists()]
    known |= {shard: read_header(snapshot.path / shard) for shard in here}
    missing = [shard for shard in shards if shard not in known]
    if missing and snapshot.unreachable is not None:
        raise _partly(snapshot)
    if strange := [shard for shard in missing if snapshot.remote_files and shard not in snapshot.remote_files]:
        raise ModelError(
            f"{snapshot.name} has an index that names {strange[0]}, which it lacks: choose another model or revision"
        )
    if missing:
        with ThreadPoolExecutor(_HEADERS_AT_ONCE) as pool:
            known |= dict(zip(missing, pool.map(partial(_fetch_header, snapshot), missing), strict=True))
    headers = {shard: known[shard] for shard in shards}
    if missing or here or not snapshot.headers_file.exists():
        check_disk_space(snapshot.headers_file.parent, 0)
        write_in_cache(snapshot.headers_file, json.dumps(headers))
    return headers


def _known_headers(snapshot: _Snapshot) -> dict[str, Header]:
    if not snapshot.headers_file.is_file():
        return {}
    try:
        stored: dict[str, dict[str, Any]] = json.loads(snapshot.headers_file.read_text())
        return {
            shard: {tensor: (str(dtype), [int(size) for size in shape]) for tensor, (dtype, shape) in header.items()}
            for shard, header in stored.items()
        }
    except (ValueError, TypeError, AttributeError):  # damaged: got once more
        return {}


def _fetch_header(snapshot: _Snapshot, shard: str) -> Header:
    """Gets the header of a shard, as ranges of bytes."""
    from huggingface_hub import HfApi

    fetched = HfApi().parse_safetensors_file_metadata(snapshot.name.repo, shard, revision=snapshot.commit)
    return {name: (str(tensor.dtype), list(tensor.shape)) for name, tensor in fetched.tensors.items()}


def _obtain(snapshot: _Snapshot, report: Callable[[str], None], files: Collection[Path]) -> None:
    """Download those of `files` that are not in the cache. Raises ModelError if one in the cache is damaged."""
    _download_missing(snapshot, report, files)
    for file in files:
        blob = file.resolve()
        if _SHA256.fullmatch(blob.name) and sha256_of(blob, report) != blob.name:
            raise ModelError(f"{file} is not what the hub has: remove {blob}, and run again to get it once more")


def _download_missing(snapshot: _Snapshot, report: Callable[[str], None], files: Collection[Path]) -> None:
    missing = [file.relative_to(snapshot.path).as_posix() for file in files if not file.exists()]
    if not missing:
        return
    unreachable = _switched_off() if is_offline() else snapshot.unreachable
    if unreachable is not None:
        raise ConfigError(
            f"this part of {snapshot.name} needs {missing[0]}, which is not in the cache, and {unreachable}: "
            "run once with the network"
        )
    with hub_access(str(snapshot.name)):
        shards = [size_of(Shard(snapshot.name.repo, snapshot.commit, file)) for file in missing]
        download(shards, _repository(snapshot.name.repo), report)
