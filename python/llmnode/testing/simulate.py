"""Runs a trio program on a mock clock, so that a seed decides all that happens: the same one again, the same run.

Simulated time costs nothing: whenever every task waits, the clock jumps to the next deadline. The seed decides the
program's draws, and the order in which tasks run that could run at the same time. Threads and sockets have no part in a
simulation.
"""

from __future__ import annotations

import functools
import os
import random
import shlex
import sys
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TypeVar

import trio
import trio._core._run

from llmnode.errors import single_error
from llmnode.testing.clock import SimulatedClock

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator

Answer = TypeVar("Answer")

_SEEDS = "LLMNODE_SEEDS"
_TIMES = "LLMNODE_SEEDS_TIMES"
_FIRST_SEED = "LLMNODE_FIRST_SEED"
_EPOCH_MS = 1_700_000_000_000

_facts: ContextVar[list[str] | None] = ContextVar("facts", default=None)


def simulate(main: Callable[[], Awaitable[Answer]], *, seed: int = 0) -> Answer:
    """`main` in a trio of its own. Raises what it raises, with notes that say how to have the same run again.

    The error is the one that matters, not trio's group; AssertionError if tasks are left when `main` has returned.
    `random`'s own functions are seeded too.
    """
    facts = [f"simulated with seed {seed}{_how_to_rerun(seed)}"]
    token = _facts.set(facts)
    try:
        with _decided_by(seed), single_error():
            return trio.run(_leaving_no_task, main, clock=SimulatedClock())
    except BaseException as error:
        for fact in facts:
            error.add_note(fact)
        raise
    finally:
        _facts.reset(token)


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """An async test as a function that `simulate`s it, with the seed that its argument `seed` names."""

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:  # Any: a test's fixtures
        simulate(functools.partial(test, **fixtures), seed=fixtures.get("seed", 0))

    return run


def seeds(number: int, *, long_run: int | None = None) -> range:
    """The seeds to try: `number` from 0, or those that the environment names (LLMNODE_SEEDS, _FIRST_SEED).

    LLMNODE_SEEDS_TIMES=2 tries double that number, or double `long_run`, for a test whose first seeds take every branch
    and whose further ones change the order of events alone.
    """
    first = int(os.environ.get(_FIRST_SEED, "0"))
    times = os.environ.get(_TIMES)
    drawn = number if times is None else int(times) * (long_run or number)
    return range(first, first + int(os.environ.get(_SEEDS, str(drawn))))


def say_if_it_fails(fact: str) -> None:
    """Add it to the notes of the error with which this simulation ends, if it does."""
    if (facts := _facts.get()) is not None:
        facts.append(fact)


def simulated_ms() -> int:
    """The time by the clocks of simulated nodes, in milliseconds since 1970."""
    return int(_EPOCH_MS + trio.current_time() * 1000)


async def inline(function: Callable[..., Answer], *arguments: object) -> Answer:
    """In place of a thread, which would know nothing of the mock clock."""
    await trio.lowlevel.checkpoint()
    return function(*arguments)


@contextmanager
def _decided_by(seed: int) -> Iterator[None]:
    """Trio offers no setting for it; what is used here is what Hypothesis uses."""
    run = trio._core._run
    state, allowed, rng = random.getstate(), run._ALLOW_DETERMINISTIC_SCHEDULING, run._r
    random.seed(seed)
    run._ALLOW_DETERMINISTIC_SCHEDULING, run._r = True, random.Random(seed)  # type: ignore[misc]
    try:
        yield
    finally:
        run._ALLOW_DETERMINISTIC_SCHEDULING, run._r = allowed, rng  # type: ignore[misc]
        random.setstate(state)


async def _leaving_no_task(main: Callable[[], Awaitable[Answer]]) -> Answer:
    before = set(_tasks())
    answer = await main()
    left = [task.name for task in _tasks() if task not in before]
    assert not left, f"these tasks have outlived their nursery: {left}"
    return answer


def _tasks() -> Iterator[trio.lowlevel.Task]:
    root = trio.lowlevel.current_root_task()
    waiting = [root] if root is not None else []
    while waiting:
        task = waiting.pop()
        yield task
        waiting.extend(child for nursery in task.child_nurseries for child in nursery.child_tasks)


def _how_to_rerun(seed: int) -> str:
    test, _, _ = os.environ.get("PYTEST_CURRENT_TEST", "").rpartition(" ")
    if not test:
        return ""
    command = f"{_FIRST_SEED}={seed} {_SEEDS}=1 {sys.executable} -m pytest {shlex.quote(test)}"
    return f"; this runs it again:\n  {command}"
