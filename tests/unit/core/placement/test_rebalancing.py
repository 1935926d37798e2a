"""A node acts on its decisions, unless they failed before; and a server that does not move holds up nobody for long."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.placement.known_servers import KnownServers
from llmnode.core.placement.plan import Plan, plan_moves
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.rebalancing import Rebalancer
from llmnode.core.placement.servers import Move, PlacedServer, one_speed
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

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


CROWD = [half(PeerId(name)) for name in "abc"]
ALONE = PlacedServer(PeerId("d"), GAP, one_speed(10.0, 8))
"""The second half is slower than the first, and one of the crowd is to move there."""


def first_move_s(
    node: Rebalancer, servers: Sequence[PlacedServer], until_s: float = 2000.0, now_s: float = 0.0
) -> float | None:
    while now_s < until_s:
        if node.decide(servers, now_s).span is not None:
            return now_s
        now_s += POLICY.gap_check_every_s
    return None


def test_a_server_that_is_to_move_first_and_never_does_keeps_others_only_for_a_while() -> None:
    (first,) = plan_moves(BLOCKS, [*CROWD, ALONE], PlanPolicy()).moves
    others = [each.peer for each in CROWD if each.peer != first.peer]
    moved_s = [first_move_s(rebalancer(each), [*CROWD, ALONE]) or 0.0 for each in others]
    due_s = [POLICY.unmoved_s, 2 * POLICY.unmoved_s]  # the second of them waits for the first of them, too
    assert sorted(moved_s) == pytest.approx(due_s, abs=2 * POLICY.gap_check_every_s)


def test_a_server_is_not_taken_to_stay_while_nobody_may_move_since_many_load() -> None:
    servers, loaded_s = [*CROWD, ALONE], POLICY.unmoved_s + 1
    (first,) = plan_moves(BLOCKS, servers, PlanPolicy()).moves
    loading = [PlacedServer(PeerId(f"e{number}"), GAP, one_speed(0.01, 8), online=False) for number in range(3)]
    for node in [rebalancer(each.peer) for each in CROWD if each.peer != first.peer]:
        assert node.decide(servers, 0.0).span is None
        assert node.decide([*servers, *loading], 1.0).span is None
        assert first_move_s(node, servers, loaded_s + POLICY.unmoved_s - 1, loaded_s) is None


def test_a_server_that_says_that_it_stays_keeps_nobody() -> None:
    (first,) = plan_moves(BLOCKS, [*CROWD, ALONE], PlanPolicy()).moves
    servers = [replace(each, movable=each.peer != first.peer) for each in (*CROWD, ALONE)]
    moved_s = [first_move_s(rebalancer(each.peer), servers, 60.0) for each in CROWD if each.peer != first.peer]
    assert [each for each in moved_s if each is not None] == [0.0]


@pytest.mark.parametrize(
    ("speeds", "moves"),
    [
        ((10.0, 10.0, 1.0, 1.0), False),  # without the second server the first half would be slower than all is now
        ((3.0, 10.0, 10.0, 1.0), True),
        ((10.0, 10.0, 10.0, 1.0), False),  # both halves would only change places
    ],
)
def test_a_later_move_of_a_plan_is_made_without_the_earlier_ones_only_if_it_helps_alone(
    speeds: Sequence[float], moves: bool
) -> None:
    spans = [GAP, Span(0, 8), Span(0, 8), GAP]
    servers = [
        PlacedServer(PeerId(name), span, one_speed(speed, 8))
        for name, span, speed in zip("abcd", spans, speeds, strict=True)
    ]
    known = KnownServers(BLOCKS, servers)
    known.plan = Plan([Move(FIRST, Span(0, 8)), Move(SECOND, GAP)], 4.0, 11.0)
    assert first_move_s(rebalancer(SECOND), known) == (POLICY.turn_s if moves else None)


def test_blocks_that_could_not_be_loaded_are_not_tried_again_for_a_while() -> None:
    node = rebalancer(FIRST)
    assert node.decide([half(FIRST), half(SECOND)], 0.0).span == GAP
    node.note_failed(GAP, 0.0)
    assert node.decide([half(FIRST), half(SECOND)], POLICY.failed_s - 1).span is None
    assert node.decide([half(FIRST), half(SECOND)], POLICY.failed_s + 1).span == GAP
