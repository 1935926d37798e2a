"""The pushes that other servers make to sessions here: each was granted before, and memory is reserved for it.

The client of a session names the peer that may push to it (NEIGHBOURS). That peer says that it would (WANT), and is
told how much it may, for this epoch (GRANT). It is told again when that changes. So a push waits for nothing, and takes
no memory from the client. A peer that is older than these frames pushes unasked: then memory is taken when a push
arrives, and a push for which there is none is dropped.
"""

from __future__ import annotations

from collections import Counter, deque
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.links.push_grants import PushGrant
from llmnode.errors import PeerError
from llmnode.node.serve.freed_memory import freed
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import pack
from llmnode.wire.push_messages import PUSHED_BYTES, PushLimit

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection

    from llmnode.core.budget import Budget, Scope
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ServePolicy
    from llmnode.ports import Link

MOST_ASKED = 1024
"""The sessions for which one link may have asked. The oldest ones are forgotten."""
ASKED_BYTES = 320
"""A session that was asked for takes this much memory."""
TRIED_IN_VAIN = 64
"""When memory is given back, it is tried for this number of sessions for which there is too little, of all links. Each
takes 9 µs, and strangers may have thousands."""


class PushDesk:
    """All sessions of a server share it: the links over which others ask, and the pushes that may still come late."""

    def __init__(self, budget: Budget, policy: ServePolicy) -> None:
        self.budget = budget
        self.policy = policy
        self.links_short = 0
        """The links with sessions for which there is not enough memory."""
        self._links: dict[PeerId, list[LinkGrants]] = {}
        self._late_bytes: Counter[PeerId] = Counter()

    def add(self, grants: LinkGrants) -> None:
        self._links.setdefault(grants.link.peer, []).append(grants)

    def remove(self, grants: LinkGrants) -> None:
        links = self._links[grants.link.peer]
        links.remove(grants)
        if not links:
            del self._links[grants.link.peer]
            self._late_bytes.pop(grants.link.peer, None)

    def asked(self, peer: PeerId, session: SessionId) -> LinkGrants | None:
        """The last link over which this peer has asked for this session."""
        return next((each for each in reversed(self._links.get(peer, [])) if session in each.asked), None)

    def expect_late(self, peer: PeerId, size_bytes: int) -> None:
        """It may have sent this much before it hears that its right is over."""
        if peer in self._links:
            most_bytes = self.policy.late_push_bytes
            self._late_bytes[peer] = min(self._late_bytes[peer] + size_bytes, most_bytes)

    def is_late(self, peer: PeerId, size_bytes: int) -> bool:
        """Whether a push that nobody expects was granted when it was sent, as far as can be known. Then it counts."""
        if self._late_bytes[peer] < size_bytes:
            return False
        self._late_bytes[peer] -= size_bytes
        return True


class LinkGrants:
    """The peer of one link, which may push to sessions here. Tasks in `nursery` tell it what it is granted."""

    def __init__(
        self, link: Link, desk: PushDesk, nursery: trio.Nursery, on_bug: Callable[[PeerId, Exception], None]
    ) -> None:
        """`on_bug` is that of the server."""
        self.link = link
        self.desk = desk
        self.asked: dict[SessionId, tuple[Step, Epoch, int]] = {}
        """The last WANT for each session: its number, its epoch, and the limit that it asks for."""
        self.has_asked = False
        """Whether it has sent any WANT: a peer that is older than those cannot know what is granted."""
        self.inlets: dict[PushInlet, None] = {}
        self._short: dict[PushInlet, None] = {}  # those for which there is not enough memory now
        self._untold: dict[SessionId, Frame] = {}
        self._nursery = nursery
        self._on_bug = on_bug
        self._tasks: dict[Callable[[], Awaitable[None]], trio.CancelScope] = {}
        self._memory = Account(link.scope, Resource.MEMORY)
        desk.add(self)

    def note(self, frame: Frame, limit_bytes: int) -> None:
        """The peer would push to a session. Without memory for one more, an older one is forgotten."""
        self.has_asked = True
        self.asked.pop(frame.session, None)
        self.asked[frame.session] = frame.step, frame.epoch, limit_bytes
        size_bytes = len(self.asked) * ASKED_BYTES
        has_memory = size_bytes <= self._memory.amount or self._memory.resize(size_bytes)
        if len(self.asked) > MOST_ASKED or (not has_memory and len(self.asked) > 1):
            del self.asked[next(iter(self.asked))]

    def tell(self, session: SessionId, epoch: Epoch, number: Step, limit_bytes: int) -> None:
        """Tell the peer its limit, soon. A later limit for the same session replaces one that is not told yet."""
        self._untold[session] = Frame(FrameType.GRANT, session, epoch, number, meta=pack(PushLimit(limit_bytes)))
        self._start(self._tell_all)

    def look_after(self, inlet: PushInlet) -> None:
        """Have more granted when there is memory."""
        self._short[inlet] = None
        self._start(self._extend_short)

    def forget(self, inlet: PushInlet) -> None:
        self.inlets.pop(inlet, None)
        self._short.pop(inlet, None)

    def close(self) -> None:
        """The link has ended."""
        self.desk.remove(self)
        for inlet in list(self.inlets):
            inlet.leave(self)
        for scope in self._tasks.values():
            scope.cancel()

    def _start(self, task: Callable[[], Awaitable[None]]) -> None:
        if task not in self._tasks:
            self._tasks[task] = scope = trio.CancelScope()
            self._nursery.start_soon(self._run, task, scope)

    async def _run(self, task: Callable[[], Awaitable[None]], scope: trio.CancelScope) -> None:
        try:
            with scope, suppress(PeerError):  # the link's loop hears of its end too
                await task()
        except Exception as error:  # noqa: BLE001  it costs this peer its grants, and nobody else anything
            self._on_bug(self.link.peer, error)
        finally:
            del self._tasks[task]

    async def _tell_all(self) -> None:
        while self._untold:
            await self.link.send(self._untold.pop(next(iter(self._untold))))

    async def _extend_short(self) -> None:
        """Those for which there is too little memory come again after the others."""
        self.desk.links_short += 1
        try:
            while self._short:
                await freed(self.link.scope)
                untried, in_vain = len(self._short), TRIED_IN_VAIN // self.desk.links_short
                while self._short and untried > 0 and in_vain >= 0:
                    del self._short[inlet := next(iter(self._short))]
                    inlet.extend()
                    untried, in_vain = untried - 1, in_vain - (inlet in self._short)
        finally:
            self.desk.links_short -= 1


