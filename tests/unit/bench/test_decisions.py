"""The cost of choosing a route in a large swarm, in calls of functions."""

from __future__ import annotations

import random

import trio

from bench.placement.swarms import large_swarm
from bench.routing.decisions import POSITIONS, _announced, _finder
from unit.calls import calls_counted

MOST_CALLS = 22
"""For each further server."""


def test_a_further_server_costs_a_choice_few_calls() -> None:
    async def main() -> None:
        few, many = calls_among(400), calls_among(800)
        assert 400 < many - few <= 400 * MOST_CALLS

    trio.run(main)


def calls_among(number: int) -> int:
    rng, servers = random.Random(number), large_swarm(number)
    finder = _finder([_announced(each, servers, rng) for each in servers], rng)
    with calls_counted() as calls:
        finder._route(finder._candidates(POSITIONS), {}, POSITIONS, ())
    return calls[0]
