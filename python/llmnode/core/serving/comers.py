"""A server knows the clients that are about to come, and the sessions that its load average does not show yet.

Clients that ask for the load before they open a session are told. Knows no clock: the time is told.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from llmnode.core.serving.load_average import HALF_LIFE_S

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId, SessionId

ASKING_S = 2.0
"""A client that has asked opens its session within this time, or goes elsewhere."""
ASKING_OF_GROUP = 16
"""Clients of one address group that count at a time: a stranger can ask under any number of names."""
FRESH_OF_GROUP = 16
MOST_ASKING = 256
FRESH_S = 6 * HALF_LIFE_S
"""The load average shows all but a 64th of a session that is older."""
KEPT_OF_GROUP = 32
"""The latest sessions of a group say how many it has that are fresh, without those of one client too."""
MOST_GROUPS = 64


class Comers:
    """Those of one server."""

    def __init__(self) -> None:
        self._asking: dict[PeerId, tuple[str, float]] = {}
        self._fresh: dict[str, dict[SessionId, tuple[PeerId, float]]] = {}
        """The sessions of each address group, and when they were opened, the oldest first."""

    def note_asking(self, peer: PeerId, group: str, now_s: float, *, opens: bool) -> None:
        """A client of this address group asks. If it `opens` a session next, it is expected, else no more."""
        self._asking = {each: known for each, known in self._asking.items() if now_s < known[1] + ASKING_S}
        self._asking.pop(peer, None)
        groups = Counter(group for group, _ in self._asking.values())
        if opens and groups[group] < ASKING_OF_GROUP and len(self._asking) < MOST_ASKING:
            self._asking[peer] = group, now_s

    def note_opened(self, peer: PeerId, group: str, session: SessionId, now_s: float) -> None:
        """It has opened one."""
        self._asking.pop(peer, None)
        of_group = self._fresh.pop(group, {})
        if len(of_group) == KEPT_OF_GROUP:
            del of_group[next(iter(of_group))]
        if len(self._fresh) == MOST_GROUPS:
            del self._fresh[next(iter(self._fresh))]
        of_group[session] = peer, now_s
        self._fresh[group] = of_group

    def note_ended(self, group: str, session: SessionId) -> None:
        """It has ended."""
        of_group = self._fresh.get(group, {})
        of_group.pop(session, None)
        if not of_group:
            self._fresh.pop(group, None)

    def asking(self, beside: PeerId, now_s: float) -> int:
        """The number of clients that are about to come, beside this one."""
        return sum(now_s < at_s + ASKING_S for peer, (_, at_s) in self._asking.items() if peer != beside)

    def fresh(self, beside: PeerId, now_s: float) -> float:
        """The part of the sessions that the load average does not show yet, without those of one client.

        An address group counts as `FRESH_OF_GROUP` at most: a session costs a stranger nothing that computes nothing.
        """
        part = 0.0
        for group, of_group in list(self._fresh.items()):
            for session, (_, at_s) in list(of_group.items()):
                if now_s < at_s + FRESH_S:
                    break
                self.note_ended(group, session)
            counted = (0.5 ** ((now_s - at_s) / HALF_LIFE_S) for peer, at_s in of_group.values() if peer != beside)
            part += min(FRESH_OF_GROUP, sum(counted))
        return part
