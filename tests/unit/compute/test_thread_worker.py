"""A worker in a thread: a batch is one hop there and back, and a session alone pays for no company."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.thread_worker import ComputeThread, ThreadLoader, ThreadWorker
from llmnode.compute.work import do
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Backward, Close, Evaluate, Forward, Open
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.span import Span
from llmnode.errors import WorkerLost
from llmnode.ports import Loaded
from llmnode.testing import ExactExecutor, exact_output
from llmnode.testing.exact_blocks import EXACT_MODEL, exact_gradient

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from _pytest.monkeypatch import MonkeyPatch

    from llmnode.compute.work import Done, Work
    from llmnode.core.model import ModelInfo, Precision
    from llmnode.ports import Executor

SPAN = Span(0, 2)
ROW = 2
DEADLINE_S = 20.0


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def piece(session: int, start: int) -> Forward:
    return Forward(name(session), start, 1, bytes(ROW))


class HeldExecutor(ExactExecutor):
    """Its forwards begin, and end when they are let."""

    def __init__(self) -> None:
        super().__init__(SPAN, ROW, kv_tokens=1000)
        self.may_end = threading.Event()

    def forward(self, pieces):  # type: ignore[no-untyped-def]  # as its own
        outputs = super().forward(pieces)
        assert self.may_end.wait(DEADLINE_S)
        return outputs


class Steps(trio.abc.Instrument):
    """How often a task is given its turn."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name.endswith("counted")


async def steps_of(call: Callable[[], Awaitable[object]]) -> int:
    async def counted() -> None:
        await call()

    trio.lowlevel.add_instrument(steps := Steps())
    async with trio.open_nursery() as nursery:
        nursery.start_soon(counted)
    trio.lowlevel.remove_instrument(steps)
    return steps.count


def test_who_is_alone_has_as_many_turns_and_thread_hops_as_a_plain_call(monkeypatch: MonkeyPatch) -> None:
    hops: list[object] = []
    to_thread = trio.to_thread.run_sync

    async def counting(call, **options):  # type: ignore[no-untyped-def]  # as trio's
        hops.append(call)
        return await to_thread(call, **options)

    monkeypatch.setattr(trio.to_thread, "run_sync", counting)

    async def main() -> None:
        worker, plain = ThreadWorker(ExactExecutor(SPAN, ROW, kv_tokens=1000)), ComputeThread()
        assert await worker.do(Open(name(0), SPAN, 100, PeerId("client")))
        hops.clear()
        for start in range(20):
            turns = await steps_of(partial(worker.do, piece(0, start)))
            assert turns == await steps_of(partial(plain.run, lambda: None))
        assert len(hops) == 2 * 20

    trio.run(main)


def test_all_that_waits_goes_to_the_thread_together() -> None:
    async def main() -> None:
        worker = ThreadWorker(executor := HeldExecutor())
        answers: dict[int, bytes] = {}

        async def ask(session: int) -> None:
            answers[session] = bytes((await worker.do(piece(session, 0))).hidden)

        with trio.fail_after(DEADLINE_S):
            for session in range(5):
                assert await worker.do(Open(name(session), SPAN, 10, PeerId(f"client {session}")))
            async with trio.open_nursery() as nursery:
                for session in range(5):
                    nursery.start_soon(ask, session)
                await trio.testing.wait_all_tasks_blocked()
                executor.may_end.set()
        assert sorted(len(batch) for batch in executor.batches) == [1, 4]
        assert set(answers.values()) == {exact_output(bytes(ROW), SPAN)}

    trio.run(main)


def test_the_executor_begins_with_what_waits_before_anybody_hears_of_what_was_done() -> None:
    events: list[str] = []
    executor = ExactExecutor(SPAN, ROW, kv_tokens=1000)

    def run(work: Work) -> Awaitable[tuple[Done, float, float]]:
        events.extend(["begins"] * len(work.slices))
        return finish(work)

    async def finish(work: Work) -> tuple[Done, float, float]:
        with trio.CancelScope(shield=True):
            await trio.testing.wait_all_tasks_blocked()
        return do(executor, work), 0.0, 0.0

    async def main() -> None:
        worker = BatchingWorker(executor, run, trio.current_time)
        for session in range(2):
            assert await worker.do(Open(name(session), SPAN, 100, PeerId("client")))

        async def ask(session: int) -> None:
            await worker.do(piece(session, 0))
            events.append("answered")

        async with trio.open_nursery() as nursery:
            for session in range(2):
                nursery.start_soon(ask, session)

    trio.run(main)
    assert events == ["begins", "begins", "answered", "answered"]


