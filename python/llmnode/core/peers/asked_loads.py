"""The answers of servers that were asked for their load, just before a session opens there.

An announcement is up to 15 s old. Many clients that read it would all go to the server that looks best in it. So a
client asks the servers of its route, and believes the answer for a while. It is a claim: it can only make a server look
busier, or fuller, than its announcement does. Knows no clock: the time is told.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement, Offer
    from llmnode.core.ids import PeerId
    from llmnode.core.peers.standing import OwnUse

PEERS = 1024
"""The most answers. The oldest are forgotten first."""
MOST_BEFORE = 64
"""No more clients are believed to have asked a server before us."""


class LoadNow(NamedTuple):
    """A server's load at the moment, as it says to one client."""

    load: float
    """The steps that it computes, or has waiting, at a time, on average lately: as announced. Those of the asking
    client are among them."""
    fresh: float
    """The sessions of other clients, as far as the load does not show them yet: they have just opened."""
    asking: int
    """The other clients that have asked, since they are about to open a session, and have not opened it yet."""
    kv_tokens_free: int


class _Asked(NamedTuple):
    others: float
    """The steps of other clients, at a time."""
    coming: float
    """Their sessions that will add to it."""
    kv_tokens_free: int | None
    at_s: float


class AskedLoads:
    """The answers that one client has had lately."""

    def __init__(self, keeps_s: float, silent_s: float) -> None:
        """An answer counts for `keeps_s`. A server that does not answer is left alone for `silent_s`."""
        self._keeps_s = keeps_s
        self._silent_s = silent_s
        self._asked: dict[PeerId, _Asked] = {}
        self._silent: dict[PeerId, float] = {}

    def note(self, peer: PeerId, answer: LoadNow, own: float, now_s: float) -> None:
        """A server has answered. `own` are the steps of this client that are in its load."""
        self._silent.pop(peer, None)
        self._put(peer, _Asked(max(0.0, answer.load - own), answer.fresh, answer.kv_tokens_free, now_s))

    def note_coming(self, peer: PeerId, clients: int, now_s: float) -> None:
        """That number of other clients are about to open sessions at the server, as far as one can tell."""
        known = self._asked.get(peer) or _Asked(0.0, 0.0, None, now_s)
        self._put(peer, known._replace(coming=known.coming + clients))

    def note_silent(self, peer: PeerId, now_s: float) -> None:
        """The server does not answer: it is too old, busy, or does not want to. That is no fault."""
        self._silent.pop(peer, None)
        self._silent[peer] = now_s
        if len(self._silent) > PEERS:
            del self._silent[next(iter(self._silent))]

    def is_silent(self, peer: PeerId, now_s: float) -> bool:
        """Whether it did not answer lately."""
        return peer in self._silent and now_s < self._silent[peer] + self._silent_s

    def age_s(self, peer: PeerId, now_s: float) -> float | None:
        """How old its answer is; None if there is none that counts."""
        asked = self._asked.get(peer)
        return None if asked is None or now_s >= asked.at_s + self._keeps_s else now_s - asked.at_s

    def worse_of(
        self,
        announcements: Sequence[Announcement],
        own: Callable[[Sequence[Announcement]], Mapping[PeerId, OwnUse]],
        round_trips_s: Mapping[PeerId, float],
        now_s: float,
    ) -> list[Announcement]:
        """The same, with the loads and the free KV of the answers where these are worse.

        `own` tells what the client has at some of them itself.
        """
        counting = {peer for peer in self._asked if self.age_s(peer, now_s) is not None}
        self._asked = {peer: self._asked[peer] for peer in self._asked if peer in counting}
        if not counting:
            return list(announcements)
        uses = own([each for each in announcements if each.peer in counting])
        return [
            _worse(each, self._asked[each.peer], uses.get(each.peer), round_trips_s.get(each.peer))
            if each.peer in counting
            else each
            for each in announcements
        ]

    def _put(self, peer: PeerId, asked: _Asked) -> None:
        self._asked.pop(peer, None)
        self._asked[peer] = asked
        if len(self._asked) > PEERS:
            del self._asked[next(iter(self._asked))]


def share_there(offer: Offer, round_trip_s: float | None) -> float:
    """The share of the time in which a session's step is at a server, and not on its way."""
    alone_s = offer.block_us / 1e6 * len(offer.span)
    return alone_s / (alone_s + (round_trip_s or 0.0)) if alone_s else 1.0


def _worse(announced: Announcement, asked: _Asked, own: OwnUse | None, round_trip_s: float | None) -> Announcement:
    offer = announced.offer
    coming = share_there(offer, round_trip_s) * asked.coming
    load = asked.others + coming + (own.announced if own is not None else 0.0)
    free = offer.kv_tokens_free if asked.kv_tokens_free is None else min(offer.kv_tokens_free, asked.kv_tokens_free)
    if load <= (offer.load or 0.0) and free == offer.kv_tokens_free:
        return announced
    return replace(announced, offer=replace(offer, load=max(load, offer.load or 0.0), kv_tokens_free=free))


def expected(
    first: PeerId, before: int, others: Collection[PeerId], cost_s: Callable[[PeerId, int], float]
) -> Counter[PeerId]:
    """Where the clients go that have asked `first` before us: this number of them.

    Each takes the cheapest, as we do, beside those before it: `cost_s` is the cost at a server beside a number of
    them. So clients that ask at the same moment neither all stay nor all leave.
    """
    there: Counter[PeerId] = Counter()
    for _ in range(min(before, MOST_BEFORE)):
        there[min((first, *others), key=lambda peer: cost_s(peer, there[peer]))] += 1
    return there
