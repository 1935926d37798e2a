"""A view: the newest announcement of every peer that one node has heard of. It is told the time, and verifies nothing.

Merging is commutative and idempotent while the view is not full and nobody announces too often: nodes that exchange
what is newer end up with one view, in any order.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState
from llmnode.core.fair_shares import FairShares
from llmnode.core.rates import Rates
from llmnode.core.view_digests import entry_of, hash_of

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from llmnode.core.announcement import Announcement, Offer, SignedAnnouncement
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy
    from llmnode.core.view_digests import Entry, PeerHash


@dataclass(frozen=True, slots=True)
class Source:
    """The neighbour that told us of a peer, and the address group that it is in (`core/budget`)."""

    peer: PeerId
    group: str


@dataclass(slots=True)
class _Entry:
    signed: SignedAnnouncement
    entry: Entry
    expires_ms: int
    """By our clock and its word, whichever is earlier."""
    since_ms: int
    """When we heard of its state."""

    @property
    def announcement(self) -> Announcement:
        return self.signed.announcement


class View:
    """Holds `policy.view_peers` announcements at most. A stranger with many identities cannot take it over.

    Peers that we have met ourselves have a share of the places, however many others are named. When places are short, a
    peer goes that was named by the address group and neighbour that named most, and serves the model that most of them
    serve; of the peers that we have met, one of the address group that has most. Those that are `kept` never go. No
    claimed time decides: an announcement ends with its lifetime, counted from when it came.
    """

    def __init__(self, policy: SwarmPolicy, kept: Iterable[PeerId] = (), rng: random.Random | None = None) -> None:
        self._policy = policy
        self._kept = frozenset(kept)
        self._rng = rng or random.Random()
        self._newest: dict[PeerId, _Entry] = {}
        self._rates = Rates(policy.changes_at_once, 1 / policy.change_every_s)
        self._newcomers = Rates(policy.view_peers, policy.newcomers_per_s)
        """Peers that we did not know, and that an address group has told us of, unasked."""
        self._told = Rates(policy.view_peers, policy.newcomers_told_per_s)
        """Those that it has told us of when we asked."""
        self._heard: FairShares[PeerId] = FairShares()
        """Peers that others have named, by the address group of the neighbour, the neighbour, and the model."""
        self._met: FairShares[PeerId] = FairShares()
        """Peers that we have met, by their address groups."""
        self.met_in: dict[PeerId, str] = {}
        """The address group of each peer of the view that we have met, our contacts too."""

    def __len__(self) -> int:
        return len(self._newest)

    def __contains__(self, peer: PeerId) -> bool:
        return peer in self._newest

    def may_hear(self, peer: PeerId, source: Source, now_ms: int, *, is_asked: bool) -> bool:
        """Whether news of `peer` is worth a look. That of unknown peers counts: identities are free.

        A peer's own news over its own link does not count: a connection takes turns.
        """
        if peer in self._newest or peer == source.peer:
            return True
        return (self._told if is_asked else self._newcomers).take(source.group, now_ms / 1000)

    def is_newer(self, announcement: Announcement, now_ms: int) -> bool:
        """Whether it is worth verifying: it holds, is newer than what we have, and does not come too soon."""
        entry = self._newest.get(announcement.peer)
        is_newer = entry is None or announcement.sequence > entry.announcement.sequence
        is_too_soon = self._rates.wait_s(announcement.peer, now_ms / 1000) > 0
        return is_newer and not is_too_soon and self.holds(announcement, now_ms)

    def holds(self, announcement: Announcement, now_ms: int) -> bool:
        """Whether it is alive, and not from the future."""
        lifetime_ms = announcement.expires_ms - announcement.sequence
        ahead_ms = announcement.sequence - now_ms
        if announcement.expires_ms <= now_ms or lifetime_ms > self._policy.lifetime_s * 1000:
            return False
        return ahead_ms <= self._policy.clock_skew_s * 1000

    def accept(self, signed: SignedAnnouncement, now_ms: int, source: Source) -> bool:
        """Take a verified announcement if it is newer. True if it is news: an offer that we did not know.

        We have met a peer that announces itself over its own link.
        """
        announcement = signed.announcement
        if not self.is_newer(announcement, now_ms):
            return False
        before = self._newest.get(announcement.peer)
        offer, peer = announcement.offer, announcement.peer
        same_state = before is not None and _stage(before.announcement.offer) == _stage(offer)
        self._newest[peer] = _Entry(
            signed,
            entry_of(peer, announcement.sequence),
            expires_ms=min(announcement.expires_ms, now_ms + int(1000 * self._policy.lifetime_s)),
            since_ms=before.since_ms if before is not None and same_state else now_ms,
        )
        self._rates.count(peer, now_ms / 1000)
        if source.peer == peer:
            self.meet(source)
        elif before is None and peer not in self._kept:
            self._heard.put(peer, (source.group, source.peer, offer.profile.model_digest))
        is_new = before is None or is_news(before.announcement, announcement)
        return self._free_place(peer) and is_new

    def meet(self, met: Source) -> None:
        """We exchange with this peer ourselves. It may be one that nobody has announced."""
        if met.peer not in self._newest:
            return
        self.met_in[met.peer] = met.group
        if met.peer not in self._kept:
            self._heard.remove(met.peer)
            self._met.put(met.peer, (met.group,))

    def drop_expired(self, now_ms: int) -> list[PeerId]:
        """Forget, and name, the peers that have not renewed their announcements in time."""
        gone = [peer for peer, entry in self._newest.items() if entry.expires_ms <= now_ms]
        for peer in gone:
            self.forget(peer)
        return gone

    def forget(self, peer: PeerId) -> None:
        """Until we hear of it again. Does nothing for a peer that we do not know."""
        self._newest.pop(peer, None)
        self.met_in.pop(peer, None)
        self._heard.remove(peer)
        self._met.remove(peer)

    def state_age_s(self, peer: PeerId, now_ms: int) -> float:
        """The seconds since we heard of the state that `peer` is in."""
        return (now_ms - self._newest[peer].since_ms) / 1000

    def sequences(self) -> dict[PeerId, int]:
        """Our sequence numbers, in the form that another peer compares with its own."""
        return {peer: entry.announcement.sequence for peer, entry in self._newest.items()}

    def newer_than(self, sequences: Mapping[PeerId, int]) -> list[SignedAnnouncement]:
        """The announcements that a peer with `sequences` lacks: those of peers that we have met come first."""
        return [
            self._newest[peer].signed
            for peer in self._met_first(self._newest)
            if self._newest[peer].announcement.sequence > sequences.get(peer, -1)
        ]

    def lacks(self, sequences: Mapping[PeerId, int]) -> list[PeerId]:
        """The peers of which a node with `sequences` has something newer."""
        return [
            peer
            for peer, sequence in sequences.items()
            if (held := self._newest.get(peer)) is None or held.announcement.sequence < sequence
        ]

    def entries(self) -> dict[Entry, PeerId]:
        """The entry of each peer, by which two views are compared."""
        return {held.entry: peer for peer, held in self._newest.items()}

    def of_hashes(self, hashes: Collection[PeerHash]) -> list[SignedAnnouncement]:
        """The announcements of the peers with these hashes: those of peers that we have met come first."""
        held = {peer: entry for peer, entry in self._newest.items() if hash_of(entry.entry) in hashes}
        return [held[peer].signed for peer in self._met_first(held)]

    def announcements(self) -> list[Announcement]:
        """All that hold, those of peers that left excepted; in the order of their peers."""
        in_order = (self._newest[peer].signed.announcement for peer in sorted(self._newest))
        return [each for each in in_order if each.offer.state is not PeerState.LEFT]

    def of_peer(self, peer: PeerId) -> Announcement | None:
        """None if it is not known, or has left."""
        entry = self._newest.get(peer)
        if entry is None or entry.announcement.offer.state is PeerState.LEFT:
            return None
        return entry.announcement

    def of_model(self, digest: bytes) -> list[Announcement]:
        return [each for each in self.announcements() if each.offer.profile.model_digest == digest]

    def _met_first(self, peers: Iterable[PeerId]) -> list[PeerId]:
        return sorted(peers, key=self._heard.__contains__)

    def _free_place(self, newcomer: PeerId) -> bool:
        """Whether `newcomer` is not the one that goes."""
        while len(self._newest) > self._policy.view_peers:
            of_met = int(self._policy.met_share * self._policy.view_peers)
            shares = self._met if len(self._met) > of_met or not len(self._heard) else self._heard
            if not len(shares):
                break
            self.forget(shares.victim(self._rng))
        return newcomer in self._newest


def online(announcements: Iterable[Announcement]) -> list[Announcement]:
    """Those that take sessions."""
    return [each for each in announcements if each.offer.state is PeerState.ONLINE]


def online_or_draining(announcements: Iterable[Announcement]) -> list[Announcement]:
    """Those that have sessions, whether or not they take new ones."""
    return [each for each in announcements if each.offer.state in (PeerState.ONLINE, PeerState.DRAINING)]


def is_news(before: Announcement, announcement: Announcement) -> bool:
    """Whether others must hear of it at once."""
    return _essence(before) != _essence(announcement)


def _essence(announcement: Announcement) -> tuple[object, ...]:
    """Whether others must hear of it at once; the rest may wait for the next exchange."""
    offer = announcement.offer
    return announcement.addresses, offer.profile, offer.span, _stage(offer)


def _stage(offer: Offer) -> tuple[object, ...]:
    """Where the peer is in its life."""
    return offer.state, offer.moves_to
