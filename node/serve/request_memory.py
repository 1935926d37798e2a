"""The memory of requests that a server answers in tasks of their own (`Resource.PASSES`): passes, parts of adapters.

A request holds its frame from its arrival on, and the memory for its work from its turn on. So the next pass is here
when the one before it ends, where there is memory to compute only one. The frames here always leave enough memory for
the work of each alone. Those of one address group take a half of the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource
from llmnode.errors import PeerRefused
from llmnode.node.serve.work_turns import WorkTurns
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.budget import Scope
    from llmnode.core.policy import ServePolicy

RETRY_S = 0.5


@dataclass(slots=True, eq=False)
class HeldRequest:
    """The memory of one request, in a `scope` of its own."""

    scope: Scope
    frame_bytes: int
    work_bytes: int
    what: str
    _memory: RequestMemory
    _work: Account = field(init=False)

    def __post_init__(self) -> None:
        self._work = Account(self.scope, Resource.PASSES)

    @property
    def group(self) -> str | None:
        """The address group that has sent it."""
        group = self.scope.of_kind(Kind.GROUP)
        return None if group is None else group.name

    async def begin_work(self) -> None:
        """Wait for the memory to do what is asked for. A request that takes none waits for nobody.

        Raises PeerRefused if no other work has ended for too long: another server may have memory.
        """
        memory, policy = self._memory, self._memory.policy
        if not self.work_bytes or memory.turns.take_now(self._work, self.work_bytes):
            return
        most_s = policy.memory_patience_s, policy.longest_work_wait_s
        if not await memory.turns.take(self._work, self.work_bytes, *most_s):
            raise _no_memory(self.what)

    def end(self) -> None:
        """The request was answered, or nobody waits for it."""
        self._memory.remove(self)


class RequestMemory:
    """That of all requests at one server. Turns for work are fair, as those of steps are."""

    def __init__(self, policy: ServePolicy) -> None:
        self.policy = policy
        self.turns = WorkTurns()
        self._here: dict[HeldRequest, None] = {}

    def hold(self, around: Scope, frame_bytes: int, work_bytes: int, what: str) -> HeldRequest:
        """Hold the frame of a request, which is a `what`, within the scope of its link. Raises PeerRefused."""
        scope = around.open(Kind.SESSION, what)
        held = HeldRequest(scope, frame_bytes, work_bytes, what, self)
        try:
            if not scope.could_hold(Resource.PASSES, size_bytes := frame_bytes + work_bytes):
                why = f"a {what} takes {size_bytes >> 20} MiB here, more than there is for one: send less at once"
                raise PeerRefused(RefusalCode.NO_ROOM, why)
            if not self._leaves_enough(held) or not Account(scope, Resource.PASSES).resize(frame_bytes):
                raise _no_memory(what)
        except PeerRefused:
            scope.close()
            raise
        self._here[held] = None
        return held

    def remove(self, held: HeldRequest) -> None:
        """Its memory is that of others now."""
        del self._here[held]
        if not held.scope.is_closed:
            self.turns.give_back(held._work)
            held.scope.close()
        self.turns.pass_on()

    def _leaves_enough(self, held: HeldRequest) -> bool:
        """Whether there is memory for the work of any request here beside all frames, and beside twice those of the
        group, if others of its requests are here. A request that takes no memory for work ends at once: it keeps nobody
        waiting.
        """
        most_work = max(each.work_bytes for each in (*self._here, held))
        frames = sum(each.frame_bytes for each in self._here)
        own = sum(each.frame_bytes for each in self._here if each.work_bytes and each.group == held.group)
        wanted = [frames + held.frame_bytes, 2 * (own + held.frame_bytes) if own and held.work_bytes else 0]
        return all(held.scope.could_hold(Resource.PASSES, each + most_work) for each in wanted)


def _no_memory(what: str) -> PeerRefused:
    return PeerRefused(RefusalCode.BUSY, f"no memory is left for this {what} now", retry_after_s=RETRY_S)
