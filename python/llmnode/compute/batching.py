"""The `Worker` port: the operations of all sessions, done in batches by one executor. Torch-free; it is given `run`.

An executor that computes passes beside all else has a track of batches for them (`track.py`). Else all go by one.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

import trio

from llmnode.compute.track import ControlCall, ForwardCall, PassCall, Track
from llmnode.core.operations import Backward, Close, Evaluate, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.serving.load_average import LoadAverage
from llmnode.errors import LocalProtocolError, WorkerLost

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.track import Run
    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Computed, Control, Operation, Pass
    from llmnode.core.span import Span
    from llmnode.core.speed import ForwardsSeen
    from llmnode.ports import Held

Result = TypeVar("Result")


class BatchingWorker:
    """The `Worker` port over an executor, for one task of each session at a time. `clock` is in seconds.

    The executor is wherever `run` reaches it. Only its span and its free KV are known here.
    """

    def __init__(self, held: Held, run: Run, clock: Callable[[], float], policy: BatchPolicy | None = None) -> None:
        self.kv_tokens = held.kv_tokens_free()
        self._held = held
        self._clock = clock
        self._policy = policy or BatchPolicy()
        self._track = Track(run, clock, self._policy)
        """That of sessions and adapters."""
        self._pass_track = Track(run, clock, self._policy) if held.passes_beside else self._track
        self._load = LoadAverage()

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
        tracks = {self._track, self._pass_track}
        return int(1e6 * sum(each.busy_s for each in tracks))

    @property
    def load(self) -> float:
        return self._load.at(self._clock())

    @property
    def seen(self) -> ForwardsSeen:
        return self._track.scheduler.seen

    def pass_blocks(self, kind: type[Pass], positions: int, blocks: int) -> int:
        track = self._pass_track
        return track.pass_times.blocks(kind, positions, blocks, track.scheduler.pass_s(self._clock()))

    def pass_positions(self, kind: type[Pass], blocks: int) -> int:
        time_s = self._pass_track.scheduler.pass_s(self._clock())
        return self._pass_track.pass_times.positions(kind, self._policy.pass_positions, blocks, time_s)

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
        if self._track.scheduler.knows(session):
            raise LocalProtocolError("this session is open already")
        self._track.scheduler.admit(operation)
        is_open = False
        try:
            is_open = await self._control(operation)
        finally:
            if not is_open:
                self._track.scheduler.dismiss(session)
        return is_open

    async def _close(self, session: SessionId) -> bool:
        if self._track.scheduler.knows(session):
            with suppress(WorkerLost):  # then it holds nothing any more
                await self._control(Close(session))
            self._track.scheduler.dismiss(session)
        return True

    async def _control(self, operation: Control) -> bool:
        self._check(operation.sessions)
        call = ControlCall()
        await self._track.until_done(self._track.scheduler.add(operation, self._clock()), call)
        call.raise_error()
        return call.result

    async def _forward(self, forward: Forward) -> Computed:
        self._check(forward.sessions)
        call = ForwardCall(length=forward.length, asked_s=self._clock())
        try:
            await self._track.until_done(self._track.scheduler.add(forward, call.asked_s), call)
        finally:
            if call.has_begun and (call.error is not None or not call.is_done):
                with trio.CancelScope(shield=True), suppress(WorkerLost):
                    await self._control(Truncate(forward.session, forward.start))
        self._load.note(call.ended_s - call.asked_s, call.ended_s)
        return call.computed()

    async def _pass(self, operation: Pass) -> Computed:
        call = PassCall(asked_s=self._clock())
        track = self._pass_track
        await track.until_done(track.scheduler.add(operation, call.asked_s), call)
        self._load.note(call.ended_s - call.asked_s, call.ended_s)
        return call.computed()

    def _check(self, sessions: Sequence[SessionId]) -> None:
        if not all(map(self._track.scheduler.knows, sessions)):
            raise LocalProtocolError("this session is not open")
