"""The `Worker` port: what all sessions ask of one executor, done in batches. Torch-free; what runs a batch is given.

There is no task of its own: of those who wait, one leads, has the next batch run for all who are in it, and hands over
when its own is done. So a call that finds nobody here costs what a plain call would. If more waits, the executor begins
with it before anybody hears of what was done.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, count
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.compute.work import Close, Fork, Open, Part, Truncate, Work
from llmnode.core.policy import BatchPolicy
from llmnode.core.serving.scheduling import Priority, Scheduler
from llmnode.errors import LocalProtocolError, WorkerLost
from llmnode.ports import Computed, Piece

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.compute.work import Chore, Done
    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.serving.scheduling import Batch
    from llmnode.core.serving.scheduling import Part as Chosen
    from llmnode.core.span import Span
    from llmnode.ports import Held
    from llmnode.wire.frame import Buffer

    Run = Callable[[Work], Awaitable[tuple[Done, float, float]]]
    """Has work done by the executor, beginning now if it can, and says when that began and ended, by `clock`."""


class BatchingWorker:
    """The `Worker` port over an executor, for one task of each session at a time. `clock` is in seconds.

    The executor is where `run` does what it is asked; here only what it holds is known of it.
    """

    def __init__(self, held: Held, run: Run, clock: Callable[[], float], policy: BatchPolicy | None = None) -> None:
        self.kv_tokens = held.kv_tokens_free()
        self._held = held
        self._run = run
        self._clock = clock
        self._scheduler = Scheduler(policy or BatchPolicy())
        self._busy_s = 0.0
        self._tickets = count()
        self._chores: dict[int, _Chore] = {}
        self._forwards: dict[int, _Forward] = {}
        self._running: tuple[Batch, Awaitable[tuple[Done, float, float]]] | None = None
        self._is_led = False
        self._came = trio.Event()
        """The next call. There is another event after it."""

    @property
    def span(self) -> Span:
        return self._held.span

    @property
    def kv_tokens_free(self) -> int:
        return self._held.kv_tokens_free()

    @property
    def busy_us(self) -> int:
        return int(1e6 * self._busy_s)

    async def open(
        self,
        session: SessionId,
        span: Span,
        max_length: int,
        client: PeerId,
        priority: Priority = Priority.INTERACTIVE,
    ) -> bool:
        if self._scheduler.knows(session):
            raise LocalProtocolError("this session is open already")
        self._scheduler.admit(session, client, priority, span)
        is_open = False
        try:
            is_open = await self._do([session], Open(session, span, max_length))
        finally:
            if not is_open:
                self._scheduler.dismiss(session)
        return is_open

    async def forward(self, piece: Piece) -> Computed:
        self._check(piece.session)
        ticket, call = next(self._tickets), _Forward(piece=piece, asked_s=self._clock())
        self._scheduler.add(ticket, piece.session, piece.length, call.asked_s)
        self._forwards[ticket] = call
        try:
            await self._until_done(ticket, call)
        finally:
            if call.has_begun and not call.is_done:
                with trio.CancelScope(shield=True), suppress(WorkerLost):
                    await self.truncate(piece.session, piece.start)
        return call.computed()

    async def truncate(self, session: SessionId, length: int) -> None:
        self._check(session)
        await self._do([session], Truncate(session, length))

    async def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        self._check(session)
        self._check(source)
        await self._do([session, source], Fork(session, source, shared, length))

    async def close(self, session: SessionId) -> None:
        if self._scheduler.knows(session):
            await self._do([session], Close(session))
            self._scheduler.dismiss(session)

    def _check(self, session: SessionId) -> None:
        if not self._scheduler.knows(session):
            raise LocalProtocolError("this session is not open")

    async def _do(self, sessions: Sequence[SessionId], asked: Chore) -> bool:
        ticket, chore = next(self._tickets), _Chore(asked=asked)
        self._scheduler.add_chore(ticket, sessions)
        self._chores[ticket] = chore
        await self._until_done(ticket, chore)
        return chore.outcome()

    async def _until_done(self, ticket: int, call: _Call) -> None:
        """Cancelled before it runs, it is not done; while it runs, it cannot be cancelled."""
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
            # It is done, and who asked has to know it, to undo it; the next checkpoint is cancelled again.
        finally:
            self._remove(ticket)
            if not self._is_led:
                self._wake_one()

    def _remove(self, ticket: int) -> None:
        """At once when it is done: its task may not be the next to run."""
        if self._chores.pop(ticket, None) or self._forwards.pop(ticket, None):
            self._scheduler.remove(ticket)

    def _wake_one(self) -> None:
        """It leads then, if nobody else does before."""
        for call in chain(self._chores.values(), self._forwards.values()):
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
        chores = [self._chores[ticket] for ticket in batch.chores]
        forwards = [self._forwards[part.ticket] for part in batch.parts]
        parts = [forward.part(part) for forward, part in zip(forwards, batch.parts, strict=True)]
        self._running = batch, self._run(Work([chore.asked for chore in chores], parts))
        for call in chain[_Call](chores, forwards):
            call.is_running = True

    async def _finish(self) -> None:
        assert self._running is not None
        batch, running = self._running
        chores = {ticket: self._chores[ticket] for ticket in batch.chores}
        forwards = {part.ticket: self._forwards[part.ticket] for part in batch.parts}
        calls: dict[int, _Call] = {**chores, **forwards}
        try:
            with trio.CancelScope(shield=True):
                done, began_s, ended_s = await running
            self._busy_s += ended_s - began_s
            for chore, outcome in zip(chores.values(), done.chores, strict=True):
                chore.settle(outcome)
            for forward, part, output in zip(forwards.values(), batch.parts, done.outputs, strict=True):
                forward.settle(part, output)
                forward.note(began_s, ended_s)
            is_one_forward = not chores and not any(forward.error for forward in forwards.values())
            self._scheduler.done(batch, ended_s - began_s if is_one_forward else None, self._clock())
        finally:
            self._running = None
            for ticket, call in calls.items():
                call.is_running = False
                call.wake()
                if call.is_done or not call.is_wanted:
                    self._remove(ticket)
        is_cancelled = trio.current_effective_deadline() == -inf  # then who leads next begins: ours may not be wanted
        if self._forwards and not is_cancelled and self._scheduler.waits_until_s(self._clock()) is None:
            self._begin()


@dataclass(slots=True, eq=False)
class _Call:
    """Something asked of the executor, and its outcome."""

    is_running: bool = False
    """Then what follows is not settled yet."""
    is_done: bool = False
    is_wanted: bool = True
    error: Exception | None = None
    _woken: trio.Event = field(default_factory=trio.Event)

    async def wait(self) -> None:
        """Until it is done, or there is nobody who leads."""
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
class _Chore(_Call):
    asked: Chore
    result: bool = False

    def settle(self, outcome: bool | Exception) -> None:
        if isinstance(outcome, Exception):
            self.fail(outcome)
        else:
            self.is_done, self.result = True, outcome

    def outcome(self) -> bool:
        self.raise_error()
        return self.result


@dataclass(slots=True, eq=False, kw_only=True)
class _Forward(_Call):
    piece: Piece
    asked_s: float
    outputs: list[Buffer] = field(default_factory=list)
    given: int = 0
    """Positions that are computed."""
    has_begun: bool = False
    """For good: the executor has something of it, whether in KV or half way through the blocks."""
    compute_s: float = 0.0
    ended_s: float = 0.0

    def part(self, chosen: Chosen) -> Part:
        """What was chosen, which continues what is computed."""
        whole = self.piece
        if chosen.length == whole.length and chosen.is_through and not chosen.first:
            return Part(whole, whole.start, len(whole.hidden))
        row_bytes = len(whole.hidden) // whole.length
        rows = memoryview(whole.hidden)[self.given * row_bytes : (self.given + chosen.length) * row_bytes]
        hidden = b"" if chosen.first else rows
        piece = Piece(whole.session, whole.start + self.given, chosen.length, hidden, chosen.first, chosen.end)
        return Part(piece, whole.start, len(rows) if chosen.is_through else 0)

    def settle(self, chosen: Chosen, output: Buffer | Exception) -> None:
        if isinstance(output, Exception):
            self.fail(output)
            return
        self.has_begun = True
        if chosen.is_through:
            self.outputs.append(output)
            self.given += chosen.length
            self.is_done = self.given == self.piece.length

    def note(self, began_s: float, ended_s: float) -> None:
        """When a forward with a part of it was computed."""
        self.compute_s += ended_s - began_s
        self.ended_s = ended_s

    def computed(self) -> Computed:
        self.raise_error()
        hidden = self.outputs[0] if len(self.outputs) == 1 else b"".join(self.outputs)
        queue_s = self.ended_s - self.asked_s - self.compute_s
        return Computed(hidden, queue_us=int(1e6 * queue_s), compute_us=int(1e6 * self.compute_s))
