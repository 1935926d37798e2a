"""A view: the peers in it, the orders in which it comes about, and how little one stranger can do to it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement, SignedBody
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import Source, View

POLICY = SwarmPolicy()
NOW_MS = 1_700_000_000_000
RELAY = Source(PeerId("relay"), "192.0.2.0/24")
OFFER = Offer(
    "model", Profile(b"d" * 32, Precision()), 30, Span(3, 7), PeerState.ONLINE,
    block_us=900, kv_tokens=9, kv_tokens_free=5,
)  # fmt: skip


def announced(peer: str = "peer", sequence: int = NOW_MS, offer: Offer = OFFER) -> SignedAnnouncement:
    """A view looks into no body, and verifies nothing."""
    announcement = Announcement(PeerId(peer), (), sequence, sequence + 45_000, "llmnode/1", offer)
    return SignedAnnouncement(announcement, SignedBody(b"", b""))


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(NOW_MS, NOW_MS + 20)), max_size=POLICY.changes_at_once),
    st.randoms(),
)
def test_views_that_heard_the_same_are_the_same_in_any_order(heard: list[tuple[str, int]], rng: object) -> None:
    one, other = View(POLICY), View(POLICY)
    shuffled = list(heard)
    rng.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random
    for view, order in ((one, heard), (other, shuffled)):
        for peer, sequence in order:
            view.accept(announced(peer, sequence), NOW_MS, RELAY)
    assert one.sequences() == other.sequences()
    assert one.newer_than(other.sequences()) == []
    assert one.lacks(other.sequences()) == []


def test_only_what_others_must_hear_of_is_news() -> None:
    view = View(POLICY)
    assert view.accept(announced(), NOW_MS, RELAY)
    assert not view.accept(announced(), NOW_MS, RELAY), "the same again"
    assert not view.accept(announced(sequence=NOW_MS + 1), NOW_MS, RELAY), "a renewal"
    assert not view.accept(announced(sequence=NOW_MS - 1, offer=replace(OFFER, span=Span(0, 1))), NOW_MS, RELAY), (
        "an old one"
    )
    assert view.accept(announced(sequence=NOW_MS + 2, offer=replace(OFFER, span=Span(0, 1))), NOW_MS, RELAY)


def test_a_lifetime_or_a_clock_beyond_the_policy_is_not_believed() -> None:
    view = View(POLICY)
    long_lived = announced()
    wrong = replace(long_lived, announcement=replace(long_lived.announcement, expires_ms=NOW_MS + 46_000))
    assert not view.accept(wrong, NOW_MS, RELAY)
    assert not view.accept(announced(sequence=NOW_MS + 31_000), NOW_MS, RELAY)
    assert not view.accept(announced(sequence=NOW_MS - 45_000), NOW_MS, RELAY)
    assert view.accept(announced(sequence=NOW_MS - 44_000), NOW_MS, RELAY)
    assert view.drop_expired(NOW_MS + 1000) == ["peer"]
    assert len(view) == 0


# Strangers with many identities


def flood(view: View, count: int, source: Source, *, now_ms: int = NOW_MS, models: int = 1) -> None:
    """They claim the time that lasts longest."""
    for number in range(count):
        profile = Profile(number.to_bytes(32, "big") if models > 1 else b"d" * 32, Precision())
        sybil = announced(f"sybil {source.peer} {number}", now_ms + 29_000, replace(OFFER, profile=profile))
        view.accept(sybil, now_ms, source)


def honest_of(view: View) -> int:
    return sum(not peer.startswith("sybil") for peer in view.sequences())


@pytest.mark.parametrize("models", [1, 4096])
@pytest.mark.parametrize("is_first", [False, True])
def test_sybils_of_one_neighbour_leave_the_peers_of_another_in_the_view(is_first: bool, models: int) -> None:
    view, stranger = View(POLICY, rng=random.Random(1)), Source(PeerId("stranger"), "203.0.113.0/24")
    if is_first:
        flood(view, 5000, stranger, models=models)
    for number in range(20):
        view.accept(announced(f"honest {number}"), NOW_MS, RELAY)
    flood(view, 5000, stranger, models=models)
    assert honest_of(view) == 20
    assert len(view) == POLICY.view_peers


def test_those_of_one_address_group_are_one_source_whatever_their_number() -> None:
    view = View(replace(POLICY, view_peers=64), rng=random.Random(1))
    for number in range(8):
        view.accept(announced(f"honest {number}"), NOW_MS, RELAY)
    for number in range(50):
        flood(view, 10, Source(PeerId(f"stranger {number}"), "203.0.113.0/24"))
    assert honest_of(view) == 8


def test_peers_that_we_have_met_are_not_driven_out_by_those_that_are_only_named() -> None:
    """Not even if a neighbour that names honest peers is flooded itself, and names the sybils as well."""
    view = View(replace(POLICY, view_peers=64), rng=random.Random(1))
    for number in range(20):
        met = Source(PeerId(f"honest {number}"), f"192.0.{number}.0/24")
        view.accept(announced(met.peer), NOW_MS, RELAY)
        view.meet(met)
    flood(view, 500, RELAY)
    assert honest_of(view) == 20


def test_of_those_that_we_have_met_the_largest_address_group_goes_first() -> None:
    view = View(replace(POLICY, view_peers=64), rng=random.Random(1))
    for number in range(10):
        view.accept(announced(f"honest {number}"), NOW_MS, Source(PeerId(f"honest {number}"), f"192.0.{number}.0/24"))
    for number in range(500):
        sybil = PeerId(f"sybil {number}")
        view.accept(announced(sybil), NOW_MS, Source(sybil, "203.0.113.0/24"))
    assert honest_of(view) == 10


def test_our_own_announcement_and_those_of_contacts_never_go() -> None:
    kept = [PeerId("ourselves"), PeerId("contact")]
    view = View(replace(POLICY, view_peers=4), kept, random.Random(1))
    for peer in kept:
        view.accept(announced(peer), NOW_MS, RELAY)
    flood(view, 50, RELAY)
    assert set(kept) < set(view.sequences())
    assert len(view) == 4


def test_a_lifetime_counts_from_when_it_came_whatever_the_announcer_claims() -> None:
    view = View(POLICY)
    view.accept(announced(sequence=NOW_MS + 29_000), NOW_MS, RELAY)
    assert view.drop_expired(NOW_MS + 44_999) == []
    assert view.drop_expired(NOW_MS + 45_000) == ["peer"]


def test_an_announcement_that_changes_all_the_time_is_taken_seldom() -> None:
    view, taken, news = View(POLICY), 0, 0
    for number in range(5 * 60):
        now_ms = NOW_MS + 200 * number
        each = announced(sequence=now_ms, offer=replace(OFFER, span=Span(0, 1 + number % 2)))
        taken += view.is_newer(each.announcement, now_ms)
        news += view.accept(each, now_ms, RELAY)
    assert news <= taken <= POLICY.changes_at_once + 60 / POLICY.change_every_s


def test_one_that_is_announced_as_it_should_be_is_always_taken() -> None:
    view, states = View(POLICY), [PeerState.JOINING, PeerState.ONLINE]
    for number in range(200):
        now_ms = NOW_MS + int(number * POLICY.announce_every_s * 1000)
        for state in states if number % 10 == 0 else states[1:]:
            now_ms += 1
            assert view.is_newer(announced(sequence=now_ms).announcement, now_ms)
            view.accept(announced(sequence=now_ms, offer=replace(OFFER, state=state)), now_ms, RELAY)


def test_the_age_of_a_state_is_told() -> None:
    view, joining = View(POLICY), replace(OFFER, state=PeerState.JOINING)
    for number in range(3):
        view.accept(announced(sequence=NOW_MS + 15_000 * number, offer=joining), NOW_MS + 15_000 * number, RELAY)
    assert view.state_age_s(PeerId("peer"), NOW_MS + 40_000) == 40
    view.accept(announced(sequence=NOW_MS + 40_000), NOW_MS + 40_000, RELAY)
    assert view.state_age_s(PeerId("peer"), NOW_MS + 41_000) == 1