class ExactLoader:
    """The `Loader` port. `made` has what it made, as long as anybody holds it."""

    def __init__(self) -> None:
        self.made: list[weakref.ref[ExactExecutor]] = []

    def open_model(self) -> ModelInfo:
        return EXACT_MODEL

    def fitting_blocks(self) -> int:
        return EXACT_MODEL.blocks

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return [Candidate(each, self.fitting_blocks(), 1.0) for each in precisions]

    def load(self, span: Span) -> Loaded:
        executor = ExactExecutor(span, ROW, kv_tokens=1000)
        self.made.append(weakref.ref(executor))
        return Loaded(executor, tensor_bytes=12)

    def load_beside(self, span: Span, _held: Executor, _kv_tokens: int) -> Loaded:
        return replace(self.load(span), tensor_bytes=24)


def test_of_a_worker_that_is_dropped_nothing_is_left_though_sessions_hold_it_and_another_serves_other_blocks() -> None:
    async def main() -> None:
        loader = ExactLoader()
        source = ThreadLoader(loader)
        worker = await source.load(SPAN)
        for number in range(2):
            await worker.do(Open(name(number), SPAN, 10, PeerId("client")))
        await worker.do(piece(0, 0))
        await source.drop()
        assert loader.made[0]() is None, "and its memory is given back"
        assert worker.kv_tokens_free == 0
        with pytest.raises(WorkerLost, match="serves other blocks now"):
            await worker.do(piece(0, 1))
        await worker.do(Close(name(0)))
        other = await source.load(Span(2, 4))
        assert (other.span, other.kv_tokens) == (Span(2, 4), 1000)
        assert await other.do(Open(name(0), Span(2, 4), 10, PeerId("client")))
        assert (await other.do(piece(0, 0))).hidden == exact_output(bytes(ROW), Span(2, 4))
        with pytest.raises(WorkerLost):
            await worker.do(piece(1, 0))

    trio.run(main)


def test_of_two_workers_one_is_dropped_with_its_memory_and_the_other_goes_on() -> None:
    async def main() -> None:
        loader = ExactLoader()
        source = ThreadLoader(loader)
        first = await source.load(SPAN)
        unwanted = await source.load_beside(SPAN)
        assert unwanted is not None
        assert source.tensor_bytes == 24
        await source.drop_one(unwanted)
        assert source.tensor_bytes == 12, "the first one serves on"
        second = await source.load_beside(Span(2, 4))
        assert second is not None
        assert await second.do(Open(name(0), Span(2, 4), 10, PeerId("client")))
        await source.drop_one(first)
        assert [made() is None for made in loader.made] == [True, True, False]
        assert (await second.do(piece(0, 0))).hidden == exact_output(bytes(ROW), Span(2, 4))
        await source.drop()
        assert loader.made[2]() is None

    trio.run(main)


def test_a_worker_is_dropped_once_the_forward_that_runs_is_over() -> None:
    async def main() -> None:
        executor = HeldExecutor()
        worker = ThreadWorker(executor)
        await worker.do(Open(name(0), SPAN, 10, PeerId("client")))
        computed = []

        async def ask() -> None:
            computed.append(await worker.do(piece(0, 0)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            nursery.start_soon(worker.drop)
            await trio.testing.wait_all_tasks_blocked()
            executor.may_end.set()
        assert computed[0].hidden == exact_output(bytes(ROW), SPAN)

    trio.run(main)


def test_passes_need_no_session_and_only_one_that_fails_fails() -> None:
    async def main() -> None:
        worker = ThreadWorker(executor := ExactExecutor(SPAN, ROW, kv_tokens=0))
        hidden, gradient = bytes(range(6)), bytes(range(100, 106))
        outputs = exact_output(hidden[:4], SPAN) + exact_output(hidden[4:], SPAN)
        computed = await worker.do(Evaluate(SPAN, (2, 1), hidden))
        assert bytes(computed.hidden) == outputs
        assert computed.compute_us >= 0
        expected = exact_gradient(gradient[:4], SPAN) + exact_gradient(gradient[4:], SPAN)
        assert bytes((await worker.do(Backward(SPAN, (2, 1), hidden, gradient))).hidden) == expected
        executor.fails = 1
        failed: list[bool] = []

        async def ask() -> None:
            try:
                assert bytes((await worker.do(Evaluate(SPAN, (2, 1), hidden))).hidden) == outputs
                failed.append(False)
            except RuntimeError:
                failed.append(True)

        with trio.fail_after(DEADLINE_S):
            async with trio.open_nursery() as nursery:
                for _ in range(5):
                    nursery.start_soon(ask)
        assert sorted(failed) == [False] * 4 + [True]
        counters = worker._pass_track.scheduler._counters
        for each in (counters._groups, *counters._within.values()):
            assert not each._queued and set(each._gone) == set(each.given), "it may be forgotten"

    trio.run(main)


@given(st.binary(min_size=4, max_size=40), st.integers(1, 3))
def test_an_exact_gradient_is_the_same_through_any_cut(gradient: bytes, cut: int) -> None:
    back = exact_gradient(exact_gradient(gradient, Span(cut, 4)), Span(0, cut))
    assert back == exact_gradient(gradient, Span(0, 4))
