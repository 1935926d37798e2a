"""A node acts on its decisions, unless they failed before; and a server that does not move holds up nobody for long."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.rebalancing import Rebalancer
from llmnode.core.placement.servers import PlacedServer, one_speed
from llmnode.core.span import Span

BLOCKS = 16
POLICY = RebalancePolicy()
FIRST, SECOND = PeerId("a"), PeerId("b")
GAP = Span(8, 16)


def half(peer: PeerId) -> PlacedServer:
    """A server of the first half, which could serve the second."""
    return PlacedServer(peer, Span(0, 8), one_speed(10.0, 8))


def rebalancer(me: PeerId) -> Rebalancer:
    return Rebalancer(me, BLOCKS, random.Random(1), POLICY)


def when_it_moves(node: Rebalancer, until_s: float) -> float | None:
    now_s = 0.0
    while now_s < until_s:
        if node.decide([half(FIRST), half(SECOND)], now_s).span == GAP:
            return now_s
        now_s += POLICY.gap_check_every_s
    return None


def test_the_server_whose_turn_it_is_closes_a_gap_at_once() -> None:
    assert when_it_moves(rebalancer(FIRST), 1.0) == 0.0


def test_another_one_closes_it_if_that_server_stays_where_it_is() -> None:
    moved_s = when_it_moves(rebalancer(SECOND), 600.0)
    assert moved_s == pytest.approx(2 * POLICY.turn_s, abs=POLICY.gap_check_every_s)


def test_blocks_that_could_not_be_loaded_are_not_tried_again_for_a_while() -> None:
    node = rebalancer(FIRST)
    assert node.decide([half(FIRST), half(SECOND)], 0.0).span == GAP
    node.note_failed(GAP, 0.0)
    assert node.decide([half(FIRST), half(SECOND)], POLICY.failed_s - 1).span is None
    assert node.decide([half(FIRST), half(SECOND)], POLICY.failed_s + 1).span == GAP
