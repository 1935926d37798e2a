"""A track of a worker: batches that the executor does one after another. Torch-free; it is given `run`.

It has no task of its own. One of the waiting callers leads: it has the next batch run for all callers that are in it,
and hands over when its own operation is done. So a call that finds nobody here costs no more than a plain call. If more
waits, the executor begins with it before any caller hears of its result.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.compute.work import Work
from llmnode.core.operations import Computed
from llmnode.core.serving.pass_times import PassTimes
from llmnode.core.serving.scheduling import Scheduler

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.compute.work import Done
    from llmnode.core.operations import Buffer, Slice
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.serving.scheduling import Batch

    Run = Callable[[Work], Awaitable[tuple[Done, float, float]]]
    """Has the executor do the work, beginning now if it can. Returns when that began and ended too, by `clock`.

    It is shielded: even if its callers are cancelled, a batch is waited for to its end."""


class Track:
    """The operations that wait for their batches, and the batch that runs. `clock` is in seconds."""

    def __init__(self, run: Run, clock: Callable[[], float], policy: BatchPolicy) -> None:
        self.scheduler = Scheduler(policy)
        self.pass_times = PassTimes()
        self.busy_s = 0.0
        """For how long batches have run."""
        self._run = run
        self._clock = clock
        self._calls: dict[int, Call] = {}
        self._running: tuple[Batch, Awaitable[tuple[Done, float, float]]] | None = None
        self._is_led = False
        self._came = trio.Event()
        """Set by the next call. There is another event after it."""

    async def until_done(self, ticket: int, call: Call) -> None:
        """Wait for the `call` of an operation that the scheduler has.

        Cancelled before it runs, it is not done; while it runs, it cannot be cancelled.
        """
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
            self.scheduler.remove(ticket)

    def _wake_one(self) -> None:
        """Its task leads then, unless another does before."""
        for call in self._calls.values():
            call.wake()
            return

    async def _lead(self) -> None:
        """See to the batch that runs, or else to the next."""
        self._is_led = True
        try:
            while self._running is None and (until_s := self.scheduler.waits_until_s(self._clock())) is not None:
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
        batch = self.scheduler.take(self._clock())
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
            self.busy_s += ended_s - began_s
            has_failed = False
            for ticket, result in zip(batch.operations, done.results, strict=True):
                control = calls[ticket]
                assert isinstance(control, ControlCall)
                control.settle(result)
            for (ticket, computed), output in zip(batch.slices.items(), done.outputs, strict=True):
                forward = calls[ticket]
                assert isinstance(forward, ForwardCall)
                forward.settle_slice(computed, output, began_s, ended_s)
                has_failed |= forward.error is not None
            for ticket, output in zip(batch.passes, done.passed, strict=True):
                passed = calls[ticket]
                assert isinstance(passed, PassCall)
                passed.settle(output, began_s, ended_s)
                has_failed |= passed.error is not None
            took_s = None if batch.operations or has_failed else ended_s - began_s
            self.scheduler.done(batch, took_s, self._clock())
            if took_s is not None and batch.passes:
                self.pass_times.note([*batch.passes.values()], took_s)
        finally:
            self._running = None
            for ticket, call in calls.items():
                call.is_running = False
                call.wake()
                if call.is_done or not call.is_wanted:
                    self._remove(ticket)
        if not self.scheduler.has_work or trio.current_effective_deadline() == -inf:
            return  # if we are cancelled, our call may not be wanted, so the next leader begins
        if self.scheduler.waits_until_s(self._clock()) is None:
            self._begin()


@dataclass(slots=True, eq=False, kw_only=True)
class Call:
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
class ControlCall(Call):
    result: bool = False

    def settle(self, result: bool | Exception) -> None:
        if isinstance(result, Exception):
            self.fail(result)
        else:
            self.is_done, self.result = True, result


@dataclass(slots=True, eq=False, kw_only=True)
class PassCall(Call):
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
class ForwardCall(Call):
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
