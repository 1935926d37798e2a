"""The cost of choosing a route in a large swarm, in calls of functions."""

from __future__ import annotations

import random

import trio

from bench.placement.swarms import BLOCKS, large_swarm
from bench.routing.decisions import POSITIONS, WEIGHT, _announced, _finder
from llmnode.core.span import Span
from llmnode.session.pass_routes import PassRoutes
from llmnode.session.peer_finder import PeerFinder
from unit.calls import calls_counted

MOST_CALLS = 22
"""For each further server."""
MOST_CALLS_OF_A_MICROBATCH = 6000
"""However many servers there are: a choice among all of 1,600 takes 30,000."""


def test_a_further_server_costs_a_choice_few_calls() -> None:
    async def main() -> None:
        few, many = calls_among(400), calls_among(800)
        assert 400 < many - few <= 400 * MOST_CALLS

    trio.run(main)


def test_a_further_server_costs_a_microbatch_nothing() -> None:
    async def main() -> None:
        assert calls_of_a_microbatch(1600) <= MOST_CALLS_OF_A_MICROBATCH
        assert calls_of_a_microbatch(1600) < 1.5 * calls_of_a_microbatch(800)

    trio.run(main)


def calls_among(number: int) -> int:
    finder = finder_among(number)
    with calls_counted() as calls:
        finder._route(finder._candidates(POSITIONS), {}, POSITIONS, ())
    return calls[0]


def calls_of_a_microbatch(number: int) -> int:
    routes = PassRoutes(finder_among(number))
    assert routes._best(Span(0, BLOCKS), (), WEIGHT), "all servers are looked through"
    with calls_counted() as calls:
        routes._best(Span(0, BLOCKS), (), WEIGHT)
    return calls[0]


def finder_among(number: int) -> PeerFinder:
    rng, servers = random.Random(number), large_swarm(number)
    return _finder([_announced(each, servers, rng) for each in servers], rng)
