"""Chooses among files on disk that can be made again: which of them to remove for a new one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class EvictionPolicy:
    disk_share: float = 0.25
    """Kept files may take this share of the free space and their own together: other programs use the disk too."""
    idle_s: float = 3600.0
    """Files that were used within this time stay: two nodes whose models do not both fit would remove each other's."""


@dataclass(frozen=True, slots=True)
class CachedFile:
    name: str
    size_bytes: int
    used_s: float


def files_to_remove(
    needed_bytes: int, name: str, kept: Sequence[CachedFile], free_bytes: int, now_s: float, policy: EvictionPolicy
) -> list[CachedFile] | None:
    """The files to remove before `needed_bytes` more are kept under `name`: the longest unused. None if that is not
    enough.
    """
    kept_bytes = sum(each.size_bytes for each in kept)
    over_bytes = kept_bytes + needed_bytes - int(policy.disk_share * (free_bytes + kept_bytes))
    going: list[CachedFile] = []
    for each in sorted(kept, key=lambda each: (each.used_s, each.name)):
        if over_bytes <= 0:
            break
        if each.name != name and now_s - each.used_s >= policy.idle_s:
            going.append(each)
            over_bytes -= each.size_bytes
    return going if over_bytes <= 0 else None
