"""`bench placement`: its bound and its flow are what they say, and the plan comes near the optimum in small swarms."""

from __future__ import annotations

import random
from functools import partial

import pytest

from bench.placement.exact import best_throughput
from bench.placement.layouts import Cluster, Model, read_cluster, read_published
from bench.placement.placement import CASES, settled
from bench.placement.precisions import BLOCKS as PRECISION_BLOCKS
from bench.placement.precisions import precision_rows
from bench.placement.swarms import mean_between
from llmnode.core.ids import PeerId
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.policy import LayoutPolicy, PlanPolicy
from llmnode.core.placement.servers import (
    PlacedServer,
    block_speeds,
    most_throughput,
    one_speed,
    shared_speed,
    throughput,
)
from llmnode.core.placement.stages import best_of, layouts
from llmnode.core.span import Span


def test_a_mean_counts_each_value_for_the_time_that_it_lasts() -> None:
    steps = [(10.0, 4.0), (20.0, 8.0)]
    assert mean_between(steps, 0.0, 40.0) == (10 * 4 + 20 * 8) / 40
    assert mean_between(steps, 15.0, 25.0) == 6.0
    assert mean_between(steps, 5.0, 10.0) == 0.0 and mean_between(steps, 30.0, 40.0) == 8.0


def joined(seed: int, blocks: int = 8, servers: int = 6, most: int = 4) -> list[PlacedServer]:
    rng, swarm = random.Random(seed), list[PlacedServer]()
    for number in range(servers):
        speeds = rng.choice([one_speed, shared_speed])(rng.uniform(10, 100), rng.randint(2, most))
        span = choose_span(len(speeds), block_speeds(blocks, swarm))
        swarm.append(PlacedServer(PeerId(f"{number}"), span, speeds))
    return swarm


@pytest.mark.parametrize("seed", range(6))
def test_the_plan_lies_between_the_paper_s_greedy_rule_and_the_optimum(seed: int) -> None:
    swarm = joined(seed)
    best = best_throughput(8, swarm)
    plan = throughput(8, settled(8, swarm, LayoutPolicy().plan))
    assert throughput(8, swarm) <= plan + 1e-6
    assert 0.75 * best <= plan <= best + 1e-6
    assert 0.85 * best <= throughput(8, best_of(8, layouts(8, swarm))) <= best + 1e-6
    assert best <= most_throughput(8, swarm) + 1e-6


def test_a_flow_is_that_of_the_slowest_block_if_links_are_fast() -> None:
    speeds = {0: (8.0, 4.0), 1: (8.0, 4.0), 2: (6.0, 3.0)}
    names = ["source", "sink", *map(str, speeds)]
    cluster = Cluster(Model(3, 1), speeds, {(one, other): 100.0 for one in names for other in names})
    layout = cluster.placed({0: Span(0, 2), 1: Span(1, 3), 2: Span(0, 1)})
    assert cluster.flow(layout) == pytest.approx(4.0)
    slow = Cluster(Model(3, 1), speeds, {**cluster.links_bytes_per_s, ("0", "1"): 1.0, ("1", "0"): 1.0})
    assert slow.flow(slow.placed({0: Span(0, 2), 1: Span(2, 3)})) == pytest.approx(1.0)


@pytest.mark.parametrize(("name", "model"), CASES)
def test_all_published_layouts_hold_the_whole_model(name: str, model: str) -> None:
    cluster = read_cluster(name, model)
    for layout in read_published(name, model, cluster).values():
        assert set().union(*(range(span.start, span.end) for span in layout.values())) == set(
            range(cluster.model.layers)
        )
        assert cluster.flow(cluster.placed(layout)) > 0.0


@pytest.mark.parametrize(("name", "model"), CASES)
def test_our_layout_is_worth_more_than_every_published_one(name: str, model: str) -> None:
    cluster = read_cluster(name, model)
    ours = best_of(cluster.model.layers, layouts(cluster.model.layers, cluster.machines()), cluster.flow)
    published = read_published(name, model, cluster)
    assert cluster.flow(ours) >= 1.05 * max(cluster.flow(cluster.placed(each)) for each in published.values())


def test_a_small_swarm_stays_where_it_is_if_that_is_best() -> None:
    swarm = [
        PlacedServer(PeerId(str(number)), Span(2 * number, 2 * number + 2), one_speed(5.0, 2)) for number in range(4)
    ]
    assert settled(8, swarm, PlanPolicy()) == swarm


def test_nodes_that_choose_their_precision_by_need_give_a_swarm_more_throughput() -> None:
    _, ratios = precision_rows(40, partial(settled, PRECISION_BLOCKS, policy=PlanPolicy(tries=120, pairs=3)))
    assert min(ratios[:3]) > 1.0
