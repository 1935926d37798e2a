"""How much memory this machine has left for a model: the free memory, or less in a container that may not use it all.

It knows nothing of models.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from llmnode.machine.control_groups import groups, read


class _Accounts(NamedTuple):
    """The file names of one version of control groups for the numbers about memory."""

    limit: str
    used: str
    unread: str  # in memory.stat: files that nobody has read of late, which are dropped when memory is needed
    read: str  # files that are read time and again, which do too
    mapped: str  # files that are in use, as libraries are: at most this much of them is among those that are read


_V1 = _Accounts(
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    unread="total_inactive_file",
    read="total_active_file",
    mapped="total_mapped_file",
)
_V2 = _Accounts("memory.max", "memory.current", unread="inactive_file", read="active_file", mapped="file_mapped")


def free_bytes(device: str = "cpu", root: Path = Path("/")) -> int:
    """The free memory of a device, by torch's name for it. `root` is as in `groups`."""
    if device != "cpu":
        import torch

        return torch.cuda.mem_get_info(device)[0]
    import psutil

    left = (_left_to_group(folder, _V2 if is_unified else _V1) for folder, is_unified in groups("memory", root))
    return min([psutil.virtual_memory().available, *(each for each in left if each is not None)])


def _left_to_group(folder: Path, accounts: _Accounts) -> int | None:
    """None without a limit."""
    limit, used = read(folder / accounts.limit), read(folder / accounts.used)
    if not (limit.isdigit() and used.isdigit()):  # "max", or there is no such group
        return None
    statistics = dict(line.split() for line in read(folder / "memory.stat").splitlines())
    unread, active, mapped = (
        int(statistics.get(each, 0)) for each in (accounts.unread, accounts.read, accounts.mapped)
    )
    # A worker that is started again reads its model's files once more: they must not keep it from its memory.
    return max(0, int(limit) - int(used) + unread + max(0, active - mapped))
