"""The shared plan: the same for everybody, better after it than before, and never at the cost of a block."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.placement.paper import better_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import PlanPolicy
from llmnode.core.placement.servers import (
    PlacedServer,
    block_speeds,
    most_throughput,
    one_speed,
    shared_speed,
    throughput,
    worthwhile_lengths,
)
from llmnode.core.span import Span

BLOCKS = 12
POLICY = PlanPolicy()


@st.composite
def swarms(draw: st.DrawFn, least: int = 1) -> list[PlacedServer]:
    servers = []
    for number in range(draw(st.integers(least, 14))):
        most = draw(st.integers(1, 6))
        start = draw(st.integers(0, BLOCKS - most))
        length = draw(st.integers(1, most))
        speed = float(draw(st.integers(1, 100)))
        speeds = draw(st.sampled_from([one_speed, shared_speed]))(speed, most)
        server = PlacedServer(PeerId(f"{number:02}"), Span(start, start + length), speeds, movable=draw(st.booleans()))
        servers.append(server)
    return servers


def carried_out(servers: list[PlacedServer], moves: object) -> list[PlacedServer]:
    spans = {move.peer: move.span for move in moves}  # type: ignore[attr-defined] # a sequence of moves
    return [server.at(spans.get(server.peer, server.span)) for server in servers]


@given(swarms())
@settings(max_examples=200, deadline=None)
def test_a_plan_is_worth_its_price_and_says_what_it_gives(servers: list[PlacedServer]) -> None:
    plan = plan_moves(BLOCKS, servers, POLICY)
    then = throughput(BLOCKS, carried_out(servers, plan.moves))
    assert plan.now_tokens_per_s == throughput(BLOCKS, servers)
    assert abs(plan.then_tokens_per_s - then) < 1e-6
    assert then <= most_throughput(BLOCKS, servers) + 1e-6
    if plan.moves and plan.now_tokens_per_s > 0:
        assert then > plan.now_tokens_per_s * (1 + POLICY.price / len(servers) * len(plan.moves))
    movable = {server.peer for server in servers if server.movable}
    assert all(move.peer in movable for move in plan.moves)
    assert all(len(move.span) <= 6 and move.span.end <= BLOCKS for move in plan.moves)


@given(swarms(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_everybody_finds_the_same_plan(servers: list[PlacedServer], rng: random.Random) -> None:
    other = list(servers)
    rng.shuffle(other)
    assert plan_moves(BLOCKS, servers, POLICY) == plan_moves(BLOCKS, other, POLICY)


@given(swarms())
@settings(max_examples=200, deadline=None)
def test_a_swarm_that_follows_its_plans_comes_to_rest(servers: list[PlacedServer]) -> None:
    """Each time only the first move is made, and everything is planned anew."""
    for _move in range(60):
        plan = plan_moves(BLOCKS, servers, POLICY)
        if not plan.moves:
            return
        servers = carried_out(servers, plan.moves[:1])
    raise AssertionError(f"still moving: {servers}")


@given(swarms())
@settings(max_examples=200, deadline=None)
def test_no_plan_ends_with_more_blocks_that_nobody_serves(servers: list[PlacedServer]) -> None:
    def unserved(swarm: list[PlacedServer]) -> int:
        return block_speeds(BLOCKS, swarm).count(0.0)

    plan = plan_moves(BLOCKS, servers, POLICY)
    assert unserved(carried_out(servers, plan.moves)) <= unserved(servers)


def test_a_gap_is_closed_by_a_chain_of_moves_if_no_single_one_does() -> None:
    spans = [Span(0, 4), Span(0, 4), Span(4, 8)]
    servers = [PlacedServer(PeerId(str(number)), span, one_speed(1.0, 4)) for number, span in enumerate(spans)]
    plan = plan_moves(BLOCKS, servers, POLICY)
    assert throughput(BLOCKS, carried_out(servers, plan.moves)) == 1.0
    assert len(plan.moves) == 1


@given(swarms(least=2))
@settings(max_examples=100, deadline=None)
def test_the_papers_rule_never_moves_the_last_server_of_a_block(servers: list[PlacedServer]) -> None:
    me = servers[0]
    if throughput(BLOCKS, servers) > 0.0 and better_span(me.peer, BLOCKS, servers, 0.2) is not None:
        rest = block_speeds(BLOCKS, servers[1:])
        assert min(rest[me.span.start : me.span.end]) > 0.0


def test_only_lengths_that_are_faster_than_all_longer_ones_are_worthwhile() -> None:
    assert worthwhile_lengths(one_speed(5.0, 4)) == [4]
    assert worthwhile_lengths(shared_speed(12.0, 4)) == [1, 2, 3, 4]
    assert worthwhile_lengths((9.0, 9.0, 4.0, 4.0)) == [2, 4]
