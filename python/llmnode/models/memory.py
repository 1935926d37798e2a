"""How much memory this machine has left for a model: what is free, or less in a container that may not take it all.

Knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple


class _Accounts(NamedTuple):
    """Where a version of Linux's control groups keeps what of memory."""

    mount: str
    limit: str
    used: str
    unread: str  # in memory.stat: files that nobody has read of late, which make room when it is needed
    read: str  # files that are read time and again, which do too
    mapped: str  # files that are in use, as libraries are: at most this much of them is among those that are read


_V1 = _Accounts(
    "sys/fs/cgroup/memory",
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    unread="total_inactive_file",
    read="total_active_file",
    mapped="total_mapped_file",
)
_V2 = _Accounts(
    "sys/fs/cgroup",
    "memory.max",
    "memory.current",
    unread="inactive_file",
    read="active_file",
    mapped="file_mapped",
)


def free_bytes(device: str = "cpu", root: Path = Path("/")) -> int:
    """On a device as torch names it. `root` is where Linux's own folders are."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    return min([psutil.virtual_memory().available, *_left_to_groups(root)])


def _left_to_groups(root: Path) -> list[int]:
    """Of each limit that this process is under: its control group's, and those of the groups that this one is in."""
    left: list[int] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, group = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        accounts = _V1 if controllers else _V2
        mount = root / accounts.mount
        folder = mount / group.lstrip("/")
        # A container may see its own group as the mount, and yet be told its path outside: that is then not there.
        groups = [each for each in (folder, *folder.parents) if each.is_relative_to(mount)]
        left += [room for each in groups if (room := _left_to_group(each, accounts)) is not None]
    return left


def _left_to_group(folder: Path, accounts: _Accounts) -> int | None:
    """None without a limit."""
    limit, used = _read(folder / accounts.limit), _read(folder / accounts.used)
    if not (limit.isdigit() and used.isdigit()):  # "max", or there is no such group
        return None
    statistics = dict(line.split() for line in _read(folder / "memory.stat").splitlines())
    unread, read, mapped = (int(statistics.get(each, 0)) for each in (accounts.unread, accounts.read, accounts.mapped))
    # A worker that is started again reads its model's files once more: they must not keep it from its memory.
    return max(0, int(limit) - int(used) + unread + max(0, read - mapped))


def _read(file: Path) -> str:
    """Empty if it is not there, as on other systems."""
    try:
        return file.read_text().strip()
    except OSError:
        return ""
