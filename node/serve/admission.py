"""Gives sessions KV in the order of `core/serving/admission_queue.py`, and refuses those that would wait too long.

Sessions that have to go for others, or find no KV to grow, are told so, and end.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.operations import Close, Open, Resize
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.errors import PeerRefused, WorkerLost
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.policy import AdmissionPolicy
    from llmnode.core.serving.kv_shares import KvClaim
    from llmnode.ports import Worker

    Evict = Callable[[PeerRefused], None]
    """Ends a session, and says why. It returns at once."""

log = logging.getLogger(__name__)

MOVED = "others need the KV of this session: go on elsewhere, or here, by a replay"
FULL = "others than sessions have the KV that this session needs: go on elsewhere, or here, by a replay"


@dataclass(slots=True, eq=False)
class _Waiting:
    claim: KvClaim
    grows: bool = False
    """It has come in."""
    has_kv: bool = False
    makes_way: bool = False
    is_over: bool = False
    _called: trio.Event = field(default_factory=trio.Event)

    def end(self, *, has_kv: bool = False, makes_way: bool = False) -> None:
        self.has_kv, self.makes_way, self.is_over = has_kv, makes_way, True
        self._called.set()

    def call(self) -> None:
        """Have it see whether it is to look for all."""
        self._called.set()

    async def wait(self) -> None:
        """Until it is over, or called."""
        await self._called.wait()
        if not self.is_over:
            self._called = trio.Event()


class Admission:
    """To all KV that `worker` has. Nobody else is to open sessions there."""

    def __init__(self, worker: Worker, policy: AdmissionPolicy) -> None:
        self._worker = worker
        self._policy = policy
        self._queue = AdmissionQueue(worker.kv_tokens, policy, worker.kv_page)
        self._waiting: dict[SessionId, _Waiting] = {}
        self._evict: dict[SessionId, tuple[KvClaim, Evict]] = {}
        self._looker: _Waiting | None = None
        """The one that looks for all that wait."""
        self._looked_s = -inf
        self._closed_because = ""

    async def enter(self, opening: Open, claim: KvClaim, evict: Evict) -> None:
        """Do `opening`, when it is the session's turn. Raises PeerRefused. `leave` is due in any case.

        There is KV for the first positions then. From then on, `evict` may be called once, if the session has to go for
        others.
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
        first = min(self._queue.held(session), opening.max_length)
        try:
            is_open = await self._worker.do(replace(opening, positions=first))
        except WorkerLost as error:
            raise PeerRefused(RefusalCode.BUSY, str(error)) from error
        if not is_open:
            raise self._refusal(claim, "taken by others than sessions")

    @property
    def free(self) -> int:
        """The free positions, without those that newcomers leave for sessions that grow."""
        return max(0, self._worker.kv_tokens_free - self._queue.kept)

    def held(self, session: SessionId) -> int:
        """The positions that a session has KV for."""
        return self._queue.held(session)

    async def reserve(self, session: SessionId, positions: int, *, copies: bool = False) -> None:
        """See to it that a session that has come in has KV for `positions`, for a step, or for all of a copy if it
        `copies` another session. Others may have to go for more than it has.

        If it has to go itself, its `evict` is called, and has to cancel this. Raises WorkerLost.
        """
        if copies:
            self._queue.copy(session, positions)
        if positions <= self._queue.held(session):
            return
        if session not in self._evict:  # it was told to go
            await trio.sleep_forever()
        claim, evict = self._evict[session]
        waiting = self._waiting[session] = _Waiting(claim, grows=True)
        self._queue.grow(session, positions)
        try:
            self._admit()
            if not waiting.is_over:
                now_s = trio.current_time()
                self._move(self._queue.choose_leaving(session, now_s), now_s)
            await waiting.wait()  # no longer than it takes those that go
        finally:
            del self._waiting[session]
            if not waiting.has_kv:
                self._queue.give_up(session)
        try:
            has_memory = await self._worker.do(Resize(session, min(self._queue.held(session), claim.positions)))
        except (RuntimeError, MemoryError):  # torch's out-of-memory
            log.exception("no memory for the KV of a session")
            has_memory = False
        if not has_memory:
            self._queue.end(session, is_moved=True)
            if self._evict.pop(session, None) is not None:
                retry_after_s = self._retry_after_s(claim, positions)
                evict(PeerRefused(RefusalCode.UNKNOWN_SESSION, FULL, retry_after_s=retry_after_s))
            await trio.sleep_forever()

    def use(self, session: SessionId, *, ends: bool = False) -> None:
        """A step of the session begins, or a step or replay ends. Other frames do not count."""
        self._queue.use(session, trio.current_time() if ends else -inf, ends=ends)

    async def leave(self, session: SessionId) -> None:
        """Free its KV, if it has any, and let others in."""
        self._evict.pop(session, None)
        self._queue.end(session)
        try:
            await self._worker.do(Close(session))
        finally:
            self._forget(session)

    def close(self, reason: str) -> None:
        """Let nobody in any more, nor wait. They are told the reason."""
        self._closed_because = reason
        for waiting in self._waiting.values():
            if not waiting.grows:
                waiting.end()

    async def _wait(self, waiting: _Waiting) -> None:
        """One of those that wait looks again and again. Strangers can have a hundred wait, which all cost time."""
        self._admit()
        if not waiting.is_over:
            self._look()
        try:
            while not waiting.is_over:
                self._looker = self._looker or waiting
                if self._looker is not waiting:
                    await waiting.wait()
                    continue
                with trio.move_on_after(self._policy.look_every_s):
                    await waiting.wait()
                if not waiting.is_over:
                    self._look()
        finally:
            if self._looker is waiting:
                self._looker = None
            if self._looker is None:  # the next one may have ended at the same time: then it calls another
                others = (each for each in self._waiting.values() if not each.grows and not each.is_over)
                if (other := next((each for each in others if each is not waiting), None)) is not None:
                    other.call()

    def _look(self) -> None:
        """Have sessions go for those that wait, unless somebody has just looked."""
        now_s = trio.current_time()
        if now_s < self._looked_s + self._policy.look_every_s / 2:
            return
        self._looked_s = now_s
        self._move(self._queue.choose_moves(now_s), now_s)

    def _move(self, sessions: Sequence[SessionId], now_s: float) -> None:
        if not sessions:
            return
        # Working it out takes long with thousands of sessions, so the time of the largest is that of all.
        moved = [self._evict.pop(session) for session in sessions]
        largest = max(sessions, key=self._queue.held)
        retry_after_s = self._retry_after_s(moved[sessions.index(largest)][0], self._queue.held(largest))
        for _, evict in moved:
            evict(PeerRefused(RefusalCode.UNKNOWN_SESSION, MOVED, retry_after_s=retry_after_s))

    def _retry_after_s(self, claim: KvClaim, positions: int) -> float:
        """When a session with this number of positions may come back.

        No forecast is spent on it: newcomers need them, and a holder above its share could move nobody.
        """
        return self._queue.retry_after_s(replace(claim, at_once=positions), trio.current_time(), forecasts=False)

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
        reason = f"{self._queue.first(claim)} positions asked for, {self._worker.kv_tokens_free} free: {why}"
        retry_after_s = self._queue.retry_after_s(claim, trio.current_time())
        return PeerRefused(RefusalCode.NO_ROOM, reason, retry_after_s=retry_after_s)
