"""The processor of this machine, its cores, and its GPUs, in a few words. Loads no torch."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from llmnode.machine.control_groups import read
from llmnode.machine.threads import usable_cores


@cache
def hardware(root: Path = Path("/")) -> str:
    """A line that is the same as long as the hardware is, and the cores that this process may use. `root` is that of
    the file system.
    """
    gpus = [_field(file, "Model") for file in sorted(root.glob("proc/driver/nvidia/gpus/*/information"))]
    return ", ".join([f"{_processor(root)} x {usable_cores(root)}", *gpus])


def _processor(root: Path) -> str:
    return _field(root / "proc/cpuinfo", "model name") or platform.processor() or platform.machine()


def _field(file: Path, name: str) -> str:
    """The value of the first line `name: value` of a file; empty without one."""
    for line in read(file).splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return ""
