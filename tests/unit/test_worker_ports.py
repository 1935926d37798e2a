"""All twins of a worker and its source keep the same promises: in a process, in a thread, and that of simulations."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
import trio

from llmnode.compute.loading import Wanted
from llmnode.compute.process_loader import ProcessLoader
from llmnode.compute.thread_worker import ThreadLoader
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.model import EXACT, PRECISIONS
from llmnode.core.operations import Close, Fork, Forward, Open, Truncate
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.span import Span
from llmnode.errors import WorkerLost
from llmnode.testing import EXACT_MODEL, exact_output
from llmnode.testing.worker import ExactSource
from unit.exact_child import EXACT_ROW, TroubledLoader
from unit.started_worker import open_loader
from unit.twins import on_twins

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.ports import Worker, WorkerSource

SPAN = Span(1, 4)
SESSIONS = [SessionId(bytes([number] * 16)) for number in range(1, 4)]
ROW = EXACT_ROW


@asynccontextmanager
async def sources(twin: str) -> AsyncIterator[WorkerSource]:
    match twin:
        case "process":
            async with open_loader() as loader:
                yield loader
        case "thread":
            yield ThreadLoader(TroubledLoader(Wanted(None, kv_tokens=100), lambda _line: None))
        case _:
            yield ExactSource(EXACT_MODEL, kv_tokens=100, forward_s=0.01)


def row_bytes(worker: Worker) -> int:
    return EXACT_MODEL.row_bytes if hasattr(worker, "executor") else ROW


def opening(session: SessionId, length: int = 50) -> Open:
    return Open(session, SPAN, length, PeerId("client"))


def forward(worker: Worker, session: SessionId, start: int, length: int) -> Forward:
    return Forward(session, start, length, bytes([7]) * row_bytes(worker) * length)


def expected(worker: Worker, start: int, length: int) -> bytes:
    row = row_bytes(worker)
    return exact_output(bytes([7]) * row * (start + length), SPAN)[start * row :]


@on_twins("process", "thread", "memory")
async def test_a_worker_computes_and_keeps_what_it_is_told(twin: str) -> None:
    async with sources(twin) as source:
        model = await source.open_model()
        assert model == EXACT_MODEL
        assert 1 <= (fitting := await source.fitting_blocks()) <= model.blocks
        names = [EXACT, PRECISIONS["bfloat16+nf4"]]
        assert await source.candidates(names) == [
            Candidate(each, fitting, 1.0, each.dtype == "bfloat16" and twin != "memory") for each in names
        ]
        worker = await source.load(SPAN)
        assert worker.span == SPAN
        free = worker.kv_tokens
        assert worker.kv_tokens_free == free
        one, other, third = SESSIONS
        assert await worker.do(opening(one))
        assert await worker.do(opening(other))
        assert worker.kv_tokens_free == free - 100
        assert not await worker.do(opening(third, free)), "it does not fit"
        for start, length in ((0, 3), (3, 1)):
            computed = await worker.do(forward(worker, one, start, length))
            assert bytes(computed.hidden) == expected(worker, start, length)
            assert min(computed.queue_us, computed.compute_us) >= 0
        await worker.do(Truncate(one, 2))
        await worker.do(Fork(other, one, 0, 2))
        for session in (one, other):
            computed = await worker.do(forward(worker, session, 2, 5))
            assert bytes(computed.hidden) == expected(worker, 2, 5)
        for session in (one, other, third):
            await worker.do(Close(session))
        assert worker.kv_tokens_free == free
        assert worker.busy_us >= 0
        await source.drop()


@on_twins("process", "thread", "memory")
async def test_sessions_do_not_mix_and_a_cancelled_call_is_done_whole_or_not_at_all(twin: str) -> None:
    async with sources(twin) as source:
        await source.open_model()
        worker = await source.load(SPAN)

        async def use(session: SessionId) -> None:
            assert await worker.do(opening(session, 20))
            for start in range(0, 20, 2):
                computed = None
                with trio.CancelScope() as scope:
                    scope.cancel()
                    computed = await worker.do(forward(worker, session, start, 2))
                if computed is None:
                    computed = await worker.do(forward(worker, session, start, 2))
                assert bytes(computed.hidden) == expected(worker, start, 2)

        async with trio.open_nursery() as nursery:
            for session in SESSIONS:
                nursery.start_soon(use, session)
        await source.drop()


@on_twins("process", "thread", "memory")
async def test_a_dropped_worker_is_lost_and_the_next_one_is_empty(twin: str) -> None:
    async with sources(twin) as source:
        await source.open_model()
        former = await source.load(SPAN)
        assert await former.do(opening(SESSIONS[0]))
        await source.drop()
        with pytest.raises(WorkerLost):
            await former.do(forward(former, SESSIONS[0], 0, 1))
        with pytest.raises(WorkerLost):
            await former.do(Truncate(SESSIONS[0], 0))
        await former.do(Close(SESSIONS[0]))
        worker = await source.load(Span(0, 2))
        assert worker is not former
        assert worker.span == Span(0, 2)
        assert worker.kv_tokens_free == worker.kv_tokens
        await source.drop()
        await source.end()


@on_twins("process", "thread", "memory")
async def test_a_second_worker_computes_beside_the_first_and_either_may_be_dropped(twin: str) -> None:
    async with sources(twin) as source:
        await source.open_model()
        if isinstance(source, ExactSource):
            source.holds_two = True
        first = await source.load(SPAN)
        assert await first.do(opening(SESSIONS[0]))
        for others_end in (False, True):
            second = await source.load_beside(SPAN)
            assert second is not None
            assert second.kv_tokens == first.kv_tokens
            assert await second.do(opening(SESSIONS[1]))

            async def use(worker: Worker, session: SessionId, start: int) -> None:
                for position in range(start, start + 4):
                    computed = await worker.do(forward(worker, session, position, 1))
                    assert bytes(computed.hidden) == expected(worker, position, 1)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(use, first, SESSIONS[0], 4 * others_end)
                nursery.start_soon(use, second, SESSIONS[1], 0)
            left, dropped = (second, first) if others_end else (first, second)
            await source.drop_one(dropped)
            with pytest.raises(WorkerLost):
                await dropped.do(forward(dropped, SESSIONS[0 if others_end else 1], 8, 1))
            assert dropped.kv_tokens_free == 0 or twin == "memory"
        assert left is second
        await use(second, SESSIONS[1], 4)
        await source.drop()
        with pytest.raises(WorkerLost):
            await second.do(forward(second, SESSIONS[1], 8, 1))


@on_twins("process", "memory")
async def test_two_workers_are_lost_together(twin: str) -> None:
    async with sources(twin) as source:
        await source.open_model()
        first = await source.load(SPAN)
        if isinstance(source, ExactSource):
            assert await source.load_beside(SPAN) is None
            source.holds_two = True
        second = await source.load_beside(SPAN)
        assert second is not None
        if isinstance(source, ExactSource):
            source.lose()
        else:
            assert isinstance(source, ProcessLoader)
            psutil.Process(source.pid).kill()
        await source.wait_lost()
        for worker in (first, second):
            with pytest.raises(WorkerLost):
                await worker.do(opening(SESSIONS[0]))
        await source.drop_one(first)
        assert (await source.load(SPAN)).kv_tokens == second.kv_tokens
        await source.drop()
