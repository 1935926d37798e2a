"""Passes beside all else: a forward does not wait for a pass that runs, and neither has to do with the other's end."""

from __future__ import annotations

import os
import sys
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import psutil
import pytest
import trio
import trio.testing

from llmnode.compute.child import NICER
from llmnode.compute.loading import Wanted
from llmnode.compute.thread_worker import ThreadLoader
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Backward, Evaluate, Forward, Open
from llmnode.errors import WorkerLost
from llmnode.testing import exact_output
from llmnode.testing.exact_blocks import exact_gradient
from unit.exact_child import DIE, EXACT_ROW, EXIT, FAIL, HANG, MEET, PART, TroubledExecutor, TroubledLoader
from unit.started_worker import DEADLINE_S, SPAN, open_loader, open_worker
from unit.twins import on_twins

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from llmnode.ports import Worker, WorkerSource

SESSION = SessionId(bytes(16))
POSITIONS = 10


@asynccontextmanager
async def sources(twin: str) -> AsyncIterator[WorkerSource]:
    with trio.fail_after(DEADLINE_S):
        if twin == "process":
            async with open_loader() as loader:
                await loader.open_model()
                yield loader
        else:
            loader = ThreadLoader(TroubledLoader(Wanted(None, kv_tokens=100), lambda _line: None))
            await loader.open_model()
            yield loader


def numbers(value: int) -> bytes:
    return bytes([value]) * (3 * EXACT_ROW)


def evaluate(value: int) -> Evaluate:
    return Evaluate(SPAN, (3,), numbers(value))


def backward(value: int) -> Backward:
    return Backward(SPAN, (3,), numbers(value), numbers(7))


def forward(value: int) -> Forward:
    """The first one of the session."""
    return Forward(SESSION, 0, 3, numbers(value))


PARTING = Forward(SESSION, 3, 1, bytes([PART] * EXACT_ROW))
"""The second one, after which a pass may end."""


def expected(operation: Evaluate | Backward | Forward) -> bytes:
    if isinstance(operation, Backward):
        return exact_gradient(bytes(operation.gradient), SPAN)
    return exact_output(bytes(operation.hidden), SPAN)


async def opened(worker: Worker) -> None:
    assert await worker.do(Open(SESSION, SPAN, POSITIONS, PeerId("client")))


async def together(*calls: Callable[[], Awaitable[object]]) -> None:
    """Each begins when those before it wait."""
    async with trio.open_nursery() as nursery:
        for call in calls:
            nursery.start_soon(call)
            await trio.testing.wait_all_tasks_blocked()


