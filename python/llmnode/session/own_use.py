"""A client knows what it has at its peers: sessions, those that are being opened, and its part of their load."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from llmnode.core.peers.own_load import OwnLoad
from llmnode.core.peers.standing import OwnUse

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route


class OwnUses:
    """Holds what one client has at each peer."""

    def __init__(self, announced_after_s: float) -> None:
        """A session that is in use is a part of the load that its server announces `announced_after_s` later."""
        self._announced_after_s = announced_after_s
        self._opening: Counter[PeerId] = Counter()
        self._load = OwnLoad()

    @contextmanager
    def opening(self, route: Route) -> Iterator[None]:
        """While a session is being opened at the peers of `route`, others that are opened beside it know of it."""
        peers = [hop.peer for hop in route]
        self._opening.update(peers)
        try:
            yield
        finally:
            self._opening.subtract(peers)
            self._opening = +self._opening

    def note_step(self, peer: PeerId, spent_s: float, now_s: float) -> None:
        """The peer has computed a step, which was there for `spent_s`."""
        self._load.note(peer, spent_s, now_s)

    def load_at(self, peer: PeerId, now_s: float) -> float:
        """The client's own steps at a time at the peer: the most that may be in the load that it says now."""
        return self._load.most_around(peer, now_s)

    def at_peers(
        self,
        announcements: Iterable[Announcement],
        began_s: Mapping[PeerId, Sequence[float]],
        age_s: Callable[[Announcement], float],
        now_s: float,
    ) -> dict[PeerId, OwnUse]:
        """`began_s` are the moments since when the client has sessions at peers. `age_s` tells how old a load is."""
        used = {*self._opening, *self._load.peers(), *began_s}
        return {
            each.peer: self._at(each.peer, began_s.get(each.peer, ()), now_s - age_s(each), now_s)
            for each in announcements
            if each.peer in used
        }

    def _at(self, peer: PeerId, began_s: Sequence[float], told_s: float, now_s: float) -> OwnUse:
        opening = self._opening[peer]
        lately = opening + sum(each > now_s - self._announced_after_s for each in began_s)
        return OwnUse(len(began_s) + opening, lately, self._load.at(peer, now_s), self._load.most_around(peer, told_s))
