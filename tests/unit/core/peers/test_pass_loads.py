"""A pass ends at a peer after those that are there, at the speed that the peer has shown."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.pass_loads import (
    BELIEVED_TIMES,
    KEEPS_S,
    LEAST_POSITIONS,
    PEERS,
    Holder,
    PassLoads,
    pass_weight,
)
from llmnode.core.route import HopCost, find_detour
from llmnode.core.serving.pass_queue import BACKWARD_COST
from llmnode.core.span import Span

SPAN = Span(0, 4)
WEIGHT = 100
COST = WEIGHT * len(SPAN)
A, B, C = (PeerId(name) for name in "abc")


def holder(peer: PeerId, block_s: float = 1.0, doubt_s: float = 0.0) -> Holder:
    return Holder(peer, SPAN, HopCost(0.01, block_s + doubt_s), HopCost(0.01, block_s))


def ends_s(loads: PassLoads, peer: PeerId, *holders: Holder, now_s: float = 0.0) -> float:
    cost = loads.costs(holders, WEIGHT, now_s)[peer]
    return cost.hop_s + len(SPAN) * cost.block_s


def test_a_backward_and_a_few_positions_count_as_what_they_take() -> None:
    assert pass_weight(100, is_backward=False) == 100
    assert pass_weight(100, is_backward=True) == BACKWARD_COST * 100
    assert pass_weight(1, is_backward=False) == LEAST_POSITIONS


def test_what_passes_took_counts_and_not_the_word() -> None:
    loads, says_fast, says_slow = PassLoads(), holder(A, 0.001), holder(B, 1.0)
    loads.note(A, COST, 0.0, 10.0)
    loads.note(B, COST, 0.0, 1.0)
    assert ends_s(loads, A, says_fast, says_slow, now_s=10.0) == pytest.approx(10.0, rel=0.01)
    assert ends_s(loads, B, says_fast, says_slow, now_s=10.0) == pytest.approx(1.0, rel=0.02)


def test_passes_beside_each_other_take_a_part_of_the_time_each() -> None:
    loads = PassLoads()
    for answered_s in (1.0, 2.0, 3.0, 4.0):
        loads.note(A, COST, 0.0, answered_s)
    assert ends_s(loads, A, holder(A), now_s=4.0) == pytest.approx(1.0, rel=0.02)


def test_a_pass_waits_for_those_before_it() -> None:
    loads = PassLoads()
    loads.note(A, COST, 0.0, 1.0)
    given_ = [loads.give(A, COST) for _ in range(3)]
    assert ends_s(loads, A, holder(A), now_s=1.0) == pytest.approx(4.0, rel=0.01)
    cost = loads.costs([holder(A)], WEIGHT, 1.0, without=given_[0])[A]
    assert cost.hop_s == pytest.approx(2.0, rel=0.01)
    assert loads.costs([holder(A)], WEIGHT, 1.0, has_none=True)[A].hop_s == 0.01
    for each in given_:
        loads.take_back(each)
    assert ends_s(loads, A, holder(A), now_s=1.0) == pytest.approx(1.0, rel=0.02)


def test_a_pass_that_is_late_counts_before_its_answer() -> None:
    loads = PassLoads()
    for peer in (A, B):
        loads.note(peer, COST, 0.0, 1.0)
    loads.give(A, COST).began_s = 1.0
    assert ends_s(loads, A, holder(A), holder(B), now_s=1.5) == pytest.approx(2.0, rel=0.01)
    assert ends_s(loads, A, holder(A), holder(B), now_s=9.0) == pytest.approx(16.0, rel=0.01)
    assert ends_s(loads, B, holder(A), holder(B), now_s=9.0) == pytest.approx(1.0, rel=0.02)


def test_a_peer_that_has_answered_nothing_is_hardly_faster_than_those_that_have() -> None:
    loads, says_fast, says_slow = PassLoads(), holder(B, 1e-6), holder(C, 5.0)
    loads.note(A, COST, 0.0, 1.0)
    known = holder(A), says_fast, says_slow
    assert ends_s(loads, B, *known, now_s=1.0) == pytest.approx(1 / BELIEVED_TIMES, rel=0.05)
    assert ends_s(loads, C, *known, now_s=1.0) == pytest.approx(5.0, rel=0.01)


def test_a_doubt_counts_once_and_not_for_each_pass_before() -> None:
    """So it changes nothing between peers that have it all, as after a failure."""
    loads = PassLoads()
    for peer, took_s in ((A, 1.0), (B, 2.0)):
        loads.note(peer, COST, 0.0, took_s)
        loads.give(peer, COST)
    without = [ends_s(loads, peer, holder(A), holder(B), now_s=2.0) for peer in (A, B)]
    doubted = [ends_s(loads, peer, holder(A, doubt_s=9.0), holder(B, doubt_s=9.0), now_s=2.0) for peer in (A, B)]
    assert doubted[0] > 2 * without[0]
    assert doubted[1] - doubted[0] == pytest.approx(without[1] - without[0])


def test_old_answers_say_nothing_and_a_limited_number_of_peers_is_remembered() -> None:
    loads = PassLoads()
    loads.note(A, COST, 0.0, 50.0)
    assert ends_s(loads, A, holder(A, 0.1), now_s=50.0 + KEEPS_S) == pytest.approx(50.0, rel=0.01)
    assert ends_s(loads, A, holder(A, 0.1), now_s=51.0 + KEEPS_S) == pytest.approx(0.1 * COST, rel=0.01)
    load = loads.give(A, COST)
    for number in range(PEERS + 10):
        loads.note(PeerId(str(number)), COST, 0.0, 1.0)
    assert len(loads._peers) == PEERS
    loads.take_back(load)
    gone = loads.give(C, COST)
    loads.take_back(gone)
    assert C not in loads._peers


@given(st.lists(st.floats(0.1, 10.0), min_size=1, max_size=5), st.integers(1, 40))
def test_passes_that_go_one_by_one_where_they_end_first_end_almost_together(times_s: list[float], passes: int) -> None:
    """No peer ends later than by one pass more than the best split could."""
    loads, peers = PassLoads(), [PeerId(str(number)) for number in range(len(times_s))]
    for peer, took_s in zip(peers, times_s, strict=True):
        loads.note(peer, COST, 0.0, took_s)
    holders, busy_s = [holder(peer) for peer in peers], dict.fromkeys(peers, 0.0)
    for _ in range(passes):
        costs = loads.costs(holders, WEIGHT, 10.0)
        (hop,) = find_detour(SPAN, [(peer, SPAN) for peer in peers], costs)
        loads.give(hop.peer, COST)
        busy_s[hop.peer] += times_s[peers.index(hop.peer)]
    best_s = passes / sum(1 / each for each in times_s)
    assert max(busy_s.values()) <= best_s + max(times_s) + 0.1
