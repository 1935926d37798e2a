"""Suspicion: told which peers may have lied, it says which are avoided and which are not used."""

from __future__ import annotations

from itertools import cycle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.suspicion import Suspicion
from llmnode.core.policy import TrustPolicy
from llmnode.core.route import Hop, HopCost, find_route
from llmnode.core.span import Span

POLICY = TrustPolicy()
PEERS = [PeerId(name) for name in "abcd"]
PEER, OTHER, *_ = PEERS
HALF_LIFE_S = POLICY.suspicion_half_life_s

breaks = st.lists(st.tuples(st.sets(st.sampled_from(PEERS), max_size=2), st.integers(0, 2000)), max_size=20)
"""The peers that may have caused each, and the seconds after the one before."""


def test_nobody_is_suspected_or_convicted_without_a_reason() -> None:
    suspicion = Suspicion(POLICY)
    assert suspicion.penalty(PEER, 5.0) == 1
    assert not suspicion.is_convicted(PEER, 5.0)


def test_one_break_makes_both_neighbours_dearer_and_bans_neither() -> None:
    suspicion = Suspicion(POLICY)
    suspicion.suspect([PEER, OTHER], 5.0)
    assert suspicion.penalty(PEER, 5.0) == suspicion.penalty(OTHER, 5.0) == 1.5
    assert suspicion.penalty(PEERS[2], 5.0) == 1
    assert not suspicion.is_convicted(PEER, 5.0)


def test_of_equal_peers_others_are_taken_but_one_that_is_twice_as_fast_stays() -> None:
    suspicion = Suspicion(POLICY)
    suspicion.suspect([PEER], 0.0)
    held = [Hop(PEER, Span(0, 4)), Hop(OTHER, Span(0, 4))]

    def taken(factor: float) -> PeerId:
        penalty = suspicion.penalty(PEER, 0.0)
        costs = {PEER: HopCost(0.01 / factor * penalty, 0.002 / factor * penalty), OTHER: HopCost(0.01, 0.002)}
        return find_route(4, held, costs)[0].peer

    assert taken(1.0) == OTHER
    assert taken(2.0) == PEER


def test_suspicion_halves_and_is_forgotten() -> None:
    suspicion = Suspicion(POLICY)
    suspicion.suspect([PEER], 0.0)
    assert suspicion.penalty(PEER, HALF_LIFE_S) == pytest.approx(1.25)
    assert suspicion.penalty(PEER, 2 * HALF_LIFE_S) == pytest.approx(1.125)
    assert suspicion.penalty(PEER, 5 * HALF_LIFE_S) == 1


def test_the_only_holder_of_blocks_is_forgiven_within_an_hour_whatever_it_was_suspected_of() -> None:
    suspicion = Suspicion(POLICY)
    for _ in range(1000):
        suspicion.suspect([PEER], 0.0)
    assert suspicion.penalty(PEER, 0.0) == 1 + POLICY.suspicion_cost * POLICY.most_suspicion
    assert suspicion.penalty(PEER, 3600.0) == 1


def test_a_liar_soon_costs_more_than_any_of_its_neighbours() -> None:
    suspicion, neighbours = Suspicion(POLICY), cycle(PEERS[1:])
    for number in range(6):
        suspicion.suspect([PEER, next(neighbours)], 10.0 * number)
    assert all(suspicion.penalty(PEER, 60.0) > 1.5 * suspicion.penalty(other, 60.0) for other in PEERS[1:])


def test_proof_convicts_for_long_and_not_for_ever() -> None:
    suspicion = Suspicion(POLICY)
    suspicion.convict(PEER, 100.0)
    assert suspicion.is_convicted(PEER, 100.0)
    assert suspicion.is_convicted(PEER, 99.9 + POLICY.conviction_s)
    assert not suspicion.is_convicted(PEER, 100.0 + POLICY.conviction_s)
    assert not suspicion.is_convicted(OTHER, 100.0)


@given(breaks)
def test_suspicion_alone_never_convicts_and_is_bounded(history: list[tuple[set[PeerId], int]]) -> None:
    suspicion, now_s = Suspicion(POLICY), 0.0
    for peers, later_s in history:
        now_s += later_s
        before = {peer: suspicion.penalty(peer, now_s) for peer in PEERS}
        suspicion.suspect(peers, now_s)
        for peer in PEERS:
            after = suspicion.penalty(peer, now_s)
            assert after == before[peer] if peer not in peers else after > before[peer] or after == 9
            assert 1 <= after <= 1 + POLICY.suspicion_cost * POLICY.most_suspicion
            assert suspicion.penalty(peer, now_s + 1) <= after
            assert not suspicion.is_convicted(peer, now_s)


def test_of_peers_that_came_and_went_nothing_is_kept() -> None:
    suspicion = Suspicion(POLICY)
    for number in range(1000):
        suspicion.suspect([PeerId(f"passer-by {number}")], 600.0 * number)
        suspicion.convict(PeerId(f"passer-by {number}"), 600.0 * number)
    assert len(suspicion._breaks._counts) <= 3
    assert len(suspicion._convicted_until_s) <= 6
