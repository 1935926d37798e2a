"""Gives sessions KV in the order of `core/serving/admission_queue.py`, and refuses those that would wait too long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.operations import Close, Open
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.errors import PeerRefused, WorkerLost
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.ids import AdapterId, PeerId, SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.priority import Priority
    from llmnode.core.span import Span
    from llmnode.ports import Worker


class Admission:
    """To all KV that `worker` has. Nobody else is to open sessions there."""

    def __init__(self, worker: Worker, policy: AdmissionPolicy) -> None:
        self._worker = worker
        self._policy = policy
        self._room = AdmissionQueue(worker.kv_tokens, policy)
        self._waiting: dict[SessionId, trio.Event] = {}
        self._closed_because = ""

    async def enter(
        self,
        session: SessionId,
        span: Span,
        positions: int,
        client: PeerId,
        priority: Priority,
        adapter: AdapterId | None = None,
    ) -> None:
        """Reserve KV, when it is the session's turn. Raises PeerRefused. `leave` is due in any case."""
        self._check(positions, client)
        came_in = self._waiting[session] = trio.Event()
        self._room.add(session, client, priority, positions, trio.current_time())
        self._admit()
        try:
            with trio.move_on_after(self._policy.wait_s):
                await came_in.wait()
        finally:
            del self._waiting[session]
            if self._closed_because or not came_in.is_set():
                self._forget(session)
        self._check_open()
        if not came_in.is_set():
            raise self._refusal(positions, f"not free within {self._policy.wait_s:g} s")
        try:
            is_open = await self._worker.do(Open(session, span, positions, client, priority, adapter))
        except WorkerLost as error:
            raise PeerRefused(RefusalCode.BUSY, str(error)) from error
        if not is_open:
            raise self._refusal(positions, "taken by others than sessions")

    async def leave(self, session: SessionId) -> None:
        """Free its KV, if it has any, and let others in."""
        try:
            await self._worker.do(Close(session))
        finally:
            self._forget(session)

    def close(self, reason: str) -> None:
        """Let nobody in any more, nor wait. They are told the reason."""
        self._closed_because = reason
        for came_in in self._waiting.values():
            came_in.set()

    def _forget(self, session: SessionId) -> None:
        self._room.remove(session, trio.current_time())
        self._admit()

    def _admit(self) -> None:
        for session in self._room.admit(trio.current_time()):
            self._waiting[session].set()

    def _check(self, positions: int, client: PeerId) -> None:
        """Raises PeerRefused if waiting is of no use, or too many do already."""
        self._check_open()
        if positions > self._room.positions:
            reason = f"{positions} positions asked for, and this server has {self._room.positions} in all"
            raise PeerRefused(RefusalCode.NO_ROOM, reason)
        if not self._room.has_place(client):
            raise self._refusal(positions, f"{self._room.line} sessions wait already")

    def _check_open(self) -> None:
        if self._closed_because:
            raise PeerRefused(RefusalCode.BUSY, self._closed_because)

    def _refusal(self, positions: int, why: str) -> PeerRefused:
        reason = f"{positions} positions asked for, {self._worker.kv_tokens_free} free: {why}"
        retry_after_s = self._room.retry_after_s(positions, trio.current_time())
        return PeerRefused(RefusalCode.NO_ROOM, reason, retry_after_s=retry_after_s)
