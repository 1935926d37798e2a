"""The `Worker` port: the operations of all sessions, done in batches by one executor. Torch-free; it is given `run`.

It has no task of its own. One of the waiting callers leads: it has the next batch run for all callers that are in it,
and hands over when its own operation is done. So a call that finds nobody here costs no more than a plain call. If more
waits, the executor begins with it before any caller hears of its result.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from llmnode.compute.work import Work
from llmnode.core.operations import Backward, Close, Computed, Evaluate, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.serving.load_average import LoadAverage
from llmnode.core.serving.pass_times import PassTimes
from llmnode.core.serving.scheduling import Scheduler
from llmnode.errors import LocalProtocolError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.compute.work import Done
    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Buffer, Control, Operation, Pass, Slice
    from llmnode.core.serving.scheduling import Batch
    from llmnode.core.span import Span
    from llmnode.core.speed import ForwardsSeen
    from llmnode.ports import Held

    Run = Callable[[Work], Awaitable[tuple[Done, float, float]]]
    """Has the executor do the work, beginning now if it can. Returns when that began and ended too, by `clock`.

    It is shielded: even if its callers are cancelled, a batch is waited for to its end."""

Result = TypeVar("Result")


class BatchingWorker:
    """The `Worker` port over an executor, for one task of each session at a time. `clock` is in seconds.

    The executor is wherever `run` reaches it. Only its span and its free KV are known here.
    """

    def __init__(self, held: Held, run: Run, clock: Callable[[], float], policy: BatchPolicy | None = None) -> None:
        self.kv_tokens = held.kv_tokens_free()
        self._held = held
        self._run = run
        self._clock = clock
        self._policy = policy or BatchPolicy()
        self._scheduler = Scheduler(self._policy)
        self._pass_times = PassTimes()
        self._busy_s = 0.0
        self._load = LoadAverage()
        self._calls: dict[int, _Call] = {}
        self._running: tuple[Batch, Awaitable[tuple[Done, float, float]]] | None = None
        self._is_led = False
        self._came = trio.Event()
        """Set by the next call. There is another event after it."""

    @property
    def span(self) -> Span:
        return self._held.span

    @property
    def kv_tokens_free(self) -> int:
        return self._held.kv_tokens_free()

    @property
    def kv_page(self) -> int:
        return self._held.kv_page

    @property
    def busy_us(self) -> int:
        return int(1e6 * self._busy_s)

    @property
    def load(self) -> float:
        return self._load.at(self._clock())

    @property
    def seen(self) -> ForwardsSeen:
        return self._scheduler.seen

    def pass_blocks(self, kind: type[Pass], positions: int, blocks: int) -> int:
        return self._pass_times.blocks(kind, positions, blocks, self._scheduler.pass_s(self._clock()))

    def pass_positions(self, kind: type[Pass], blocks: int) -> int:
        time_s = self._scheduler.pass_s(self._clock())
        return self._pass_times.positions(kind, self._policy.pass_positions, blocks, time_s)

    async def do(self, operation: Operation[Result]) -> Result:
        return cast("Result", await self._do(cast("Forward | Pass | Control", operation)))

    async def _do(self, operation: Forward | Pass | Control) -> Computed | bool:
        match operation:
            case Forward():
                return await self._forward(operation)
            case Evaluate() | Backward():
                return await self._pass(operation)
            case Open():
                return await self._open(operation)
            case Close(session):
                return await self._close(session)
            case _:
                return await self._control(operation)

    async def _open(self, operation: Open) -> bool:
        session = operation.session
        if self._scheduler.knows(session):
            raise LocalProtocolError("this session is open already")
        self._scheduler.admit(operation)
        is_open = False
        try:
            is_open = await self._control(operation)
        finally:
            if not is_open:
                self._scheduler.dismiss(session)
        return is_open

    async def _close(self, session: SessionId) -> bool:
        if self._scheduler.knows(session):
            with suppress(WorkerLost):  # then it holds nothing any more
                await self._control(Close(session))
            self._scheduler.dismiss(session)
        return True

    async def _control(self, operation: Control) -> bool:
        self._check(operation.sessions)
        call = _ControlCall()
        await self._until_done(self._scheduler.add(operation, self._clock()), call)
        call.raise_error()
        return call.result

    async def _forward(self, forward: Forward) -> Computed:
        self._check(forward.sessions)
        call = _ForwardCall(length=forward.length, asked_s=self._clock())
        try:
            await self._until_done(self._scheduler.add(forward, call.asked_s), call)
        finally:
            if call.has_begun and (call.error is not None or not call.is_done):
                with trio.CancelScope(shield=True), suppress(WorkerLost):
                    await self._control(Truncate(forward.session, forward.start))
        self._load.note(call.ended_s - call.asked_s, call.ended_s)
        return call.computed()

    async def _pass(self, operation: Pass) -> Computed:
        call = _PassCall(asked_s=self._clock())
        await self._until_done(self._scheduler.add(operation, call.asked_s), call)
        self._load.note(call.ended_s - call.asked_s, call.ended_s)
        return call.computed()

    def _check(self, sessions: Sequence[SessionId]) -> None:
        if not all(map(self._scheduler.knows, sessions)):
            raise LocalProtocolError("this session is not open")

    async def _until_done(self, ticket: int, call: _Call) -> None:
        """Wait for a call. Cancelled before it runs, it is not done; while it runs, it cannot be cancelled."""
        self._calls[ticket] = call
        self._came.set()
        try:
            while call.is_running or not call.is_done:
                if self._is_led:
                    await call.wait()
                else:
                    await self._lead()
        except trio.Cancelled:
            call.is_wanted = False
            with trio.CancelScope(shield=True):
                while call.is_running:
                    await (call.wait() if self._is_led else self._lead())
            if not call.is_done:
                raise
            # It is done, and the caller has to know that, to undo it; the next checkpoint is cancelled again.
        finally:
            self._remove(ticket)
            if not self._is_led:
                self._wake_one()

    def _remove(self, ticket: int) -> None:
        """Remove a call as soon as it is done, since its task may not be the next to run."""
        if self._calls.pop(ticket, None):
            self._scheduler.remove(ticket)

    def _wake_one(self) -> None:
        """Its task leads then, unless another does before."""
        for call in self._calls.values():
            call.wake()
            return

    async def _lead(self) -> None:
        """See to the batch that runs, or else to the next."""
        self._is_led = True
        try:
            while self._running is None and (until_s := self._scheduler.waits_until_s(self._clock())) is not None:
                self._came = trio.Event()
                with trio.move_on_after(max(0.0, until_s - self._clock())):
                    await self._came.wait()
            if self._running is None:
                await trio.lowlevel.checkpoint_if_cancelled()
                self._begin()
            await self._finish()
        finally:
            self._is_led = False

    def _begin(self) -> None:
        batch = self._scheduler.take(self._clock())
        work = Work([*batch.operations.values()], [*batch.slices.values()], [*batch.passes.values()])
        self._running = batch, self._run(work)
        for ticket in (*batch.operations, *batch.slices, *batch.passes):
            self._calls[ticket].is_running = True

    async def _finish(self) -> None:
        assert self._running is not None
        batch, running = self._running
        calls = {ticket: self._calls[ticket] for ticket in (*batch.operations, *batch.slices, *batch.passes)}
        try:
            done, began_s, ended_s = await running
            self._busy_s += ended_s - began_s
            has_failed = False
            for ticket, result in zip(batch.operations, done.results, strict=True):
                control = calls[ticket]
                assert isinstance(control, _ControlCall)
                control.settle(result)
            for (ticket, computed), output in zip(batch.slices.items(), done.outputs, strict=True):
                forward = calls[ticket]
                assert isinstance(forward, _ForwardCall)
                forward.settle_slice(computed, output, began_s, ended_s)
                has_failed |= forward.error is not None
            for ticket, output in zip(batch.passes, done.passed, strict=True):
                passed = calls[ticket]
                assert isinstance(passed, _PassCall)
                passed.settle(output, began_s, ended_s)
                has_failed |= passed.error is not None
            took_s = None if batch.operations or has_failed else ended_s - began_s
            self._scheduler.done(batch, took_s, self._clock())
            if took_s is not None and batch.passes:
                self._pass_times.note([*batch.passes.values()], took_s)
        finally:
            self._running = None
            for ticket, call in calls.items():
                call.is_running = False
                call.wake()
                if call.is_done or not call.is_wanted:
                    self._remove(ticket)
        if not self._scheduler.has_work or trio.current_effective_deadline() == -inf:
            return  # if we are cancelled, our call may not be wanted, so the next leader begins
        if self._scheduler.waits_until_s(self._clock()) is None:
            self._begin()


@dataclass(slots=True, eq=False, kw_only=True)
class _Call:
    """An operation that a task waits for."""

    is_running: bool = False
    """Whether a running batch has it. Then what comes after it is not settled yet."""
    is_done: bool = False
    is_wanted: bool = True
    error: Exception | None = None
    _woken: trio.Event = field(default_factory=trio.Event)

    async def wait(self) -> None:
        """Until it is done, or no task leads."""
        await self._woken.wait()
        self._woken = trio.Event()

    def wake(self) -> None:
        self._woken.set()

    def fail(self, error: Exception) -> None:
        self.is_done, self.error = True, error

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@dataclass(slots=True, eq=False, kw_only=True)
class _ControlCall(_Call):
    result: bool = False

    def settle(self, result: bool | Exception) -> None:
        if isinstance(result, Exception):
            self.fail(result)
        else:
            self.is_done, self.result = True, result


@dataclass(slots=True, eq=False, kw_only=True)
class _PassCall(_Call):
    asked_s: float
    output: Buffer = b""
    compute_s: float = 0.0
    ended_s: float = 0.0

    def settle(self, output: Buffer | Exception, began_s: float, ended_s: float) -> None:
        self.compute_s, self.ended_s = ended_s - began_s, ended_s
        if isinstance(output, Exception):
            self.fail(output)
        else:
            self.is_done, self.output = True, output

    def computed(self) -> Computed:
        self.raise_error()
        queue_s = self.ended_s - self.asked_s - self.compute_s
        return Computed(self.output, queue_us=int(1e6 * queue_s), compute_us=int(1e6 * self.compute_s))


@dataclass(slots=True, eq=False, kw_only=True)
class _ForwardCall(_Call):
    length: int
    asked_s: float
    outputs: list[Buffer] = field(default_factory=list)
    given: int = 0
    """Positions that are computed."""
    has_begun: bool = False
    """The executor has some of it, in KV or half way through the blocks."""
    compute_s: float = 0.0
    ended_s: float = 0.0

    def settle_slice(self, computed: Slice, output: Buffer | Exception, began_s: float, ended_s: float) -> None:
        self.compute_s += ended_s - began_s
        self.ended_s = ended_s
        if isinstance(output, Exception):
            self.fail(output)
            return
        self.has_begun = True
        if computed.end is None:
            self.outputs.append(output)
            self.given += computed.length
            self.is_done = self.given == self.length

    def computed(self) -> Computed:
        self.raise_error()
        hidden = self.outputs[0] if len(self.outputs) == 1 else b"".join(self.outputs)
        queue_s = self.ended_s - self.asked_s - self.compute_s
        return Computed(hidden, queue_us=int(1e6 * queue_s), compute_us=int(1e6 * self.compute_s))
