"""Gives sessions KV in the order of `core/serving/admission_queue.py`, and refuses those that would wait too long.

Sessions that have to go for others are told so, and end.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.operations import Close, Open
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.errors import PeerRefused, WorkerLost
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.core.ids import SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.serving.kv_shares import KvClaim
    from llmnode.ports import Worker

    Evict = Callable[[PeerRefused], None]
    """Ends a session, and says why. It returns at once."""

MOVED = "this session was not in use, and others wait for its KV: go on elsewhere, or here, by a replay"


@dataclass(slots=True, eq=False)
class _Waiting:
    claim: KvClaim
    has_kv: bool = False
    makes_way: bool = False
    over: trio.Event = field(default_factory=trio.Event)

    def end(self, *, has_kv: bool = False, makes_way: bool = False) -> None:
        self.has_kv, self.makes_way = has_kv, makes_way
        self.over.set()


class Admission:
    """To all KV that `worker` has. Nobody else is to open sessions there."""

    def __init__(self, worker: Worker, policy: AdmissionPolicy) -> None:
        self._worker = worker
        self._policy = policy
        self._queue = AdmissionQueue(worker.kv_tokens, policy)
        self._waiting: dict[SessionId, _Waiting] = {}
        self._evict: dict[SessionId, tuple[KvClaim, Evict]] = {}
        self._looked_s = -inf
        self._closed_because = ""

    async def enter(self, opening: Open, claim: KvClaim, evict: Evict) -> None:
        """Do `opening`, when it is the session's turn. Raises PeerRefused. `leave` is due in any case.

        From then on, `evict` may be called once, if the session has to go for others.
        """
        self._check(claim)
        session = opening.session
        waiting = self._waiting[session] = _Waiting(claim)
        self._queue.add(session, claim, trio.current_time())
        self._evict[session] = claim, evict
        try:
            with trio.move_on_after(self._policy.wait_s):
                await self._wait(waiting)
        finally:
            del self._waiting[session]
            if self._closed_because or not waiting.has_kv:
                self._evict.pop(session, None)
                self._forget(session)
        self._check_open()
        if not waiting.has_kv:
            why = "others come first" if waiting.makes_way else f"not free within {self._policy.wait_s:g} s"
            raise self._refusal(claim, why)
        try:
            is_open = await self._worker.do(opening)
        except WorkerLost as error:
            raise PeerRefused(RefusalCode.BUSY, str(error)) from error
        if not is_open:
            raise self._refusal(claim, "taken by others than sessions")

    def use(self, session: SessionId, *, ends: bool = False) -> None:
        """A step of the session begins, or a step or replay ends. Other frames do not count."""
        self._queue.use(session, trio.current_time(), ends=ends)

    async def leave(self, session: SessionId) -> None:
        """Free its KV, if it has any, and let others in."""
        try:
            await self._worker.do(Close(session))
        finally:
            self._evict.pop(session, None)
            self._forget(session)

    def close(self, reason: str) -> None:
        """Let nobody in any more, nor wait. They are told the reason."""
        self._closed_because = reason
        for waiting in self._waiting.values():
            waiting.end()

    async def _wait(self, waiting: _Waiting) -> None:
        self._admit()
        while not waiting.over.is_set():
            self._look()
            with trio.move_on_after(self._policy.look_every_s):
                await waiting.over.wait()

    def _look(self) -> None:
        """Have sessions go for those that wait. All that wait look, so that most of them need not do anything."""
        now_s = trio.current_time()
        if now_s < self._looked_s + self._policy.look_every_s / 2:
            return
        self._looked_s = now_s
        moved = [self._evict.pop(session) for session in self._queue.choose_moves(now_s)]
        if moved:  # working it out takes long with thousands of sessions, so the largest claim is that of all
            largest = max((claim for claim, _ in moved), key=lambda claim: claim.positions)
            retry_after_s = self._queue.retry_after_s(largest, now_s)
            for _, evict in moved:
                evict(PeerRefused(RefusalCode.UNKNOWN_SESSION, MOVED, retry_after_s=retry_after_s))

    def _forget(self, session: SessionId) -> None:
        self._queue.remove(session, trio.current_time())
        self._admit()

    def _admit(self) -> None:
        for session in self._queue.admit(trio.current_time()):
            self._waiting[session].end(has_kv=True)

    def _check(self, claim: KvClaim) -> None:
        """Raises PeerRefused if waiting is of no use, or too many do already."""
        self._check_open()
        if claim.positions > self._queue.positions:
            reason = f"{claim.positions} positions asked for, and this server has {self._queue.positions} in all"
            raise PeerRefused(RefusalCode.NO_ROOM, reason)
        has_place, makes_way = self._queue.place_for(claim)
        if not has_place:
            raise self._refusal(claim, f"{self._queue.waiting} sessions wait already")
        if makes_way is not None:
            self._waiting[makes_way].end(makes_way=True)
            self._queue.remove(makes_way, trio.current_time())

    def _check_open(self) -> None:
        if self._closed_because:
            raise PeerRefused(RefusalCode.BUSY, self._closed_because)

    def _refusal(self, claim: KvClaim, why: str) -> PeerRefused:
        reason = f"{claim.positions} positions asked for, {self._worker.kv_tokens_free} free: {why}"
        retry_after_s = self._queue.retry_after_s(claim, trio.current_time())
        return PeerRefused(RefusalCode.NO_ROOM, reason, retry_after_s=retry_after_s)
