"""Workers in a process of their own, which may crash: the sessions are lost then, and another process is started.

The node decides when: it waits until the worker is lost, tells its sessions and the swarm, and loads the span again.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeVar

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.worker_messages import CANDIDATES, FITTING_BLOCKS, LOAD, OPEN_MODEL
from llmnode.compute.worker_process import COMMAND, HeldSpan, start_process
from llmnode.core.model import ModelInfo, precision_named
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.policy import WorkerPolicy
from llmnode.core.serving.restarts import Restarts
from llmnode.errors import ConfigError, ModelError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.compute.loading import Wanted
    from llmnode.compute.worker_process import WorkerProcess
    from llmnode.core.model import Precision
    from llmnode.core.span import Span
    from llmnode.ports import Worker

T = TypeVar("T")


class ProcessLoader:
    """The `WorkerSource` port: loads blocks in a process of its own, and in another after it was lost or dropped."""

    def __init__(
        self,
        wanted: Wanted,
        report: Callable[[str], None],
        report_lost: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        policy: WorkerPolicy | None = None,
    ) -> None:
        """`report` gets a line about anything that takes long, `report_lost` one about each process that was lost."""
        self.tensor_bytes = self.position_bytes = 0
        self._wanted = self._asked = wanted
        """The wish of the user, and the request to a process: a process after a lost one gets the KV that was
        announced."""
        self._report = report
        self._report_lost = report_lost
        self._command = command
        self._policy = policy or WorkerPolicy()
        self._process: WorkerProcess | None = None
        self._model: ModelInfo | None = None
        self._workers: dict[BatchingWorker, HeldSpan] = {}
        self._number = 0
        """That of the executor that was loaded last."""
        self._restarts = Restarts()
        self._served_since_s: float | None = None

    @property
    def pid(self) -> int:
        """The id of the process that there is now."""
        assert self._process is not None
        return self._process.pid

    async def open_model(self) -> ModelInfo:
        """Raises the errors of `Loader.open_model`, and WorkerLost once there is no hope."""

        async def known(_process: WorkerProcess) -> ModelInfo:
            assert self._model is not None
            return self._model

        return await self._persist(known)

    async def fitting_blocks(self) -> int:
        async def ask(process: WorkerProcess) -> int:
            fitting: int = await process.ask(FITTING_BLOCKS, report=self._report)
            return fitting

        return await self._persist(ask)

    async def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        async def ask(process: WorkerProcess) -> list[Candidate]:
            found = await process.ask(CANDIDATES, *(each.name for each in precisions), report=self._report)
            return [Candidate(precision_named(name), *figures) for name, *figures in found]

        return await self._persist(ask)

    async def load(self, span: Span) -> BatchingWorker:
        """A fresh worker, in the process that there is, or in another if that was lost."""
        assert not self._workers, "the worker before is lost or dropped first"

        async def load(process: WorkerProcess) -> BatchingWorker:
            self._number += 1
            try:
                loaded = await process.ask(LOAD, self._number, span.start, span.end, report=self._report)
            except ConfigError as error:
                if not self._asked.is_announced:
                    raise
                # The lost process had the memory. It may not be free yet, or other programs have it for a while.
                raise WorkerLost(f"the worker process did not load its blocks again: {error}") from error
            worker = self._has(process, span, loaded)
            self._note_announced(worker)
            return worker

        return await self._persist(load)

    async def load_beside(self, span: Span) -> BatchingWorker | None:
        """In the process that there is, in which the blocks of both are in memory once."""
        ((worker, held),) = self._workers.items()
        process = self._process
        assert process is not None
        self._number += 1
        number, is_of_use = self._number, False
        try:
            arguments = number, held.number, span.start, span.end, worker.kv_tokens
            loaded = await process.load_beside(*arguments, report=self._report)
            is_of_use = loaded is not None
            return None if loaded is None else self._has(process, span, loaded)
        except MemoryError:
            return None
        except RuntimeError as error:  # torch's own: the blocks that are served are not to end for it
            raise ModelError(f"blocks {span} cannot be loaded: {error}") from error
        finally:
            if not is_of_use:
                with trio.CancelScope(shield=True):
                    await process.drop(number)

    def _has(self, process: WorkerProcess, span: Span, loaded: tuple[int, int, int, int, bool]) -> BatchingWorker:
        assert self._model is not None
        held = HeldSpan(process, self._number, span, loaded, self._model.row_bytes)
        self.tensor_bytes, self.position_bytes = held.tensor_bytes, held.position_bytes
        worker = BatchingWorker(held, held.run, time.perf_counter)
        self._workers[worker] = held
        return worker

    def _note_announced(self, worker: BatchingWorker) -> None:
        """This worker is the only one: the next process is to have KV for the same number of positions."""
        self._asked = replace(self._wanted, kv_tokens=worker.kv_tokens, is_announced=True)

    async def drop_one(self, worker: Worker) -> None:
        """The process goes on with the other worker."""
        assert isinstance(worker, BatchingWorker)
        if (held := self._workers.pop(worker, None)) is None or self._process is None:
            return  # it was lost
        held.is_dropped = True
        await self._process.drop(held.number)
        for left, held in self._workers.items():
            self.tensor_bytes, self.position_bytes = held.tensor_bytes, held.position_bytes
            self._note_announced(left)

    def serves(self) -> None:
        """It serves now. If it is lost after this, another process has a good chance."""
        self._served_since_s = trio.current_time()

    async def wait_lost(self) -> None:
        """Wait until the process that serves is lost, and report it. All calls for its sessions fail from then on."""
        assert self._process is not None
        await self._note(await self._process.wait_lost())

    async def drop(self) -> None:
        """End the process, and all its memory is given back. The next one has nothing to do with its crashes."""
        await self.end()
        self._asked, self._restarts, self._served_since_s = self._wanted, Restarts(), None

    def kill(self) -> None:
        """Have all calls that wait for the process fail at once: the node serves no longer."""
        if self._process is not None:
            self._process.kill("was ended with its node")

    async def end(self) -> None:
        self._workers = {}
        if self._process is not None:
            await self._process.end()
            self._process = None

    async def _persist(self, act: Callable[[WorkerProcess], Awaitable[T]]) -> T:
        """Do it in the process that there is, or else in another that has the model open."""
        while True:
            try:
                return await act(self._process or await self._start())
            except WorkerLost as lost:
                await self._note(lost)

    async def _start(self) -> WorkerProcess:
        await trio.sleep(self._restarts.pause_s(self._policy))
        process = self._process = await start_process(self._command, self._policy)
        await process.say_hello()
        model = ModelInfo.from_values(await process.ask(OPEN_MODEL, asdict(self._asked), report=self._report))
        if self._model not in (None, model):
            raise ModelError(f"{model.name} has changed since this node began to serve it: start the node again")
        self._model = model
        return process

    async def _note(self, lost: WorkerLost) -> None:
        """Raises WorkerLost if there is no hope that another would fare better."""
        since_s, self._served_since_s = self._served_since_s, None
        served_s = None if since_s is None else trio.current_time() - since_s
        self._restarts = self._restarts.after_crash(served_s, self._policy)
        await self.end()
        if self._restarts.is_hopeless(self._policy):
            raise WorkerLost(
                f"{lost}, {self._restarts.failed_starts} times in a row while it was started: "
                "if memory is short, serve fewer --blocks or lower --kv-tokens"
            )
        also = "; its sessions are lost, and" if served_s is not None else ";"
        self._report_lost(f"{lost}{also} another is started in {self._restarts.pause_s(self._policy):g} s")
