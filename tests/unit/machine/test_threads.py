"""How many cores the limits of control groups leave, from files as Linux has them."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING
from unittest.mock import patch

import pytest
import torch

from llmnode.machine.threads import usable_cores, use_threads

if TYPE_CHECKING:
    from pathlib import Path

OWN = 8
V1, V2 = "sys/fs/cgroup/cpu", "sys/fs/cgroup"


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, OWN),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, OWN),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "200000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "150000 100000"}, 2),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "10000 100000"}, 1),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "6400000 100000"}, OWN),
        ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "200000"}, OWN),
        ({"proc/self/cgroup": "0::/a/b", f"{V2}/a/cpu.max": "300000 100000", f"{V2}/a/b/cpu.max": "max 100000"}, 3),
        (
            {
                "proc/self/cgroup": "4:cpu,cpuacct:/docker/0f3\n1:memory:/",
                f"{V1}/cpu.cfs_quota_us": "400000",
                f"{V1}/cpu.cfs_period_us": "100000",
            },
            4,
        ),
        ({"proc/self/cgroup": "4:cpu:/", f"{V1}/cpu.cfs_quota_us": "-1", f"{V1}/cpu.cfs_period_us": "100000"}, OWN),
    ],
    ids=[
        "no groups",
        "no limit",
        "two cores",
        "one and a half",
        "a tenth of one",
        "more than there are",
        "no period",
        "the group above",
        "v1, a path that is outside",
        "v1, no limit",
    ],
)
def test_no_more_cores_are_used_than_a_limit_leaves_time_for(files: dict[str, str], cores: int, tmp_path: Path) -> None:
    with patch.object(os, "sched_getaffinity", lambda _process: set(range(OWN)), create=True):
        assert usable_cores(write(tmp_path, files)) == cores


def test_torch_computes_on_as_many_threads_as_are_asked_for_or_as_there_are_cores_for() -> None:
    before = torch.get_num_threads()
    try:
        use_threads(3)
        assert torch.get_num_threads() == 3
        with patch("llmnode.machine.threads.usable_cores", lambda: 2):
            use_threads()
            assert torch.get_num_threads() == 2, "there are fewer cores than torch would use"
        with patch("llmnode.machine.threads.usable_cores", lambda: 64):
            use_threads()
            assert torch.get_num_threads() == 2, "torch would use no more, as on cores of two threads each"
    finally:
        torch.set_num_threads(before)
