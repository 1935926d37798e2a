"""A server knows the clients that are about to come, and the sessions that its load average does not show yet.

Clients that ask for the load before they open a session are told. Knows no clock: the time is told.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from llmnode.core.serving.load_average import HALF_LIFE_S

if TYPE_CHECKING:
    from collections.abc import Container

    from llmnode.core.ids import PeerId, SessionId

ASKING_S = 2.0
"""A client that has asked opens its session within this time, or goes elsewhere."""
ASKING_OF_GROUP = 16
"""Clients of one address group that count at a time: a stranger can ask under any number of names."""
FRESH_OF_GROUP = 16
MOST_ASKING = 256
FRESH_S = 6 * HALF_LIFE_S
"""The load average shows all but a 64th of a session that is older."""
MOST_FRESH = 4096


class Comers:
    """Those of one server."""

    def __init__(self) -> None:
        self._asking: dict[PeerId, tuple[str, float]] = {}
        self._opened: dict[SessionId, tuple[PeerId, str, float]] = {}

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
        if len(self._opened) == MOST_FRESH:
            del self._opened[next(iter(self._opened))]
        self._opened[session] = peer, group, now_s

    def asking(self, beside: PeerId, now_s: float) -> int:
        """The number of clients that are about to come, beside this one."""
        return sum(now_s < at_s + ASKING_S for peer, (_, at_s) in self._asking.items() if peer != beside)

    def fresh(self, beside: PeerId, living: Container[SessionId], now_s: float) -> float:
        """The part of the `living` sessions that the load average does not show yet, without those of one client.

        An address group counts as `FRESH_OF_GROUP` at most: a session costs a stranger nothing that computes nothing.
        """
        self._opened = {
            session: known
            for session, known in self._opened.items()
            if session in living and now_s < known[2] + FRESH_S
        }
        of_group: defaultdict[str, float] = defaultdict(float)
        for peer, group, at_s in self._opened.values():
            if peer != beside:
                of_group[group] += 0.5 ** ((now_s - at_s) / HALF_LIFE_S)
        return float(sum(min(each, FRESH_OF_GROUP) for each in of_group.values()))
