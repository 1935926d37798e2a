"""Runs torch off the event loop, one call at a time."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.ports import Computed

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.ids import SessionId
    from llmnode.core.span import Span
    from llmnode.ports import Executor, Piece

T = TypeVar("T")


class ComputeThread:
    """Lends a thread to one blocking call at a time; who comes later waits, in order."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, call: Callable[[], T]) -> T:
        # A forward cannot be interrupted; the caller waits for it even when cancelled, so no two ever overlap.
        return await trio.to_thread.run_sync(call, limiter=self._limiter)


class ThreadWorker:
    """The `Worker` port: an executor in a thread of this process."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self._thread = ComputeThread()

    @property
    def span(self) -> Span:
        return self._executor.span

    @property
    def kv_tokens_free(self) -> int:
        return self._executor.kv_tokens_free()

    async def open(self, session: SessionId, span: Span, max_length: int) -> bool:
        return await self._thread.run(lambda: self._executor.open(session, span, max_length))

    async def forward(self, piece: Piece) -> Computed:
        asked = time.perf_counter_ns()

        def compute() -> Computed:
            started = time.perf_counter_ns()
            (hidden,) = self._executor.forward([piece])
            done = time.perf_counter_ns()
            return Computed(hidden, queue_us=(started - asked) // 1000, compute_us=(done - started) // 1000)

        return await self._thread.run(compute)

    async def truncate(self, session: SessionId, length: int) -> None:
        await self._thread.run(lambda: self._executor.truncate(session, length))

    async def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        await self._thread.run(lambda: self._executor.fork(session, source, shared, length))

    async def close(self, session: SessionId) -> None:
        await self._thread.run(lambda: self._executor.close(session))
