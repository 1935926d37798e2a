"""Runs torch off the event loop, one call at a time, or a batch."""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.work import do, failed
from llmnode.errors import WorkerLost

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
    """The `WorkerSource` port: loads blocks in a thread of this process, which is lost only with it."""

    def __init__(self, loader: Loader) -> None:
        self.tensor_bytes = 0
        self._loader = loader
        self._worker: ThreadWorker | None = None

    async def open_model(self) -> ModelInfo:
        model = await trio.to_thread.run_sync(self._loader.open_model, abandon_on_cancel=True)
        # The compute thread must not keep the event loop from its heartbeats for longer than this.
        sys.setswitchinterval(0.0005)
        return model

    async def fitting_blocks(self) -> int:
        return await trio.to_thread.run_sync(self._loader.fitting_blocks)

    async def load(self, span: Span) -> ThreadWorker:
        assert self._worker is None, "the worker before is dropped first"
        loaded = await trio.to_thread.run_sync(self._loader.load, span, abandon_on_cancel=True)
        self.tensor_bytes = loaded.tensor_bytes
        self._worker = ThreadWorker(loaded.executor)
        return self._worker

    def serves(self) -> None:
        """Nobody needs to know."""

    async def wait_lost(self) -> None:
        await trio.sleep_forever()

    async def drop(self) -> None:
        """A forward that runs is waited for."""
        if self._worker is not None:
            worker, self._worker = self._worker, None
            await worker.drop()
            await trio.to_thread.run_sync(_give_back)

    def kill(self) -> None:
        """A forward that runs has to be waited for."""

    async def end(self) -> None:
        """The thread is trio's."""


class ThreadWorker(BatchingWorker):
    """The `Worker` port: an executor in a thread of this process, one hop to it and back for each batch."""

    def __init__(self, executor: Executor, policy: BatchPolicy | None = None) -> None:
        self._thread = _ExecutorThread(executor)
        super().__init__(self._thread, self._thread.run, time.perf_counter, policy)

    async def drop(self) -> None:
        """All calls raise WorkerLost from then on, and the executor is held by nobody."""
        await self._thread.drop()


class _ExecutorThread:
    """The thread of an executor. It is the `Held` port of the executor until that is dropped."""

    def __init__(self, executor: Executor) -> None:
        self.span = executor.span
        self._executor: Executor | None = executor
        self._thread = ComputeThread()

    def kv_tokens_free(self) -> int:
        return 0 if self._executor is None else self._executor.kv_tokens_free()

    async def run(self, work: Work) -> tuple[Done, float, float]:
        return await self._thread.run(partial(self._run, work))

    def _run(self, work: Work) -> tuple[Done, float, float]:
        began_s = time.perf_counter()
        if self._executor is None:
            return failed(work, WorkerLost("this server serves other blocks now")), began_s, began_s
        done = do(self._executor, work)
        return done, began_s, time.perf_counter()

    async def drop(self) -> None:
        """Drop the executor between two batches."""

        def drop() -> None:
            self._executor = None

        await self._thread.run(drop)


def _give_back() -> None:
    """Give the executor's memory back to the system, and to the GPU."""
    gc.collect()
    if (torch := sys.modules.get("torch")) is not None:
        from llmnode.machine.malloc import give_back

        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        give_back()
