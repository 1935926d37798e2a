"""How much memory is left under the limits of control groups, from files as Linux has them."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import psutil
import pytest

from llmnode.machine.memory import free_bytes
from llmnode.machine.resident import resident_bytes

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Write = Callable[[dict[str, str]], None]

V1 = "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"
NO_LIMIT_V1 = "9223372036854771712"
KIB = 1 << 10  # so that what this machine has free is always more


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def write(files: dict[str, str]) -> None:
        for name, text in files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(f"{text}\n")

    return write


def _v2(folder: str, limit: object, used: int, inactive: int = 0, active: int = 0, mapped: int = 0) -> dict[str, str]:
    statistics = f"anon 5\nfile_mapped {mapped}\ninactive_file {inactive}\nactive_file {active}"
    return {
        f"{folder}/memory.max": str(limit),
        f"{folder}/memory.current": str(used),
        f"{folder}/memory.stat": statistics,
    }


def _v1(folder: str, limit: object, used: int, inactive: int = 0, active: int = 0, mapped: int = 0) -> dict[str, str]:
    statistics = f"inactive_file 1\nactive_file 1\ntotal_mapped_file {mapped}\ntotal_inactive_file {inactive}"
    statistics += f"\ntotal_active_file {active}"
    return {
        f"{folder}/memory.limit_in_bytes": str(limit),
        f"{folder}/memory.usage_in_bytes": str(used),
        f"{folder}/memory.stat": statistics,
    }


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({"proc/self/cgroup": "0::/"} | _v2(V2, 100 * KIB, 70 * KIB, 20 * KIB), 50 * KIB),
        (
            {"proc/self/cgroup": "0::/user/app"}
            | _v2(f"{V2}/user", 100 * KIB, 60 * KIB)
            | _v2(f"{V2}/user/app", "max", 10 * KIB),
            40 * KIB,
        ),
        ({"proc/self/cgroup": "0::/"} | _v2(V2, 100 * KIB, 101 * KIB), 0),
        (
            {"proc/self/cgroup": "5:cpu,cpuacct:/a\n4:memory:/a\n0::/a"}
            | _v1(V1, NO_LIMIT_V1, 900 * KIB)
            | _v1(f"{V1}/a", 100 * KIB, 70 * KIB, 20 * KIB),
            50 * KIB,
        ),
        ({"proc/self/cgroup": "4:memory:/docker/0f3"} | _v1(V1, 100 * KIB, 70 * KIB), 30 * KIB),
        ({"proc/self/cgroup": "0::/"} | _v2(V2, 100 * KIB, 90 * KIB, 20 * KIB, 40 * KIB, mapped=15 * KIB), 55 * KIB),
        ({"proc/self/cgroup": "0::/"} | _v2(V2, 100 * KIB, 90 * KIB, 20 * KIB, 10 * KIB, mapped=15 * KIB), 30 * KIB),
        ({"proc/self/cgroup": "4:memory:/"} | _v1(V1, 100 * KIB, 90 * KIB, 20 * KIB, 40 * KIB, 15 * KIB), 55 * KIB),
    ],
    ids=[
        "v2",
        "v2, the group above",
        "v2, over its limit",
        "v1",
        "v1, a path that is outside",
        "v2, files that were read twice",
        "v2, libraries in use",
        "v1, files that were read twice",
    ],
)
def test_what_is_free_is_what_a_limit_leaves(files: dict[str, str], left: int, write: Write, tmp_path: Path) -> None:
    write(files)
    assert free_bytes(root=tmp_path) == left


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/"},
        {"proc/self/cgroup": "0::/app"} | _v2(f"{V2}/app", "max", KIB),
        {"proc/self/cgroup": "4:memory:/\n0::/"} | _v1(V1, NO_LIMIT_V1, KIB),
    ],
    ids=["another system", "no container", "v2", "v1"],
)
def test_without_a_limit_it_is_what_the_machine_has(files: dict[str, str], write: Write, tmp_path: Path) -> None:
    write(files)
    assert free_bytes(root=tmp_path) > psutil.virtual_memory().available // 2  # it changes while we look


def test_the_memory_of_a_program_is_that_of_its_processes() -> None:
    mib = 1 << 20
    program = [sys.executable, "-c", f"held = b'x' * (64 * {mib}); print(flush=True); input()"]
    before = resident_bytes()
    assert before >= 0.9 * psutil.Process().memory_info().rss
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        child.stdout.readline()
        assert resident_bytes() - before > 60 * mib
        child.communicate("\n")
    assert resident_bytes() - before < 60 * mib
