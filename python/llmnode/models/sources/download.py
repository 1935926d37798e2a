"""Large files of the hub, one after the other, resumed where an earlier run was interrupted.

huggingface_hub resumes a broken connection, but not a download whose program was killed. So we fetch the bytes of a
shard ourselves, into huggingface_hub's cache under a fixed name, and the next run goes on with them. Then
huggingface_hub finds a complete file, and puts it in its place.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from filelock import FileLock

from llmnode.errors import ModelError
from llmnode.machine.cache_folder import check_disk_space, show_bytes
from llmnode.models.sources.file_digests import SHA256, keep

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_ETAG = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
_SHA256_DIGITS = 64
_TOLD_EVERY_BYTES = 1 << 30


@dataclass(frozen=True, slots=True)
class Shard:
    """A file of a repository at a commit, and once the hub has told: its size, and its name in the cache."""

    repo: str
    commit: str
    file: str
    size_bytes: int = 0
    etag: str = ""  # the SHA-256 of large files

    @property
    def is_resumable(self) -> bool:
        """A file that is larger than plain HTTP is meant for, or named in a strange way, is left to huggingface_hub."""
        from huggingface_hub import constants

        named = _ETAG.fullmatch(self.etag) is not None
        return named and 0 < self.size_bytes <= constants.MAX_HTTP_DOWNLOAD_SIZE


def size_of(shard: Shard) -> Shard:
    """Ask the hub about it."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    told = get_hf_file_metadata(hf_hub_url(shard.repo, shard.file, revision=shard.commit), retry_on_errors=True)
    return replace(shard, size_bytes=told.size or 0, etag=told.etag or "")


def download(shards: Sequence[Shard], repository: Path, report: Callable[[str], None]) -> None:
    """Put all `shards` into the cache's folder `repository`, telling `report` how far it is.

    Raises ConfigError if the disk is too full for them, ModelError if one arrives damaged; else huggingface_hub's
    errors, and the network's and the disk's.
    """
    from huggingface_hub import hf_hub_download

    blobs = repository / "blobs"
    left_bytes = sum(_left_bytes(blobs, shard) for shard in shards)
    check_disk_space(blobs, left_bytes, "HF_HUB_CACHE")
    progress = DownloadProgress(report, shards[0].repo, left_bytes)
    names = ", ".join(shard.file for shard in shards[:3]) + (f" and {len(shards) - 3} more" if len(shards) > 3 else "")
    report(f"downloading {show_bytes(left_bytes)} of {shards[0].repo}: {names}")
    bar: Any = partial(_Bar, progress)  # Any: in the place of a tqdm class, of which only this much is used
    for shard in shards:
        if shard.is_resumable:
            _fetch(shard, repository, bar)
        hf_hub_download(shard.repo, shard.file, revision=shard.commit, tqdm_class=bar)


def _fetch(shard: Shard, repository: Path, bar: Any) -> None:
    """Its bytes, under its name in the cache. Others that want it wait at the lock, as huggingface_hub's do."""
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]  # documented as being there

    blob, partly = repository / "blobs" / shard.etag, _partial(repository / "blobs", shard)
    lock = repository.parent / ".locks" / repository.name / f"{shard.etag}.lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(lock, mode=0o664):  # as huggingface_hub, for several users of one cache
        if blob.exists():
            partly.unlink(missing_ok=True)
            return
        if _size(partly) > shard.size_bytes:
            partly.unlink()
        with partly.open("ab") as opened:
            http_get(
                # Not where the hub redirects to: that address is for once, and a resumed download needs it anew.
                # The token does not follow the redirect to another host.
                hf_hub_url(shard.repo, shard.file, revision=shard.commit),
                opened,
                resume_size=_size(partly),
                headers={**build_hf_headers(), "Accept-Encoding": "identity"},
                expected_size=shard.size_bytes,
                displayed_filename=shard.file,
                tqdm_class=bar,
            )
        _check(shard, partly)
        partly.replace(blob)
        if len(shard.etag) == _SHA256_DIGITS:
            keep(blob, SHA256, {SHA256: shard.etag})


def _check(shard: Shard, file: Path) -> None:
    if len(shard.etag) != _SHA256_DIGITS:
        return
    with file.open("rb") as opened:
        sha256 = hashlib.file_digest(opened, "sha256").hexdigest()
    if sha256 != shard.etag:
        file.unlink()
        raise ModelError(f"{shard.file} of {shard.repo} arrived damaged: run again, to get it once more")


def _left_bytes(blobs: Path, shard: Shard) -> int:
    if shard.is_resumable and (blobs / shard.etag).exists():  # of another revision
        return 0
    return max(0, shard.size_bytes - _size(_partial(blobs, shard)))


def _partial(blobs: Path, shard: Shard) -> Path:
    return blobs / f"{shard.etag}.llmnode.incomplete"


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


class DownloadProgress:
    """Tells of every tenth of a download, and of every GiB of a large one."""

    def __init__(self, report: Callable[[str], None], repo: str, total_bytes: int) -> None:
        self._report = report
        self._repo = repo
        self._total_bytes = total_bytes
        self._every_bytes = max(1, min(total_bytes // 10, _TOLD_EVERY_BYTES))
        self._done_bytes = 0
        self._told_bytes = 0

    def add(self, size_bytes: int) -> None:
        self._done_bytes += size_bytes
        if self._done_bytes - self._told_bytes >= self._every_bytes:
            self._told_bytes = self._done_bytes
            shown = f"{show_bytes(self._done_bytes)} of {show_bytes(self._total_bytes)}"
            self._report(f"downloaded {shown} of {self._repo}")


class _Bar:
    """The part of a tqdm bar that huggingface_hub uses."""

    def __init__(self, progress: DownloadProgress, **_options: object) -> None:
        self._progress = progress

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc_info: object) -> None:
        pass

    def update(self, size_bytes: float | None = 1) -> None:
        self._progress.add(int(size_bytes or 0))
