"""Runs torch off the event loop, one call at a time, or a batch; passes beside all else, where the executor can."""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.work import do, failed
from llmnode.errors import ModelError, WorkerLost
from llmnode.machine.startup import free_dropped

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.work import Done, Work
    from llmnode.core.model import ModelInfo, Precision
    from llmnode.core.placement.own_precision import Candidate
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.span import Span
    from llmnode.ports import Executor, Loaded, Loader, Worker

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
        self.tensor_bytes = self.position_bytes = 0
        self._loader = loader
        self._one_load = trio.CapacityLimiter(1)
        """Also while nobody waits for it any more."""
        self._threads = ComputeThread(), ComputeThread()
        """The second one is for passes."""
        self._workers: dict[ThreadWorker, Loaded] = {}

    async def open_model(self) -> ModelInfo:
        model = await trio.to_thread.run_sync(self._loader.open_model, abandon_on_cancel=True, limiter=self._one_load)
        # The compute thread must not keep the event loop from its heartbeats for longer than this.
        sys.setswitchinterval(0.0005)
        return model

    async def fitting_blocks(self) -> int:
        return await trio.to_thread.run_sync(self._loader.fitting_blocks)

    async def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return await trio.to_thread.run_sync(self._loader.candidates, precisions)

    async def load(self, span: Span) -> ThreadWorker:
        assert not self._workers, "the worker before is dropped first"
        loaded = await self._loaded(partial(self._loader.load, span))
        assert loaded is not None
        return self._has(loaded)

    async def load_beside(self, span: Span) -> ThreadWorker | None:
        ((worker, held),) = self._workers.items()
        try:
            loaded = await self._loaded(partial(self._loader.load_beside, span, held.executor, worker.kv_tokens))
        except MemoryError:
            return None
        except RuntimeError as error:  # torch's own: the blocks that are served are not to end for it
            raise ModelError(f"blocks {span} cannot be loaded: {error}") from error
        return None if loaded is None else self._has(loaded)

    async def _loaded(self, load: Callable[[], Loaded | None]) -> Loaded | None:
        return await trio.to_thread.run_sync(load, abandon_on_cancel=True, limiter=self._one_load)

    def _has(self, loaded: Loaded) -> ThreadWorker:
        self.tensor_bytes, self.position_bytes = loaded.tensor_bytes, loaded.position_bytes
        worker = ThreadWorker(loaded.executor, threads=self._threads)
        self._workers[worker] = loaded
        return worker

    def serves(self) -> None:
        """Nobody needs to know."""

    async def wait_lost(self) -> None:
        await trio.sleep_forever()

    async def drop_one(self, worker: Worker) -> None:
        """A forward that runs is waited for."""
        assert isinstance(worker, ThreadWorker)
        self._workers.pop(worker, None)
        for left in self._workers.values():
            self.tensor_bytes, self.position_bytes = left.tensor_bytes, left.position_bytes
        await worker.drop()
        await trio.to_thread.run_sync(free_dropped)

    async def drop(self) -> None:
        """Likewise."""
        for worker in [*self._workers]:
            await self.drop_one(worker)

    def kill(self) -> None:
        """A forward that runs has to be waited for."""

    async def end(self) -> None:
        """The thread is trio's."""


class ThreadWorker(BatchingWorker):
    """The `Worker` port: an executor in a thread of this process, one hop to it and back for each batch."""

    def __init__(
        self,
        executor: Executor,
        policy: BatchPolicy | None = None,
        *,
        threads: tuple[ComputeThread, ComputeThread] | None = None,
    ) -> None:
        """`threads` are those that workers share, which compute in turn: the second one is for passes."""
        self._thread = _ExecutorThread(executor, *(threads or (ComputeThread(), ComputeThread())))
        super().__init__(self._thread, self._thread.run, time.perf_counter, policy)

    async def drop(self) -> None:
        """All calls raise WorkerLost from then on, and the executor is held by nobody."""
        await self._thread.drop()


class _ExecutorThread:
    """The threads of an executor. They are the `Held` port of the executor until that is dropped."""

    def __init__(self, executor: Executor, thread: ComputeThread, of_passes: ComputeThread) -> None:
        self.span, self.kv_page, self.passes_beside = executor.span, executor.kv_page, executor.passes_beside
        self._executor: Executor | None = executor
        self._thread = thread
        self._of_passes = of_passes if executor.passes_beside else thread

    def kv_tokens_free(self) -> int:
        return 0 if self._executor is None else self._executor.kv_tokens_free()

    async def run(self, work: Work) -> tuple[Done, float, float]:
        with trio.CancelScope(shield=True):
            done = await (self._of_passes if work.passes else self._thread).run(partial(self._run, work))
        return done

    def _run(self, work: Work) -> tuple[Done, float, float]:
        began_s = time.perf_counter()
        if (executor := self._executor) is None:
            return failed(work, WorkerLost("this server serves other blocks now")), began_s, began_s
        done = do(executor, work)
        return done, began_s, time.perf_counter()

    async def drop(self) -> None:
        """Drop the executor, when a batch and a pass that run are over."""

        def drop() -> None:
            self._executor = None

        await self._thread.run(drop)
        await self._of_passes.run(drop)