class Asked:
    """Asks a worker, and keeps how each operation ended, in order."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self.ended: list[tuple[type, bytes | str]] = []

    async def __call__(self, operation: Evaluate | Backward | Forward) -> None:
        try:
            found: bytes | str = bytes((await self._worker.do(operation)).hidden)
        except (RuntimeError, WorkerLost) as error:
            found = str(error)
        self.ended.append((type(operation), found))


@on_twins("process", "thread")
async def test_a_forward_that_comes_while_a_pass_runs_is_answered_before_it_ends(twin: str) -> None:
    for of_pass in (evaluate(MEET), backward(MEET)):
        async with sources(twin) as source:
            asked = Asked(worker := await source.load(SPAN))
            await opened(worker)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(asked, of_pass)
                await trio.testing.wait_all_tasks_blocked()
                await asked(forward(MEET))
                assert asked.ended == [(Forward, expected(forward(MEET)))], "the pass has begun, and has not ended"
                await worker.do(PARTING)
            assert asked.ended[1:] == [(type(of_pass), expected(of_pass))]
            assert worker.kv_tokens_free == worker.kv_tokens - POSITIONS


@on_twins("process", "thread")
async def test_of_both_only_the_one_that_fails_fails(twin: str) -> None:
    async with sources(twin) as source:
        asked = Asked(worker := await source.load(SPAN))
        await opened(worker)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, evaluate(MEET))
            await trio.testing.wait_all_tasks_blocked()
            await asked(forward(FAIL))
            await asked(forward(MEET))
            await worker.do(PARTING)
        right = [(type(each), expected(each)) for each in (forward(MEET), evaluate(MEET))]
        assert asked.ended == [(Forward, "out of memory, as told"), *right]
    async with sources(twin) as source:
        asked = Asked(worker := await source.load(SPAN))
        await opened(worker)
        await together(*(partial(asked, each) for each in (forward(MEET), backward(FAIL))))
        assert set(asked.ended) == {right[0], (Backward, "out of memory, as told")}


@on_twins("process", "thread")
async def test_a_worker_is_dropped_once_its_pass_is_over_and_another_goes_on_meanwhile(twin: str) -> None:
    async with sources(twin) as source:
        first = Asked(dropped := await source.load(SPAN))
        second = Asked(left := await source.load_beside(SPAN))
        await opened(left)
        ended = []

        async def drop() -> None:
            await source.drop_one(dropped)
            ended.append([*first.ended])

        async with trio.open_nursery() as nursery:
            nursery.start_soon(first, evaluate(MEET))
            await second(forward(MEET))  # answered once the pass has begun: before, a drop would take its turn
            for call in (drop, partial(first, evaluate(1))):
                nursery.start_soon(call)
                await trio.testing.wait_all_tasks_blocked()
            assert not ended
            await left.do(PARTING)
        right = (Evaluate, expected(evaluate(MEET)))
        assert set(first.ended) == {right, (Evaluate, "this server serves other blocks now")}
        assert [right in each for each in ended] == [True]
        assert second.ended == [(Forward, expected(forward(MEET)))]
        await second(backward(1))
        assert second.ended[1:] == [(Backward, expected(backward(1)))]


@pytest.mark.parametrize(("who", "why"), [(DIE, r"killed (SIGKILL)"), (EXIT, "ended with exit status 1")])
def test_a_process_that_ends_in_a_pass_loses_the_forward_that_runs_too(who: int, why: str) -> None:
    async def main() -> None:
        async with open_worker() as (loader, worker):
            await opened(worker)
            asked = Asked(worker)
            await together(partial(asked, forward(HANG)), partial(asked, evaluate(who)), loader.wait_lost)
            assert {kind for kind, _ in asked.ended} == {Forward, Evaluate}
            assert all(isinstance(error, str) and why in error for _, error in asked.ended)

    trio.run(main)


def test_a_process_that_does_not_answer_a_pass_has_crashed_though_it_answers_forwards() -> None:
    async def main() -> None:
        async with open_worker(answer_s=1.0) as (loader, worker):
            await opened(worker)
            asked = Asked(worker)
            await together(partial(asked, backward(HANG)), partial(asked, forward(1)))
            (answered, (kind, error)) = asked.ended
            assert answered == (Forward, expected(forward(1)))
            assert kind is Backward and "not answered in 1 s" in str(error)
            await loader.wait_lost()
            again = Asked(await loader.load(SPAN))
            await again(backward(1))
            assert again.ended == [(Backward, expected(backward(1)))]

    trio.run(main)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads of a process have one priority")
def test_passes_alone_have_a_lower_priority_than_the_process() -> None:
    async def main() -> None:
        async with open_worker() as (loader, worker):
            await Asked(worker)(evaluate(1))
            threads = [each.id for each in psutil.Process(loader.pid).threads()]
            nice = sorted(os.getpriority(os.PRIO_PROCESS, each) for each in threads)
            own = os.getpriority(os.PRIO_PROCESS, loader.pid)
            assert nice == [own] * (len(threads) - 1) + [min(19, own + NICER)]

    trio.run(main)


def test_an_executor_that_cannot_compute_both_does_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TroubledExecutor, "passes_beside", False)

    async def main() -> None:
        made = TroubledLoader(Wanted(None, kv_tokens=100), lambda _line: None)
        asked = Asked(worker := await ThreadLoader(made).load(SPAN))
        await opened(worker)

        async def let_end() -> None:
            made.meeting.may_end.set()

        with trio.fail_after(DEADLINE_S):
            await together(partial(asked, evaluate(MEET)), partial(asked, forward(1)), let_end)
        assert asked.ended == [(type(each), expected(each)) for each in (evaluate(MEET), forward(1))]

    trio.run(main)
