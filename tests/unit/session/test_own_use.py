"""A client knows what it has at each peer itself."""

from __future__ import annotations

import pytest

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo
from llmnode.core.peers.standing import OwnUse
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.session.own_use import OwnUses

ONE, TWO = PeerId("one"), PeerId("two")
ROUTE = [Hop(ONE, Span(0, 2)), Hop(TWO, Span(2, 4))]
PROFILE = ModelInfo("m", b"d" * 32, 4, hidden_size=4, context_tokens=64).profile
ANNOUNCED = [
    Announcement(hop.peer, (), 1, 2, "llmnode/1", Offer("m", PROFILE, 4, hop.span, PeerState.ONLINE, 1, 9, 9))
    for hop in ROUTE
]
AGE_S = 10.0


def at_peers(uses: OwnUses, now_s: float = 0.0, **began_s: list[float]) -> dict[PeerId, OwnUse]:
    began = {PeerId(name): each for name, each in began_s.items()}
    return uses.at_peers(ANNOUNCED, began, lambda _announcement: AGE_S, now_s)


def test_sessions_count_while_they_are_opened() -> None:
    uses = OwnUses(20.0)
    with uses.opening(ROUTE), uses.opening(ROUTE[:1]):
        assert at_peers(uses, two=[0.0]) == {ONE: OwnUse(2, 2), TWO: OwnUse(2, 2)}
    assert not at_peers(uses)


def test_a_session_that_could_not_be_opened_counts_no_more() -> None:
    uses = OwnUses(20.0)
    with pytest.raises(ValueError, match="refused"), uses.opening(ROUTE):
        raise ValueError("refused")
    assert not at_peers(uses)


def test_a_session_is_late_until_its_load_is_announced() -> None:
    uses = OwnUses(20.0)
    assert at_peers(uses, 30.0, one=[5.0, 15.0]) == {ONE: OwnUse(2, 1)}


def test_the_own_load_is_told_for_now_and_for_when_the_peer_announced_its_own() -> None:
    uses = OwnUses(20.0)
    for number in range(200):
        uses.note_step(ONE, 0.5, number / 2)
    own = at_peers(uses, 100.0)[ONE]
    assert (own.load, own.announced) == pytest.approx((1.0, 1.0), rel=0.1)
    later = at_peers(uses, 110.0)[ONE]
    assert (later.load, later.announced) == pytest.approx((0.5, 1.0), rel=0.1)
    assert at_peers(uses, 200.0)[ONE] == OwnUse()


def test_steps_that_end_as_the_peer_announces_its_load_are_in_that_load() -> None:
    uses = OwnUses(20.0)
    uses.note_step(ONE, 10.0, 100.1)  # it ended there before this client heard of it
    assert at_peers(uses, 100.0 + AGE_S)[ONE].announced == pytest.approx(0.69, rel=0.01)
