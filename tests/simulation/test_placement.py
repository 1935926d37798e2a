"""Laws of placement, in swarms of throughputs: they come to rest, close gaps, and neither stampede nor follow liars."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.servers import one_speed
from llmnode.testing.placement import Host, Rule, SwarmConditions, Uptime, simulate_placement, two_classes
from llmnode.testing.simulate import seeds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.testing.placement import SwarmFigures

BLOCKS, MOST_BLOCKS = 12, 5
HOUR_S = 3600.0
CONDITIONS = SwarmConditions(blocks=BLOCKS, load_s_per_block=10.0, views=2)
POLICY = RebalancePolicy()
QUICK = PlanPolicy(tries=120, pairs=3)
"""Smaller plans, so that many seeds take seconds."""
CLOSED_WITHIN_S = (
    CONDITIONS.lifetime_s  # a crash is noticed
    + CONDITIONS.stale_s
    + 2 * CONDITIONS.announce_every_s  # two announcements are lost
    + POLICY.check_every_s * (1 + POLICY.jitter)  # a check is not due before
    + MOST_BLOCKS * CONDITIONS.load_s_per_block
)


def drawn(seed: int, number: int, to_s: float = 4 * HOUR_S) -> list[Host]:
    rng = random.Random(seed)
    return [
        Host(
            PeerId(f"host-{each:03}"),
            one_speed(rng.uniform(5, 100), rng.randint(1, MOST_BLOCKS)),
            [Uptime(rng.uniform(0, 60), to_s)],
        )
        for each in range(number)
    ]


def simulated(hosts: Sequence[Host], seed: int, hours: float, conditions: SwarmConditions = CONDITIONS) -> SwarmFigures:
    return simulate_placement(hosts, Rule.PLAN, hours * HOUR_S, seed, conditions, POLICY, QUICK)


@cache
def honest(seed: int) -> SwarmFigures:
    """Each kind of liars is compared with the same swarm."""
    return simulated(drawn(seed, 16), seed, 2)


def moves_after(outcome: SwarmFigures, time_s: float) -> int:
    return sum(moved_s > time_s for moves in outcome.moved.values() for moved_s, _ in moves)


@pytest.mark.parametrize("seed", seeds(30))
def test_a_swarm_that_nobody_leaves_comes_to_rest(seed: int) -> None:
    hosts = drawn(seed, 10 + seed % 8)
    outcome = simulated(hosts, seed, 3)
    assert moves_after(outcome, 2 * HOUR_S) == 0, outcome.moved
    assert max(map(len, outcome.moved.values()), default=0) <= 5, "no node goes back and forth"


@pytest.mark.parametrize("seed", seeds(30))
def test_a_gap_is_closed_in_time_by_nodes_that_can(seed: int) -> None:
    """A third of the hosts crash at once, all of which serve one end of the model."""
    rng = random.Random(seed)
    hosts = drawn(seed, 16)
    crashing = {host.peer for host in rng.sample(hosts, 5)}
    hosts = [
        replace(host, uptimes=[Uptime(host.uptimes[0].from_s, HOUR_S, crashes=True)]) if host.peer in crashing else host
        for host in hosts
    ]
    outcome = simulated(hosts, seed, 2)
    late = [gap for gap in outcome.gaps if gap[1] - gap[0] > CLOSED_WITHIN_S]
    assert not late, (outcome.gaps, CLOSED_WITHIN_S)
    assert outcome.throughputs[-1][1] > 0.0


@pytest.mark.parametrize("seed", seeds(20))
def test_a_crowd_does_not_stampede_to_a_gap(seed: int) -> None:
    """All servers of the first blocks crash together, in a swarm that has many others."""
    hosts = [replace(host, speeds=one_speed(50.0, 3)) for host in drawn(seed, 24)]
    outcome = simulated(hosts, seed, 0.5)
    before = outcome.moves
    first = [host.peer for host in hosts][:6]
    crashing = [
        replace(host, uptimes=[Uptime(host.uptimes[0].from_s, HOUR_S, crashes=True)]) if host.peer in first else host
        for host in hosts
    ]
    outcome = simulated(crashing, seed, 2)
    assert outcome.most_moving <= 8
    assert outcome.moves - before <= 3 * len(first)


@pytest.mark.parametrize("seed", seeds(15, long_run=30))  # the last that takes a new branch is 8
@pytest.mark.parametrize("kind", ["boasters", "ghosts"])
def test_liars_empty_no_block(seed: int, kind: str) -> None:
    hosts = drawn(seed, 16)
    liars = [
        Host(
            PeerId(f"liar-{each}"),
            one_speed(50.0, 6),
            [Uptime(600.0, 4 * HOUR_S)],
            boast=1000.0,
            ghost=kind == "ghosts",
        )
        for each in range(3)
    ]
    lied_to = simulated([*hosts, *liars], seed, 2)
    assert not [gap for gap in lied_to.gaps if gap[1] - gap[0] > CLOSED_WITHIN_S]
    assert lied_to.net_tokens_per_s > 0.5 * honest(seed).net_tokens_per_s


def test_the_seed_decides_everything() -> None:
    hosts = two_classes(3, 20, days=0.1)
    assert simulated(hosts, 3, 2) == simulated(hosts, 3, 2)
    assert simulated(hosts, 3, 2) != simulated(hosts, 4, 2)


def test_nodes_that_keep_serving_while_they_load_lose_less() -> None:
    hosts = two_classes(1, 24, days=0.25)
    keeping = simulated(hosts, 1, 6, replace(CONDITIONS, keeps_serving=True))
    assert keeping.net_tokens_per_s > simulated(hosts, 1, 6).net_tokens_per_s


def test_hosts_that_are_on_at_first_come_one_after_the_other_if_they_are_to() -> None:
    first_s = [host.uptimes[0].from_s for host in two_classes(0, 200) if host.uptimes]
    spread_s = [host.uptimes[0].from_s for host in two_classes(0, 200, joins_over_s=600.0) if host.uptimes]
    assert first_s.count(0.0) > 50
    assert spread_s.count(0.0) == 0
    assert sum(from_s < 600 for from_s in spread_s) > 50


def test_views_that_hear_news_every_few_seconds_change_only_then() -> None:
    hosts = drawn(1, 16)
    at_once, rarely = (simulated(hosts, 1, 1, replace(CONDITIONS, exchange_every_s=every_s)) for every_s in (0.0, 5.0))
    assert rarely != at_once
    assert rarely.decisions > 16 * 40
    assert rarely.net_tokens_per_s == pytest.approx(at_once.net_tokens_per_s, rel=0.3)
