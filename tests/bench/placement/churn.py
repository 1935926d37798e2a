"""Swarms of hundreds to thousands of hosts that come and go, in the simulator: what they do, and what it takes."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from bench.placement.swarms import Fleet, allowed_gap_s, mean_between
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, most_throughput
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.testing.placement import Rule, SwarmConditions, simulate_placement, two_classes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.kit.report import Row
    from llmnode.testing.placement import SwarmFigures

SEED = 0
JOINS_OVER_S = 600.0
"""The hosts that are on at first join within this time. Only what comes later is compared with the bound."""
BOUND_EVERY_S = 60.0


def churn_row(number: int, minutes: float, blocks: int) -> Row:
    """This many hosts of both classes, for `minutes` of virtual time after the first have joined."""
    seconds = JOINS_OVER_S + 60 * minutes
    fleet = Fleet(two_classes(SEED, number, joins_over_s=JOINS_OVER_S, most_blocks=min(10, blocks)), seconds, blocks)
    conditions = SwarmConditions(blocks=blocks, exchange_every_s=SwarmPolicy().exchange_every_s)
    began_s = time.process_time()
    figures = simulate_placement(fleet.hosts, Rule.PLAN, seconds, SEED, conditions)
    taken_s = time.process_time() - began_s
    on = [uptime for host in fleet.hosts for uptime in host.uptimes if uptime.from_s < seconds <= uptime.to_s]
    return {
        "variant": f"{number} hosts that come and go, {minutes:g} min",
        "on at the end": len(on),
        "net tokens/s": tokens_per_s(figures, JOINS_OVER_S),
        "of the bound": tokens_per_s(figures, JOINS_OVER_S) / _bound_tokens_per_s(fleet, JOINS_OVER_S),
        "moves": figures.moves,
        "gaps, s": figures.gap_s,
        "gaps that were closed late, s": figures.gap_s_beyond(allowed_gap_s(fleet, RebalancePolicy())),
        "decisions": figures.decisions,
        "CPU, s per virtual hour": taken_s / seconds * 3600,
        "CPU per decision, ms": 1000 * taken_s / max(1, figures.decisions),
    }


def tokens_per_s(figures: SwarmFigures, from_s: float) -> float:
    """The throughput from then on, net of all moves."""
    replayed = figures.replayed_tokens / (figures.seconds - from_s)
    return mean_between(figures.throughputs, from_s, figures.seconds) - replayed


def _bound_tokens_per_s(fleet: Fleet, from_s: float) -> float:
    """The mean of the bound on all placements of the servers that are on, looked at once a minute."""
    times: Sequence[float] = [from_s + BOUND_EVERY_S * each for each in range(int((fleet.seconds - from_s) / 60) or 1)]
    return sum(_bound_at(fleet, time_s) for time_s in times) / len(times)


def _bound_at(fleet: Fleet, time_s: float) -> float:
    on = [
        PlacedServer(host.peer, Span(0, 1), host.speeds)
        for host in fleet.hosts
        if any(uptime.from_s <= time_s < uptime.to_s for uptime in host.uptimes)
    ]
    return most_throughput(fleet.blocks, on)
