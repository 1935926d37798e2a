"""A view: the newest announcement of every peer that one node has heard of. It is told the time, and verifies nothing.

Merging is commutative and idempotent, so nodes that exchange what is newer end up with one view, in any order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.announcement import PeerState

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from llmnode.core.announcement import Announcement, SignedAnnouncement
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy


class View:
    """Kept below `policy.view_peers` announcements: those that expire first make room."""

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self._newest: dict[PeerId, SignedAnnouncement] = {}

    def __len__(self) -> int:
        return len(self._newest)

    def is_newer(self, announcement: Announcement, now_ms: int) -> bool:
        """Whether `announcement` is worth verifying: it holds, and is newer than what we have."""
        held = self._newest.get(announcement.peer)
        is_newer = held is None or announcement.sequence > held.announcement.sequence
        return is_newer and self.holds(announcement, now_ms)

    def holds(self, announcement: Announcement, now_ms: int) -> bool:
        """Whether it is alive, and not from the future."""
        lifetime_ms = announcement.expires_ms - announcement.sequence
        ahead_ms = announcement.sequence - now_ms
        if announcement.expires_ms <= now_ms or lifetime_ms > self._policy.lifetime_s * 1000:
            return False
        return ahead_ms <= self._policy.clock_skew_s * 1000

    def accept(self, signed: SignedAnnouncement, now_ms: int) -> bool:
        """Take a verified announcement if it is newer. True if it is news: an offer that we did not know."""
        announcement = signed.announcement
        if not self.is_newer(announcement, now_ms):
            return False
        held = self._newest.get(announcement.peer)
        self._newest[announcement.peer] = signed
        self._make_room()
        return held is None or is_news(held.announcement, announcement)

    def drop_expired(self, now_ms: int) -> list[PeerId]:
        """Forget, and name, the peers that have not renewed their announcements in time."""
        gone = [peer for peer, signed in self._newest.items() if signed.announcement.expires_ms <= now_ms]
        for peer in gone:
            del self._newest[peer]
        return gone

    def sequences(self) -> dict[PeerId, int]:
        """Our sequence numbers, in the form that another peer compares with its own."""
        return {peer: signed.announcement.sequence for peer, signed in self._newest.items()}

    def newer_than(self, sequences: Mapping[PeerId, int]) -> list[SignedAnnouncement]:
        """The announcements that a peer with `sequences` lacks."""
        return [
            signed for peer, signed in self._newest.items() if signed.announcement.sequence > sequences.get(peer, -1)
        ]

    def lacks(self, sequences: Mapping[PeerId, int]) -> list[PeerId]:
        """The peers of which a node with `sequences` has something newer."""
        return [
            peer
            for peer, sequence in sequences.items()
            if (held := self._newest.get(peer)) is None or held.announcement.sequence < sequence
        ]

    def announcements(self) -> list[Announcement]:
        """All that hold, those of peers that left excepted; in the order of their peers."""
        return sorted(
            (
                signed.announcement
                for signed in self._newest.values()
                if signed.announcement.offer.state is not PeerState.LEFT
            ),
            key=lambda announcement: announcement.peer,
        )

    def of_model(self, digest: bytes) -> list[Announcement]:
        return [each for each in self.announcements() if each.offer.profile.model_digest == digest]

    def _make_room(self) -> None:
        if len(self._newest) > self._policy.view_peers:
            first = min(self._newest.values(), key=lambda signed: signed.announcement.expires_ms)
            del self._newest[first.announcement.peer]


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
    return announcement.addresses, offer.profile, offer.span, offer.state
