"""How many threads torch and Rust are to compute with here: as many as there are cores for this process.

torch looks at the machine, and not at the share of it that a container may take. With ten times more threads than that
share, each forward waits until its group's next period.
"""

from __future__ import annotations

import math
import os
from pathlib import Path

from llmnode.machine.control_groups import groups, read


def use_threads(asked: int | None = None) -> None:
    """Use `asked` threads; by default the number that torch would use, or fewer if there are fewer `usable_cores`."""
    import torch

    torch.set_num_threads(asked or min(torch.get_num_threads(), usable_cores()))


def usable_cores(root: Path = Path("/")) -> int:
    """Those that this process may run on, or fewer if its control group has less time. `root` is as in `groups`."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    times = [share for folder, is_unified in groups("cpu", root) if (share := _share(folder, is_unified)) is not None]
    return max(1, min(own, *map(math.ceil, times))) if times else own


def _share(folder: Path, is_unified: bool) -> float | None:
    """The number of cores that the group may use all the time, None without a limit."""
    if is_unified:
        quota, _, period = read(folder / "cpu.max").partition(" ")
    else:
        quota, period = read(folder / "cpu.cfs_quota_us"), read(folder / "cpu.cfs_period_us")
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max" or -1, or there is no such group
        return None
    return int(quota) / int(period)
