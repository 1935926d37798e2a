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


def shares(*speeds: float) -> list[PlacedServer]:
    """A server for each quarter of the blocks, and the node itself at the first one."""
    servers = [
        PlacedServer(PeerId(f"s{number}"), Span(4 * number, 4 * number + 4), one_speed(speed, 4), movable=False)
        for number, speed in enumerate(speeds)
    ]
    return [*servers, PlacedServer(FIRST, Span(0, 4), one_speed(50.0, 4))]


def tried_in(node: Rebalancer, servers: Sequence[PlacedServer], decisions: int) -> list[PeerId]:
    """The peers whose pace it tries, all of which show what they say."""
    tried = []
    for number in range(decisions):
        decision = node.decide(servers, number * POLICY.check_every_s)
        assert decision.span is None
        assert {*decision.tries} <= {*decision.confirm}
        for peer in decision.tries:
            node.note_pace(peer, 50.0, number * POLICY.check_every_s)
        tried += decision.tries
    return tried


def test_a_node_tries_each_server_that_blocks_rest_on_once_and_never_itself() -> None:
    tried = tried_in(rebalancer(FIRST), shares(50.0, 50.0, 50.0, 50.0), 50)
    assert sorted(tried) == ["s0", "s1", "s2", "s3"]


def test_it_tries_first_what_has_no_other_server() -> None:
    servers = [*shares(1.0, 50.0, 50.0, 50.0), *(replace(each, peer=PeerId(f"t{each.peer}")) for each in shares(1, 50))]
    first = [rebalancer_of(seed).decide(servers, 0.0).tries[0] for seed in range(200)]
    alone = sum(peer in ("s2", "s3") for peer in first)
    assert alone > 120
    assert first.count(PeerId("s0")) < 5


def rebalancer_of(seed: int) -> Rebalancer:
    return Rebalancer(FIRST, BLOCKS, random.Random(seed), POLICY)


@pytest.mark.parametrize(("shown", "moves"), [(50.0, False), (25.0, False), (5.0, True), (None, True)])
def test_a_node_moves_to_the_blocks_of_a_server_that_shows_less_than_it_says(shown: float | None, moves: bool) -> None:
    """Without a trial the first quarter has twice the speed of the others, and nothing is to be gained."""
    node, servers = rebalancer(FIRST), shares(50.0, 50.0, 50.0, 50.0)
    assert first_move_s(node, servers, 600.0) is None
    for _time in range(POLICY.refusals):
        node.note_pace(PeerId("s2"), shown, 600.0)
    assert (first_move_s(node, servers, 1800.0, 600.0) is not None) is moves


def test_a_server_that_refuses_trials_counts_as_slow_only_after_some() -> None:
    node, servers = rebalancer(FIRST), shares(50.0, 50.0, 50.0, 50.0)
    for _time in range(POLICY.refusals - 1):
        node.note_pace(PeerId("s2"), None, 0.0)
    assert first_move_s(node, servers, 60.0) is None


def test_a_server_that_is_absent_again_does_not_count_for_longer() -> None:
    node, servers = rebalancer(FIRST), [half(FIRST), PlacedServer(SECOND, GAP, one_speed(10.0, 8))]
    for times, lasts_s in enumerate([600.0, 1200.0, 2400.0, 3600.0, 3600.0]):
        began_s = times * 10_000.0 / 2
        node.note_absent(SECOND, began_s)
        node.decide(servers, began_s + lasts_s - 1)
        assert node.sees_gap(servers)
        node.decide(servers, began_s + lasts_s + 1)
        assert not node.sees_gap(servers)


def test_a_server_that_answers_again_counts_at_once() -> None:
    node, servers = rebalancer(FIRST), [half(FIRST), PlacedServer(SECOND, GAP, one_speed(10.0, 8))]
    node.note_absent(SECOND, 0.0)
    assert node.sees_gap(servers)
    assert node.absent_of([FIRST, SECOND]) == [SECOND]
    node.note_present(SECOND)
    assert not node.sees_gap(servers)
    assert not node.absent_of([FIRST, SECOND])
