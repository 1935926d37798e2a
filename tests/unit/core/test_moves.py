"""A session leaves the right hops for better ones, and only if that repays the price."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.moves import (
    MOST_STEPS,
    Move,
    NewHop,
    chance,
    crowded,
    find_moves,
    price_s,
    repays,
    step_s,
    steps_left,
    steps_until,
)
from llmnode.core.peers.standing import DecodeTime
from llmnode.core.policy import MovePolicy
from llmnode.core.route import Hop, HopCost, Route, find_route
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 6
POLICY = MovePolicy()


def hop(peer: str, start: int, end: int) -> Hop:
    return Hop(PeerId(peer), Span(start, end))


def cost(block_s: float, hop_s: float = 0.01) -> HopCost:
    return HopCost(hop_s, block_s)


@st.composite
def swarms(draw: st.DrawFn) -> tuple[Route, list[Hop], dict[PeerId, HopCost]]:
    """A route, all servers with those of the route, and what each costs: with all costs equal the route is the best."""
    ranges = draw(st.lists(st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)), min_size=1, max_size=7))
    held = [hop(f"peer{n}", start, min(BLOCKS, start + length)) for n, (start, length) in enumerate(ranges)]
    held.append(hop("whole", 0, BLOCKS))
    costs = {each.peer: cost(draw(st.floats(0.001, 1)), draw(st.floats(0.005, 1))) for each in held}
    before = {each.peer: cost(draw(st.floats(0.001, 1)), draw(st.floats(0.005, 1))) for each in held}
    return find_route(BLOCKS, held, before), held, costs


@given(swarms(), st.floats(0.001, 10))
def test_a_move_leads_to_a_whole_route_of_different_peers_that_is_as_much_faster_as_it_says(
    swarm: tuple[Route, list[Hop], dict[PeerId, HopCost]], taken_s: float
) -> None:
    route, held, costs = swarm
    spans = {each.peer: each.span for each in held}
    now_s = step_s(route, costs, {})
    for move in find_moves(route, held, costs, {}, taken_s):
        after = move.after(route)
        assert [block for each in after for block in range(each.span.start, each.span.end)] == list(range(BLOCKS))
        assert len({each.peer for each in after}) == len(after)
        assert all(spans[each.peer].covers(each.span) for each in after)
        assert not {each.peer for each in move.hops} & {each.peer for each in route}
        assert route[move.first : move.first + len(move.left)] == move.left
        saved_s = now_s - step_s(after, costs, {})
        assert 0 < move.saved_s == pytest.approx(saved_s * min(1, taken_s / now_s))
        assert move.saved_s <= taken_s


@given(swarms())
def test_nothing_saves_anything_on_the_fastest_route(swarm: tuple[Route, list[Hop], dict[PeerId, HopCost]]) -> None:
    _, held, costs = swarm
    assert not find_moves(find_route(BLOCKS, held, costs), held, costs, {}, 1.0)


def found(route: Sequence[Hop], held: Sequence[Hop], slow: str) -> list[tuple[Route, Route]]:
    costs = {each.peer: cost(0.1 if each.peer == slow else 0.01) for each in held}
    return [(each.left, each.hops) for each in find_moves(tuple(route), held, costs, {}, 10.0)]


def test_only_the_hop_is_left_for_which_there_is_a_better_one() -> None:
    route = [hop("a", 0, 2), hop("b", 2, 4), hop("c", 4, 6)]
    new = hop("new", 2, 4)
    assert found(route, [*route, new, hop("other", 0, 2)], "b") == [((route[1],), (new,))]


def test_several_hops_are_left_for_one() -> None:
    route = [hop("a", 0, 2), hop("b", 2, 4), hop("c", 4, 6)]
    new = hop("new", 2, 6)
    assert found(route, [*route, new], "b") == [((route[1], route[2]), (new,))]


def test_a_newcomer_that_overlaps_a_hop_takes_what_lies_after_it() -> None:
    """The fastest route has another cut, at which the peer that stays would have a second hop."""
    route = [hop("a", 0, 3), hop("b", 3, 6)]
    new = hop("new", 2, 6)
    costs = {PeerId("a"): cost(0.05), PeerId("b"): cost(0.1), PeerId("new"): cost(0.01)}
    assert find_route(BLOCKS, [*route, new], costs)[0].span == Span(0, 2)
    (move,) = find_moves(tuple(route), [*route, new], costs, {}, 10.0)
    assert (move.left, move.hops) == ((route[1],), (hop("new", 3, 6),))


def test_a_known_way_between_two_servers_counts() -> None:
    route = (hop("a", 0, 3), hop("b", 3, 6))
    costs = {each.peer: HopCost(0.1, 0.01, 0.05) for each in [*route, hop("near", 3, 6)]}
    ways = {(PeerId("a"), PeerId("near")): 0.001}
    assert step_s(route, costs, ways) == pytest.approx(0.26)
    (move,) = find_moves(route, [*route, hop("near", 3, 6)], costs, ways, 10.0)
    assert move.hops == (hop("near", 3, 6),) and move.saved_s == pytest.approx(0.099)


def test_as_many_steps_are_expected_as_were_done_and_no_more_than_fit() -> None:
    assert steps_left(1000, 100, 90) == 90
    assert steps_left(120, 100, 90) == 20
    assert steps_left(100, 100, 90) == 0


def test_the_price_has_round_trips_what_the_client_brings_and_all_positions_at_all_new_hops() -> None:
    new = [NewHop(0.01, 0.02, brought_s=3.0), NewHop(0.005, 0.015)]
    assert price_s(new, 100, 0.1) == pytest.approx(0.5 + 3.0 + 100 * 0.05)


MOVE = Move(0, (hop("a", 0, 6),), (hop("b", 0, 6),), saved_s=0.1)


def test_a_move_repays_if_the_text_is_long_the_price_low_and_the_step_much_shorter() -> None:
    assert repays(MOVE, 0.3, 2.0, 41, POLICY)
    assert not repays(MOVE, 0.3, 2.0, 40, POLICY), "twice its price"
    assert not repays(MOVE, 0.6, 2.0, 41, POLICY), "a sixth of a step is too little"
    assert not repays(MOVE, 0.3, POLICY.longest_s + 1, 1000, POLICY), "nobody waits that long"


def test_one_client_alone_moves_at_once_and_of_a_crowd_a_share() -> None:
    assert chance(0.0, POLICY) == 1
    assert chance(1.0, POLICY) == 0.5
    assert chance(50.0, POLICY) == POLICY.least_chance


def test_a_crowd_makes_a_block_longer_by_what_its_decodes_add() -> None:
    decode = DecodeTime(alone_s=0.1, further_s=0.02, others=2.0)
    assert crowded(cost(0.5), decode, 5.0).block_s == pytest.approx(0.6)
    assert crowded(cost(0.5), decode, 0.0) == cost(0.5)


def test_the_clock_is_looked_at_when_half_of_the_wait_is_over() -> None:
    assert steps_until(10.0, 0.1) == 50
    assert steps_until(0.01, 0.1) == 1
    assert steps_until(1000.0, 0.1) == steps_until(1.0, 0.0) == MOST_STEPS
