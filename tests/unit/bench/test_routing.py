"""The routes of the benchmark `routing`: all of them, and those of the paper's search."""

from __future__ import annotations

import random
from functools import cache
from itertools import permutations, product

import pytest

from bench.kit.report import Spread
from bench.routing.beam import beam_route
from bench.routing.routing import decision_aim
from bench.routing.topologies import BLOCKS, CLIENT_HOST, FEWEST_ROUTES, MOST_ROUTES, all_routes, draw_topology
from llmnode.core.ids import PeerId
from llmnode.core.route import Hop, HopCost, find_route
from llmnode.core.span import Span

drawn = cache(draw_topology)
"""A topology is drawn until it has few routes, which takes a second."""


def route_cost_s(
    route: tuple[Hop, ...], costs: dict[PeerId, HopCost], ways: dict[tuple[PeerId, PeerId], float]
) -> float:
    total_s, former = 0.0, None
    for hop in route:
        cost = costs[hop.peer]
        total_s += cost.hop_s + len(hop.span) * cost.block_s
        if former is not None and (former, hop.peer) in ways:
            total_s -= min(max(0.0, costs[former].way_s + cost.way_s - ways[former, hop.peer]), cost.hop_s)
        former = hop.peer
    return total_s


@pytest.mark.parametrize("seed", range(3))
def test_the_best_of_all_routes_is_that_of_the_search_and_no_beam_is_better(seed: int) -> None:
    topology = drawn(seed)
    held = [Hop(PeerId(str(number)), server.span) for number, server in enumerate(topology.fleet)]
    places = {hop.peer: place for hop, place in zip(held, topology.places, strict=True)}
    costs = {
        hop.peer: HopCost(2 * way_s, server.block_us / 1e6, way_s)
        for hop, server in zip(held, topology.fleet, strict=True)
        for way_s in [topology.client.one_way_s(places[hop.peer])]
    }
    ways = {(one, other): places[one].one_way_s(places[other]) for one in places for other in places if one != other}
    routes = [*all_routes(BLOCKS, held)]
    assert FEWEST_ROUTES <= len(routes) <= MOST_ROUTES
    least_s = min(route_cost_s(route, costs, ways) for route in routes)
    assert route_cost_s(find_route(BLOCKS, held, costs, ways), costs, ways) == pytest.approx(least_s)
    for width in (1, 4):
        route, cost_s = beam_route(BLOCKS, held, costs, ways, width)
        assert route in routes
        assert cost_s == pytest.approx(route_cost_s(route, costs, ways)) and cost_s >= least_s - 1e-9


@pytest.mark.parametrize("seed", range(10))
def test_no_route_is_better_than_the_best_of_them(seed: int) -> None:
    rng = random.Random(seed)
    held = [Hop(PeerId(name), Span(start, end)) for name, start, end in (("a", 0, 4), ("b", 2, 6), ("c", 1, 5))]
    costs = {hop.peer: HopCost(rng.random(), rng.random()) for hop in held}
    found, spans = [*all_routes(6, held)], {hop.peer: hop.span for hop in held}
    for cuts in product(range(7), repeat=2):
        for order in permutations(held):
            ends = [0, *sorted(cuts), 6]
            route = tuple(
                Hop(hop.peer, Span(*ends[number : number + 2]))
                for number, hop in enumerate(order)
                if ends[number] < ends[number + 1]
            )
            if all(spans[hop.peer].covers(hop.span) for hop in route):
                assert route_cost_s(route, costs, {}) >= min(route_cost_s(each, costs, {}) for each in found) - 1e-9


def test_places_are_at_most_200_ms_apart_and_hosts_differ() -> None:
    for seed in range(3):
        topology = drawn(seed)
        places = [topology.client, *topology.places]
        assert all(0 <= one.one_way_s(other) <= 0.21 for one in places for other in places if one is not other)
        assert len({CLIENT_HOST, *(server.host for server in topology.fleet)}) == len(places)


def test_the_time_of_a_choice_is_judged_by_the_median() -> None:
    assert not decision_aim({"a decision, ms": Spread(10.5, 8.0, 11.0, 15)}).holds
    assert decision_aim({"a decision, ms": Spread(9.5, 9.0, 30.0, 15)}).holds
