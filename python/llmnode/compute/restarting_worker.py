"""A worker in a process of its own, which may crash: its sessions are lost then, and another process is started.

The node decides when: it waits until the worker is lost, tells its sessions, and has the span loaded again.
"""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from llmnode.compute.batching import BatchingWorker
from llmnode.compute.worker_messages import FITTING_BLOCKS, LOAD, OPEN_MODEL
from llmnode.compute.worker_process import COMMAND, start_process
from llmnode.core.model import ModelInfo
from llmnode.core.operations import Close, Open
from llmnode.core.policy import WorkerPolicy
from llmnode.core.serving.restarts import Restarts
from llmnode.errors import ConfigError, LocalProtocolError, ModelError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.compute.loading import Wanted
    from llmnode.compute.worker_process import WorkerProcess
    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Operation
    from llmnode.core.span import Span

T = TypeVar("T")
Result = TypeVar("Result")


class RestartingWorker:
    """The `Worker` port over one process after another: each is a life, and its sessions end with it."""

    def __init__(self, span: Span, kv_tokens: int) -> None:
        self.span = span
        self.kv_tokens = kv_tokens
        self._busy_us = 0  # of lives that have ended
        self._life: BatchingWorker | None = None
        self._lives: dict[SessionId, BatchingWorker] = {}

    @property
    def kv_tokens_free(self) -> int:
        return 0 if self._life is None else self._life.kv_tokens_free

    @property
    def busy_us(self) -> int:
        return self._busy_us + (0 if self._life is None else self._life.busy_us)

    def live(self, life: BatchingWorker | None) -> None:
        """Sessions that open from now on belong to this life; None while there is none."""
        self._busy_us, self._life = self.busy_us, life

    async def do(self, operation: Operation[Result]) -> Result:
        if isinstance(operation, Open):
            return cast("Result", await self._open(operation))
        if isinstance(operation, Close):
            return cast("Result", await self._close(operation.session))
        first, *others = map(self._life_of, operation.sessions)
        if any(each is not first for each in others):
            raise WorkerLost("one of the two sessions is lost")
        return await first.do(operation)

    async def _open(self, operation: Open) -> bool:
        session = operation.session
        if session in self._lives:
            raise LocalProtocolError("this session is open already")
        if (life := self._life) is None:
            raise WorkerLost("the worker process is being started again")
        is_open = await life.do(operation)
        if is_open:
            self._lives[session] = life
        return is_open

    async def _close(self, session: SessionId) -> bool:
        if (life := self._lives.get(session)) is not None:
            with suppress(WorkerLost):
                await life.do(Close(session))
            del self._lives[session]
        return True

    def _life_of(self, session: SessionId) -> BatchingWorker:
        if (life := self._lives.get(session)) is None:
            raise LocalProtocolError("this session is not open")
        return life


class ProcessLoader:
    """Loads blocks in a process of its own, and again after it was lost. `end` it, and no process is left."""

    def __init__(
        self,
        wanted: Wanted,
        report: Callable[[str], None],
        report_lost: Callable[[str], None],
        command: Sequence[str] = COMMAND,
        policy: WorkerPolicy | None = None,
    ) -> None:
        """`report` gets a line about anything that takes long, `report_lost` one about each process that was lost."""
        self.tensor_bytes = 0
        self._wanted = wanted
        self._report = report
        self._report_lost = report_lost
        self._command = command
        self._policy = policy or WorkerPolicy()
        self._process: WorkerProcess | None = None
        self._model: ModelInfo | None = None
        self._worker: RestartingWorker | None = None
        self._restarts = Restarts()
        self._served_since_s: float | None = None

    @property
    def pid(self) -> int:
        """The id of the process that there is now."""
        assert self._process is not None
        return self._process.pid

    async def open_model(self) -> ModelInfo:
        """Raises what `Loader` does, and WorkerLost once there is no hope."""

        async def known(_process: WorkerProcess) -> ModelInfo:
            assert self._model is not None
            return self._model

        return await self._persist(known)

    async def fitting_blocks(self) -> int:
        async def ask(process: WorkerProcess) -> int:
            fitting: int = await process.ask(FITTING_BLOCKS, report=self._report)
            return fitting

        return await self._persist(ask)

    async def load(self, span: Span) -> RestartingWorker:
        """The same worker each time, for one span. To be called again once the worker is lost."""

        async def load(process: WorkerProcess) -> RestartingWorker:
            try:
                loaded = await process.ask(LOAD, span.start, span.end, report=self._report)
            except ConfigError as error:
                if not self._wanted.is_announced:
                    raise
                # The lost process had room. Its memory may not be free yet, or other programs have it for a while.
                raise WorkerLost(f"the worker process did not load its blocks again: {error}") from error
            self.tensor_bytes, kv_tokens_free = loaded
            assert self._model is not None
            process.holds(span, kv_tokens_free, self._model.row_bytes)
            self._wanted = replace(self._wanted, kv_tokens=kv_tokens_free, kv_memory=None, is_announced=True)
            worker = self._worker = self._worker or RestartingWorker(span, kv_tokens_free)
            worker.live(BatchingWorker(process, process.run, time.perf_counter))
            return worker

        return await self._persist(load)

    def serves(self) -> None:
        """It serves now. If it is lost after this, another process has a good chance."""
        self._served_since_s = trio.current_time()

    async def wait_lost(self) -> None:
        """Wait until the process that serves is lost, and report it. All calls for its sessions fail from then on."""
        assert self._process is not None
        assert self._worker is not None
        lost = await self._process.wait_lost()
        self._worker.live(None)
        await self._note(lost)

    def kill(self) -> None:
        """Have all calls that wait for the process fail at once: the node serves no longer."""
        if self._process is not None:
            self._process.kill("was ended with its node")

    async def end(self) -> None:
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
        model = ModelInfo(**await process.ask(OPEN_MODEL, asdict(self._wanted), report=self._report))
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
