"""The CPU time of processes, to the nanosecond on Linux: `psutil` knows hundredths of a second."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads that the process has now."""
    tasks = Path(f"/proc/{pid}/task")
    if not tasks.exists():
        times = psutil.Process(pid).cpu_times()
        return float(times.user + times.system)
    nanoseconds = 0
    for task in tasks.iterdir():
        with contextlib.suppress(OSError):  # it has just ended
            nanoseconds += int((task / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9
