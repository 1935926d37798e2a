"""The medium between the peers of an internet in memory: conditions, cuts, and the agenda of what is due when.

Knows peers by their ids, and neither networks nor links.
"""

from __future__ import annotations

import heapq
import math
import zlib
from itertools import count
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import NO_SESSION
from llmnode.testing.clock import Alarm
from llmnode.testing.uplink import Uplink
from llmnode.wire.frame import LINK_VERSIONS

if TYPE_CHECKING:
    import random
    from collections.abc import Callable

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import LinkPolicy
    from llmnode.testing.conditions import Conditions
    from llmnode.wire.frame import Frame


class Medium:
    """The medium that frames cross. One task, `run`, does what is on the agenda.

    `conditions` hold between all peers that have no others in `special`. `trace`, when set, is called with a line for
    every link, frame and fault.
    """

    def __init__(self, conditions: Conditions, policy: LinkPolicy, rng: random.Random) -> None:
        self.conditions = conditions
        self.policy = policy
        self.rng = rng
        self.trace: Callable[[str], None] | None = None
        self.special: dict[tuple[PeerId, PeerId], Conditions] = {}
        self.uplinks: dict[PeerId, Uplink] = {}
        """Peers whose links share an uplink. The others have one for each link."""
        self.cuts: set[tuple[PeerId, PeerId]] = set()
        """Sender and receiver: nothing that the one sends arrives at the other."""
        self.relayed: set[frozenset[PeerId]] = set()
        """Links between these two that are opened from now on say that they go through a relay."""
        self.relay_limit_bytes: int | None = None
        """Relays announce this limit for links opened from now on. They do not cut them."""
        self.old: set[PeerId] = set()
        """Peers that speak protocol 1 alone."""
        self._direct = trio.Event()  # two that were not
        self._agenda: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._alarm = Alarm()
        self._sessions: dict[SessionId, int] = {NO_SESSION: 0}

    def between(self, sender: PeerId, receiver: PeerId) -> Conditions:
        return self.special.get((sender, receiver), self.conditions) if self.special else self.conditions

    def set_uplink(self, peer: PeerId, bytes_per_s: float) -> None:
        """All links of the peer send this much together, from the next frame on."""
        self.uplinks[peer] = Uplink(bytes_per_s, self.call_at)

    def version_between(self, one: PeerId, other: PeerId) -> int:
        return LINK_VERSIONS[-1] if {one, other} & self.old else LINK_VERSIONS[0]

    def is_relayed(self, one: PeerId, other: PeerId) -> bool:
        return frozenset((one, other)) in self.relayed

    def note_direct(self, one: PeerId, other: PeerId) -> None:
        """Links between them that are opened from now on are direct."""
        self.relayed.discard(frozenset((one, other)))
        self._direct.set()
        self._direct = trio.Event()

    async def until_direct(self, one: PeerId, other: PeerId) -> None:
        await trio.lowlevel.checkpoint()
        while self.is_relayed(one, other):
            await self._direct.wait()

    def call_at(self, when_s: float, act: Callable[[], None]) -> None:
        if not self._agenda or when_s < self._agenda[0][0]:
            self._alarm.ring()
        heapq.heappush(self._agenda, (when_s, next(self._numbers), act))

    async def run(self) -> None:
        """Do what is on the agenda, each in its time, until cancelled."""
        while True:
            await self._alarm.wait_until(self._agenda[0][0] if self._agenda else math.inf)
            now_s = trio.current_time()
            while self._agenda and self._agenda[0][0] <= now_s:
                _, _, act = heapq.heappop(self._agenda)
                act()

    def note(self, line: str) -> None:
        if self.trace is not None:
            self.trace(f"{trio.current_time():.9f} {line}")

    def describe(self, frame: Frame) -> str:
        """For the trace. Sessions are numbered as they appear: their names are no part of a seed."""
        session = self._sessions.setdefault(frame.session, len(self._sessions))
        body = zlib.crc32(frame.payload)
        return f"{frame.type.name} {session}.{frame.epoch}.{frame.step} {frame.start}+{frame.length} {body:08x}"
