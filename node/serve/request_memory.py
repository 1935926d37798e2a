"""The memory of requests that a server answers in tasks of their own (`Resource.PASSES`): passes, parts of adapters.

A request holds its frame from its arrival on, and the memory for its work from its turn on. So the next pass is here
when the one before it ends, where there is memory to compute only one. The frames here always leave enough memory for
the work of any one of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource
from llmnode.errors import PeerRefused
from llmnode.node.serve.work_turns import WorkTurns
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from llmnode.core.budget import Scope

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

    async def begin_work(self) -> None:
        """Wait for the memory to do what is asked for. Raises PeerRefused if the link ends meanwhile."""
        turns = self._memory.turns
        if not turns.take_now(self._work, self.work_bytes) and not await turns.take(
            self._work, self.work_bytes, inf, inf
        ):
            raise _no_memory(self.what)

    def end(self) -> None:
        """The request was answered, or nobody waits for it."""
        self._memory.remove(self)


class RequestMemory:
    """That of all requests at one server. Turns for work are fair, as those of steps are."""

    def __init__(self) -> None:
        self.turns = WorkTurns()
        self._here: dict[HeldRequest, None] = {}

    def hold(self, around: Scope, frame_bytes: int, work_bytes: int, what: str) -> HeldRequest:
        """Hold the frame of a request, which is a `what`, within the scope of its link. Raises PeerRefused."""
        most_work = max((each.work_bytes for each in self._here), default=0)
        frames = frame_bytes + sum(each.frame_bytes for each in self._here)
        scope = around.open(Kind.SESSION, what)
        if not scope.could_hold(Resource.PASSES, size_bytes := frame_bytes + work_bytes):
            scope.close()
            why = f"a {what} takes {size_bytes >> 20} MiB here, more than there is for one: send less at once"
            raise PeerRefused(RefusalCode.NO_ROOM, why)
        enough = scope.could_hold(Resource.PASSES, frames + max(most_work, work_bytes))
        if not enough or not Account(scope, Resource.PASSES).resize(frame_bytes):
            scope.close()
            raise _no_memory(what)
        held = HeldRequest(scope, frame_bytes, work_bytes, what, self)
        self._here[held] = None
        return held

    def remove(self, held: HeldRequest) -> None:
        del self._here[held]
        held.scope.close()
        self.turns.pass_on()


def _no_memory(what: str) -> PeerRefused:
    return PeerRefused(RefusalCode.BUSY, f"no memory is left for this {what} now", retry_after_s=RETRY_S)
