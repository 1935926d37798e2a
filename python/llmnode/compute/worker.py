"""Runs torch off the event loop, one call at a time, or a batch."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.work import do

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.compute.work import Done, Work
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.span import Span
    from llmnode.ports import Executor, Loader

T = TypeVar("T")


class ComputeThread:
    """Lends a thread to one blocking call at a time. Later calls wait, in order."""

    def __init__(self) -> None:
        self._limiter = trio.CapacityLimiter(1)

    async def run(self, call: Callable[[], T]) -> T:
        # A forward cannot be interrupted; the caller waits for it even when cancelled, so no two ever overlap.
        return await trio.to_thread.run_sync(call, limiter=self._limiter)


class ThreadLoader:
    """Loads blocks in a thread of this process. They can be lost only with it, unlike those of a `ProcessLoader`."""

    def __init__(self, loader: Loader) -> None:
        self.tensor_bytes = 0
        self._loader = loader

    async def open_model(self) -> ModelInfo:
        model = await trio.to_thread.run_sync(self._loader.open_model, abandon_on_cancel=True)
        # The compute thread must not keep the event loop from its heartbeats for longer than this.
        sys.setswitchinterval(0.0005)
        return model

    async def fitting_blocks(self) -> int:
        return await trio.to_thread.run_sync(self._loader.fitting_blocks)

    async def load(self, span: Span) -> ThreadWorker:
        loaded = await trio.to_thread.run_sync(self._loader.load, span, abandon_on_cancel=True)
        self.tensor_bytes = loaded.tensor_bytes
        return ThreadWorker(loaded.executor)

    def serves(self) -> None:
        """Nobody needs to know."""

    async def wait_lost(self) -> None:
        await trio.sleep_forever()

    def kill(self) -> None:
        """A forward that runs has to be waited for."""

    async def end(self) -> None:
        """The thread is trio's."""


class ThreadWorker(BatchingWorker):
    """The `Worker` port: an executor in a thread of this process, one hop to it and back for each batch."""

    def __init__(self, executor: Executor, policy: BatchPolicy | None = None) -> None:
        self._executor = executor
        self._thread = ComputeThread()
        super().__init__(executor, self._run_in_thread, time.perf_counter, policy)

    async def _run_in_thread(self, work: Work) -> tuple[Done, float, float]:
        def timed() -> tuple[Done, float, float]:
            began_s = time.perf_counter()
            done = do(self._executor, work)
            return done, began_s, time.perf_counter()

        return await self._thread.run(timed)
