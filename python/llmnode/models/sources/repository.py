"""A repository on the Hugging Face hub: what its commit is now, and its files in huggingface_hub's own cache.

It knows no model: `hub.py` opens models, and `hub_adapter.py` adapters. Torch is not imported. Files that run code when
they are read (pickles, and Python) are never downloaded.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llmnode.core.hub_names import split_hub_name
from llmnode.errors import ConfigError, ModelError
from llmnode.machine.cache_folder import write_whole
from llmnode.models.sources.checkpoint import names_in
from llmnode.models.sources.download import Shard, download, size_of
from llmnode.models.sources.file_digests import sha256_of
from llmnode.models.sources.online import hub_access, is_offline, is_out_of_reach

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
"""The name of a large file in huggingface_hub's cache: its digest, as the hub says it."""
_NEWEST = "main"
_TIMEOUT_S = 30.0  # for one answer of the hub's API


@dataclass(frozen=True, slots=True)
class HubName:
    """`org/name`, and a branch, a tag or a commit of it."""

    repo: str
    revision: str = _NEWEST

    def __str__(self) -> str:
        return self.repo if self.revision == _NEWEST else f"{self.repo}@{self.revision}"


@dataclass(frozen=True, slots=True)
class Snapshot:
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


def parse_hub_name(text: str) -> HubName | None:
    """None if it cannot be the name of a repository on the hub."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented as being there

    if (split := split_hub_name(text)) is None:
        return None
    try:
        validate_repo_id(split.repo)
    except HFValidationError:
        return None
    return HubName(split.repo, split.revision or _NEWEST)


def locate(
    name: HubName, offline: bool, report: Callable[[str], None], is_opened: Callable[[Snapshot], bool]
) -> Snapshot:
    """The commit that the revision is now; or, if the hub cannot be asked, the one that it was last time.

    For a commit the hub is not asked if `is_opened` says that all that opening takes is here. Call it within
    `hub_access`. Raises ConfigError, and what that explains.
    """
    import httpx2
    from huggingface_hub import HfApi, constants
    from huggingface_hub.errors import HfHubHTTPError

    if _COMMIT.fullmatch(name.revision) and is_opened(pinned := Snapshot(name, name.revision, None, ())):
        return pinned if not offline else Snapshot(name, name.revision, _switched_off(), ())
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
    return Snapshot(name, info.sha, None, remote_files)


def _switched_off() -> str:
    return "the network is switched off (LLMNODE_OFFLINE or HF_HUB_OFFLINE is set)"


def _locate_in_cache(name: HubName, unreachable: str) -> Snapshot:
    from huggingface_hub import constants

    commit = _cached_commit(name)
    if commit is None or not (snapshot := Snapshot(name, commit, unreachable, ())).path.is_dir():
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


def fetch(snapshot: Snapshot, patterns: Iterable[str]) -> None:
    """Download the small files of these names, unless they are here. Call it within `hub_access`."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.utils.tqdm import silent_tqdm

    silent: Any = silent_tqdm  # Any: made by huggingface_hub to be given here, and not typed so
    for file in _matching(snapshot.remote_files, patterns):
        hf_hub_download(snapshot.name.repo, file, revision=snapshot.commit, tqdm_class=silent)


def partly_here(snapshot: Snapshot) -> ConfigError:
    """The error that files are missing, and cannot be got."""
    return ConfigError(
        f"the cache has only a part of {snapshot.name}, and {snapshot.unreachable}: run once with the network"
    )


def obtain(snapshot: Snapshot, report: Callable[[str], None], files: Collection[Path]) -> None:
    """Download those of `files` that are not in the cache. Raises ModelError if one in the cache is damaged."""
    _download_missing(snapshot, report, files)
    for file in files:
        blob = file.resolve()
        if _SHA256.fullmatch(blob.name) and sha256_of(blob, report) != blob.name:
            raise ModelError(f"{file} is not what the hub has: remove {blob}, and run again to get it once more")


def _download_missing(snapshot: Snapshot, report: Callable[[str], None], files: Collection[Path]) -> None:
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
