"""The ways between servers: what they say of each other, and what a client believes of it."""

from __future__ import annotations

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.ways import believed_ways
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed

A, B, C = PeerId("a"), PeerId("b"), PeerId("c")
NEAR = {A: 0.01, B: 0.01, C: 0.01}
"""Round trips of the client, in seconds."""


def announced(peer: PeerId, **round_trips_ms: int) -> Announcement:
    speed = AnnouncedSpeed(round_trips_us=tuple((PeerId(each), 1000 * ms) for each, ms in round_trips_ms.items()))
    offer = Offer("m", Profile(b"d" * 32, Precision()), 9, Span(0, 9), PeerState.ONLINE, 1, 9, 9, speed)
    return Announcement(peer, (), 1, 2, "llmnode/1", offer)


def test_half_a_round_trip_is_a_way_in_both_directions() -> None:
    ways = believed_ways([announced(A, b=20), announced(B, c=40)], NEAR)
    assert ways == {(A, B): 0.01, (B, A): 0.01, (B, C): 0.02, (C, B): 0.02}


def test_of_two_words_the_longer_counts() -> None:
    assert believed_ways([announced(A, b=20), announced(B, a=30)], NEAR)[A, B] == 0.015


def test_one_that_is_far_from_the_client_is_not_near_to_one_that_is_near() -> None:
    round_trips_s = {A: 0.01, B: 0.2}
    assert believed_ways([announced(A, b=0)], round_trips_s)[A, B] == (0.2 - 0.01) / 2
    assert believed_ways([announced(A, b=400)], round_trips_s)[A, B] == 0.2


def test_a_server_that_the_client_has_not_measured_has_no_ways() -> None:
    """A stranger would say that it is next to every server, and a thousand that they are next to each other."""
    assert believed_ways([announced(A, b=0, c=0), announced(C, a=0, b=0)], {A: 0.01, B: 0.01}) == {
        (A, B): 0.0,
        (B, A): 0.0,
    }
    assert believed_ways([announced(A, b=0)], {A: 0.01}) == {}
