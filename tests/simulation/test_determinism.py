"""A seed decides everything: it is the same run in any process, and one that fails says how to make it fail again."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import trio

import llmnode
from llmnode.testing import seeds, simulate

TESTS = Path(__file__).parents[1]
SEEDS = (3, 7, 11)

TRACE = """
import sys
from functools import partial
from llmnode.testing import simulate
from simulation.chaos import outlive
for seed in map(int, sys.argv[1:]):
    simulate(partial(outlive, seed, print), seed=seed)
"""

BREAK = """
from llmnode.core.operations import Truncate
from llmnode.session.session import InferenceSession
from llmnode.testing import worker

whole = worker.ExactExecutor.apply

def apply(self, operation):
    # After a truncation it has other positions than the session thinks.
    result = whole(self, operation)
    if isinstance(operation, Truncate) and (kept := self._kept[operation.session]):
        self._kept[operation.session] = kept[:-1] + bytes([kept[-1] ^ 1])
    return result

worker.ExactExecutor.apply = apply
"""


def run(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """In a process of its own, with the sources that this one has."""
    sources = os.pathsep.join([str(Path(llmnode.__file__).parents[1]), str(TESTS)])
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=100,
        cwd=TESTS.parent,
        env={**os.environ, "PYTHONPATH": sources, **environment},
        check=False,
    )


def trace(hash_seed: str) -> str:
    done = run(sys.executable, "-c", TRACE, *map(str, SEEDS), PYTHONHASHSEED=hash_seed)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_seed_is_the_same_run_in_every_process() -> None:
    one, other = trace("1"), trace("2")
    assert one.count("\n") > 1000
    assert one.count("strikes:") > 10
    different = [pair for pair in zip(one.splitlines(), other.splitlines(), strict=False) if pair[0] != pair[1]]
    assert one == other, different[:3]


def test_a_seed_that_fails_says_what_befell_it_and_fails_again(tmp_path: Path) -> None:
    (tmp_path / "breaker.py").write_text(BREAK)
    sources = os.pathsep.join([str(Path(llmnode.__file__).parents[1]), str(TESTS), str(tmp_path)])
    name = "tests/simulation/test_chaos.py::test_a_session_outlives_whatever_befalls_its_servers"
    options = ["-p", "breaker", "-p", "no:cacheprovider", "--no-header", "--show-capture=no"]
    first = run(sys.executable, "-m", "pytest", *options, "-x", name, LLMNODE_SEEDS="50", PYTHONPATH=sources)
    assert first.returncode == 1, first.stdout[-3000:] + first.stderr
    assert "FaultPlan(" in first.stdout
    told = re.findall(r"LLMNODE_FIRST_SEED=(\d+) LLMNODE_SEEDS=1 (.*)", first.stdout)
    (command,) = set(told)  # under CI pytest's summary says it again
    seed, rest = command
    again = run(
        *shlex.split(rest), *options, LLMNODE_FIRST_SEED=seed, LLMNODE_SEEDS="1", PYTHONPATH=sources, PYTHONHASHSEED="9"
    )
    assert again.returncode == 1, again.stdout[-3000:] + again.stderr
    assert "1 failed" in again.stdout
    assert _failure(again.stdout) == _failure(first.stdout)


def _failure(report: str) -> str:
    """The message of the assertion, without what differs between objects."""
    return re.sub(r" at 0x\w+", "", "\n".join(re.findall(r"^E .*", report, re.MULTILINE)))


def test_the_one_error_that_matters_is_raised_with_the_seed() -> None:
    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise ValueError("as told")

    with pytest.raises(ValueError, match="as told") as raised:
        simulate(main, seed=5)
    (note,) = raised.value.__notes__
    assert "seed 5" in note
    assert "LLMNODE_FIRST_SEED=5 LLMNODE_SEEDS=1" in note
    assert "test_the_one_error_that_matters_is_raised_with_the_seed" in note


def test_a_task_that_outlives_its_nursery_is_noticed() -> None:
    async def main() -> None:
        trio.lowlevel.spawn_system_task(trio.sleep, 60, name="outliver")

    with pytest.raises(AssertionError, match=r"outlived.*outliver"):
        simulate(main)


def test_a_long_run_may_draw_more_than_as_many_times_the_seeds_of_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LLMNODE_SEEDS", "LLMNODE_SEEDS_TIMES", "LLMNODE_FIRST_SEED"):
        monkeypatch.delenv(name, raising=False)
    assert seeds(3) == seeds(3, long_run=5) == range(3)
    monkeypatch.setenv("LLMNODE_SEEDS_TIMES", "3")
    assert (seeds(3), seeds(3, long_run=5)) == (range(9), range(15))
    monkeypatch.setenv("LLMNODE_SEEDS", "4")
    monkeypatch.setenv("LLMNODE_FIRST_SEED", "7")
    assert seeds(3) == seeds(3, long_run=5) == range(7, 11)


def test_the_order_of_tasks_is_part_of_the_seed() -> None:
    async def main() -> list[int]:
        order: list[int] = []

        async def note(number: int) -> None:
            await trio.sleep(1)
            order.append(number)

        async with trio.open_nursery() as nursery:
            for number in range(10):
                nursery.start_soon(note, number)
        return order

    assert simulate(main, seed=1) == simulate(main, seed=1)
    assert simulate(main, seed=1) != simulate(main, seed=2)