class PushInlet:
    """The pushes to one session. At first nobody may make any."""

    def __init__(self, session: SessionId, epoch: Epoch, max_length: int, row_bytes: int, desk: PushDesk) -> None:
        self.sender: PeerId | None = None
        """The peer that the client has named."""
        self._session = session
        self._epoch = epoch
        self._desk = desk
        policy = desk.policy
        # Each position may be pushed, and be pushed again out of a log.
        self._most_bytes = policy.pushed_times * max_length * (row_bytes + PUSHED_BYTES)
        self._window_bytes = max(policy.push_window_bytes, 2 * (row_bytes + PUSHED_BYTES))
        self._spent_bytes = 0  # in this epoch, before the sender began anew
        self._grant = self._new_grant()
        self._way: LinkGrants | None = None  # over which the sender has asked
        self._number = Step(0)
        self._queued: deque[Frame] = deque()
        self._held: list[Frame] = []  # the stage holds them until it is their turn
        self._at: LinkGrants | None = None  # where the memory counts
        self._scope: Scope | None = None
        self._reserved_bytes = 0

    @property
    def link(self) -> Link | None:
        """The link that the pushes come over; None if it has ended, or there were none."""
        return None if self._at is None else self._at.link

    def has_pushed(self, frame: Frame) -> bool:
        """Whether the sender has pushed this frame, which the session is not done with yet."""
        return any(each is frame for each in (*self._queued, *self._held))

    @property
    def held_bytes(self) -> int:
        """The size of pushed steps that wait for their turn."""
        return sum(each.size_bytes for each in self._held) if self._held else 0

    def expect(self, sender: PeerId | None) -> None:
        """The client lets this peer push from now on, and no other one."""
        if sender == self.sender:
            return
        if self._way is not None:
            self._way.tell(self._session, self._epoch, self._number, 0)
        self._end_right()
        self._way, self.sender = None, sender
        if sender is not None and (way := self._desk.asked(sender, self._session)) is not None:
            self.hear(way)

    def hear(self, way: LinkGrants) -> None:
        """A peer has asked over this link."""
        if way.link.peer != self.sender:
            return  # the client may name it later
        number, epoch, wanted_bytes = way.asked[self._session]
        begins = self._way is None or number != self._number
        if begins:
            self._end_right()
        self._way, self._number = way, number
        if way is not self._at:
            self._count_at(way)
        if epoch == self._epoch:
            self._grant.wanted_bytes = wanted_bytes
        self._extend(self._first_bytes if begins else self._window_bytes)
        self._tell()

    def follow(self, epoch: Epoch) -> None:
        """The client has begun an epoch. The sender keeps its right."""
        if epoch == self._epoch:
            return
        self._end_right()
        self._epoch, self._spent_bytes = epoch, 0
        self._grant = self._new_grant()
        if self._way is not None:
            self._extend(self._first_bytes)
            self._tell()

    def extend(self) -> None:
        """Grant more, if the sender is short of it and there is memory. Tell it."""
        if self._way is not None and self._grant.is_short and self._extend(self._window_bytes):
            self._tell()

    def take(self, frame: Frame, epoch: Epoch, way: LinkGrants) -> bool:
        """Hold a step of the sender until `settle`. False if it was not granted: then it is not to be used."""
        self.follow(epoch)
        if frame.epoch != epoch:
            return False
        size_bytes = frame.size_bytes
        if self._way is None:
            if self._grant.received_bytes + size_bytes > self._grant.most_bytes:
                return False
            if self._at is not way:
                self._count_at(way)
            if not self._reserve(size_bytes):
                return False
            self._grant.limit_bytes += size_bytes
        if not self._grant.take(size_bytes):
            return False
        self._queued.append(frame)
        return True

    @property
    def is_full(self) -> bool:
        """Whether the sender has more steps here than it may."""
        return len(self._queued) + len(self._held) > self._desk.policy.pushed_ahead

    def drop(self) -> None:
        """The step that was taken last is not used."""
        self._queued.pop()
        self._settle_memory()
        self.extend()

    def settle(self, frame: Frame, held: Collection[Frame]) -> bool:
        """The session is done with `frame`, pushed or not, or holds it: `held` are all that it holds.

        Returns whether it was a push.
        """
        was_pushed = bool(self._queued) and self._queued[0] is frame
        if was_pushed:
            self._held.append(self._queued.popleft())
        if self._held:
            # A step that is pushed twice is held once.
            self._held = [each for each in held if any(each is mine for mine in self._held)]
            self._settle_memory()
            self.extend()
        return was_pushed

    def leave(self, way: LinkGrants) -> None:
        """That link has ended. Steps that came over it count for its peer, which has perhaps no connection."""
        way.forget(self)
        if self._way is way:
            self._end_right()
            self._way = None
        if self._at is way:
            waiting_bytes = self._waiting_bytes
            self._at, self._reserved_bytes = None, 0
            self._scope = self._desk.budget.of_peer(way.link.scope).open(Kind.SESSION, "pushes")
            self._reserve(waiting_bytes)

    def close(self) -> None:
        """The session has ended."""
        self._queued.clear()
        self._held.clear()
        if self._way is not None:
            self._desk.expect_late(self._way.link.peer, self._grant.left_bytes)
            self._way.asked.pop(self._session, None)
            self._way.forget(self)
        if self._at is not None:
            self._at.forget(self)
        self._way = self._at = self.sender = None
        if self._scope is not None:
            self._scope.close()

    # Inside

    def _new_grant(self) -> PushGrant:
        return PushGrant(self._most_bytes - self._spent_bytes, self._window_bytes)

    @property
    def _first_bytes(self) -> int:
        """The size of the grant at the beginning of an epoch. It is smaller where other sessions need memory."""
        policy = self._desk.policy
        is_crowded = self._scope is not None and self._scope.is_taken(Resource.PUSHES, policy.push_first_share)
        return max(policy.push_first_crowded_bytes if is_crowded else policy.push_first_bytes, self._window_bytes)

    @property
    def _waiting_bytes(self) -> int:
        return sum(each.size_bytes for each in (*self._queued, *self._held))

    def _end_right(self) -> None:
        """The rest of the grant may be under way."""
        if self._way is not None:
            self._desk.expect_late(self._way.link.peer, self._grant.left_bytes)
        self._spent_bytes += self._grant.received_bytes
        self._grant = self._new_grant()
        self._settle_memory()

    def _extend(self, window_bytes: int) -> bool:
        assert self._way is not None
        has_risen = self._grant.extend(window_bytes, self._reserve)
        if self._grant.is_short:
            self._way.look_after(self)
        return has_risen

    def _tell(self) -> None:
        assert self._way is not None
        self._way.tell(self._session, self._epoch, self._number, self._grant.limit_bytes)

    # Memory

    def _count_at(self, way: LinkGrants) -> None:
        """All that is held and granted counts for that link from now on."""
        former, self._scope = self._scope, way.link.scope.open(Kind.SESSION, "pushes")
        if self._at is not None:
            self._at.forget(self)
        if former is not None:
            former.close()
        self._at = way
        way.inlets[self] = None
        amount, self._reserved_bytes = self._reserved_bytes, 0
        if not self._reserve(amount):
            left_bytes = self._grant.left_bytes
            self._desk.expect_late(way.link.peer, left_bytes)
            self._grant.limit_bytes -= left_bytes
            self._reserve(self._waiting_bytes)

    def _reserve(self, more_bytes: int) -> bool:
        wanted = {Resource.PUSHES: more_bytes, Resource.MEMORY: more_bytes}
        if self._scope is None or not self._scope.reserve_all(wanted):
            return False
        self._reserved_bytes += more_bytes
        return True

    def _settle_memory(self) -> None:
        """Hold no more than what waits and what is granted."""
        spare_bytes = self._reserved_bytes - self._waiting_bytes - self._grant.left_bytes
        if spare_bytes > 0 and self._scope is not None:
            for resource in (Resource.PUSHES, Resource.MEMORY):
                self._scope.release(resource, spare_bytes)
            self._reserved_bytes -= spare_bytes
