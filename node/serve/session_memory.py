"""The memory of one session at a server, within the budget of its client: steps that wait, work, and logged results.

A session may outlive its link. Then its memory counts for its client, which has no connection.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource
from llmnode.errors import PeerRefused
from llmnode.node.serve.freed_memory import freed
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.budget import Scope
    from llmnode.core.policy import ServePolicy
    from llmnode.node.serve.work_turns import WorkTurns

A_STEP = "a step takes", "send fewer positions at once"
RETRY_S = 1.0
MOST_TIMES_WAITING = 4
"""A step may be given and pushed, and be given again: all positions of a session may wait this many times."""
OTHER_FRAMES_BYTES = 1 << 18
"""The size of frames without positions that may wait."""


class SessionMemory:
    """In a scope of its own within the one `around`. It waits for memory as `ServePolicy.memory_patience_s` says.

    Its methods raise PeerRefused if there is no memory. If there is some at once, no other task runs meanwhile.
    """

    def __init__(self, around: Scope, rows_bytes: int, policy: ServePolicy, turns: WorkTurns) -> None:
        """`rows_bytes` is the size of all the positions that the session may have."""
        self._turns = turns
        self._policy = policy
        self._most_waiting_bytes = MOST_TIMES_WAITING * rows_bytes + OTHER_FRAMES_BYTES
        self._scope = around.open(Kind.SESSION, "a session")
        self._waiting = Account(self._scope, Resource.MEMORY)
        self._queued_bytes = 0
        self._work = Account(self._scope, Resource.WORK)
        self._log = Account(self._scope, Resource.LOGS)
        self._prompts = Account(self._scope, Resource.MEMORY)
        self._session = Account(self._scope, Resource.MEMORY)
        self._has_ended = False

    def hold_session(self) -> None:
        """Hold the memory of a session without frames, for as long as it lives."""
        if not self._session.resize(self._policy.session_bytes):
            raise _no_memory()

    async def queue(self, size_bytes: int) -> None:
        """Hold a frame that waits, or an answer."""
        if self._waiting.amount + size_bytes > self._most_waiting_bytes:
            raise PeerRefused(RefusalCode.TOO_FAR_AHEAD, "too many steps are waiting")
        await self._grow(self._waiting, size_bytes)
        self._queued_bytes += size_bytes

    def drop(self, size_bytes: int) -> None:
        """A frame that was queued last is not kept."""
        self._queued_bytes -= size_bytes
        self._waiting.resize(self._waiting.amount - size_bytes)

    def settle(self, size_bytes: int, held_bytes: int, logged_bytes: int) -> None:
        """A frame of `size_bytes` that was queued is done with. The session holds no more than before then."""
        self._queued_bytes -= size_bytes
        for account, amount in ((self._waiting, self._queued_bytes + held_bytes), (self._log, logged_bytes)):
            if amount < account.amount:
                account.resize(amount)

    async def begin_work(self, size_bytes: int) -> None:
        """Hold the hidden states of the step that is to be computed, when it is its turn."""
        if self._turns.take_now(self._work, size_bytes):
            return
        self._check_could_hold(Resource.WORK, size_bytes, *A_STEP)
        policy = self._policy
        if not await self._turns.take(self._work, size_bytes, policy.memory_patience_s, policy.longest_work_wait_s):
            raise _no_memory()

    def end_work(self) -> None:
        self._turns.give_back(self._work)

    @property
    def holds_prompts(self) -> bool:
        """Nobody could evict them while the session is without a link."""
        return self._prompts.amount > 0

    def hold_prompts(self, size_bytes: int) -> None:
        """Hold deep prompts for as long as the session lives."""
        if not self._prompts.resize(size_bytes):
            self._check_could_hold(Resource.MEMORY, size_bytes, "these deep prompts take", "use fewer")
            raise _no_memory()

    def log(self, size_bytes: int) -> None:
        """Hold results of this size, in all."""
        if not self._log.resize(size_bytes):
            raise _no_memory()

    def move(self, around: Scope) -> None:
        """Count within another scope from now on. If that fails, nothing counts any more: the session is to end.

        Its client may resume it at a moment when it has ended, and its KV is still being freed.
        """
        if self._has_ended:
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "this session has ended")
        former, self._scope = self._scope, around.open(Kind.SESSION, "a session")
        accounts = self._waiting, self._work, self._log, self._prompts, self._session
        moved = [each.move(self._scope) for each in accounts]
        former.close()
        self._turns.pass_on()
        if not all(moved):
            raise _no_memory()

    def close(self) -> None:
        self._has_ended = True
        self._scope.close()
        self._turns.pass_on()

    async def _grow(self, account: Account, more_bytes: int) -> None:
        if account.resize(account.amount + more_bytes):
            return
        self._check_could_hold(account.resource, more_bytes, *A_STEP)
        with trio.move_on_after(self._policy.memory_patience_s):
            while not self._scope.is_closed:
                await freed(self._scope)
                if account.resize(account.amount + more_bytes):
                    return
        raise _no_memory()

    def _check_could_hold(self, resource: Resource, size_bytes: int, what: str, advice: str) -> None:
        if not self._scope.could_hold(resource, size_bytes):
            why = f"{what} {size_bytes >> 20} MiB here, more than there is for one: {advice}"
            raise PeerRefused(RefusalCode.NO_ROOM, why)


def _no_memory() -> PeerRefused:
    return PeerRefused(RefusalCode.BUSY, "no memory is left for this session now", retry_after_s=RETRY_S)
