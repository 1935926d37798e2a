"""`tests/bench/run placement`: where servers go, against the paper's rules, exact optima and published layouts.

There are four parts, none of which needs a network or a model. The paper's figure 4 is simulated, with throughputs net
of moves. Small cases are compared with an integer program. Layouts for the clusters of Helix are judged by one maximal
flow. Decisions are timed in large swarms.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from bench.kit.options import add_plot, add_thin, count
from bench.kit.report import Report, Row, at_least, at_most, below
from bench.placement import precisions
from bench.placement.churn import churn_row
from bench.placement.exact import best_throughput
from bench.placement.layouts import read_cluster, read_published
from bench.placement.swarms import (
    BLOCKS,
    SEED,
    THIN,
    VARIANTS,
    allowed_gap_s,
    bounds_tokens_per_s,
    figure_4,
    fleet_of,
    mean_between,
    scale_row,
)
from llmnode.core.ids import PeerId
from llmnode.core.placement.host_rows import MOST_BLOCKS
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds, most_throughput, one_speed, throughput
from llmnode.core.placement.stages import best_of, carried_out, fewest_hops, layouts
from llmnode.node import values
from llmnode.testing.placement import Host, Uptime

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim
    from bench.placement.swarms import Fleet
    from llmnode.core.placement.stages import Layout
    from llmnode.testing.placement import SwarmFigures

PAPER = "paper, p = 20 %"
OURS = "stages and the plan"
CASES = (("24", "llama30b"), ("24", "llama70b"), ("42", "llama70b"))
PLANS = 80
"""A swarm follows at most this many plans, one after the other."""
LIARS = 5
"""Liars of each kind among the hosts of figure 4, of which 15 to 110 are on."""
LIED_TO = f"{LIARS} boasters, {LIARS} ghosts"
LIED_TO_SEEDS = 8
LIAR_TOKENS_PER_S = 5.0
LIED_TO_S = 2 * 3600.0
CURVE_S = 900.0
"""A curve of figure 4 has the mean of each quarter of an hour."""
MOST_HOSTS = 20_000
SMALL = (8, 12, 5)
"""Servers, blocks, and the most blocks of one server: HiGHS needs seconds for each case."""


def add(parser: argparse.ArgumentParser) -> None:
    add_thin(parser)
    add_plot(parser, "the throughput over time")
    parser.add_argument(
        "--hosts",
        type=values.path,
        metavar="FILE",
        help="simulate these hosts alone, on for a day without --trace: a CSV file whose first line is "
        "host,tokens_per_s,blocks, where blocks is the most that a host may hold",
    )
    parser.add_argument(
        "--trace",
        type=values.path,
        metavar="FILE",
        help="simulate these hosts alone, at the times when they were on: a CSV file that begins with "
        "host,from_s,to_s and has one line an uptime; without --hosts it may have tokens_per_s and blocks, else they "
        "are drawn as in the paper",
    )
    parser.add_argument(
        "--blocks", type=count(1, MOST_BLOCKS), metavar="N", help=f"of the model that they serve (default {BLOCKS})"
    )
    parser.add_argument(
        "--churn",
        type=count(20, MOST_HOSTS),
        nargs="+",
        metavar="N",
        help="simulate this many hosts alone that come and go, once for each number: synthetic, of two classes",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="the virtual time of --churn after the first hosts have joined (default 60)",
    )


def run(options: Options) -> Report:
    if options.churn:
        return _churn(options)
    fleet = fleet_of(options)
    rows, aims = _figure_4(options, fleet)
    if options.hosts is None and options.trace is None:
        for part in (_lied_to, _small_cases, _published_layouts, _precisions, _large_swarms):
            more_rows, more_aims = part(options)
            rows += more_rows
            aims += more_aims
    load_s = fleet.conditions.load_s_per_block
    conditions = {"seed": SEED, "hosts": len(fleet.hosts), "blocks": fleet.blocks, "load_s_per_block": load_s}
    return Report(rows, aims, conditions, "see the README")


def _churn(options: Options) -> Report:
    """A report of these rows alone."""
    blocks = options.blocks or BLOCKS
    rows = [churn_row(number, options.minutes, blocks) for number in options.churn or ()]
    return Report(rows, [], {"seed": SEED, "blocks": blocks, "minutes": options.minutes}, "see the README")


def _figure_4(options: Options, fleet: Fleet) -> tuple[list[Row], list[Aim]]:
    allowed_s, bounds = allowed_gap_s(fleet, RebalancePolicy()), bounds_tokens_per_s(fleet)
    bound = mean_between(bounds, 0.0, fleet.seconds)
    rows: list[Row] = [{"variant": "bound on all placements", "net tokens/s": bound, "of the bound": 1.0}]
    outcomes: dict[str, SwarmFigures] = {}
    for name, outcome in figure_4(fleet, THIN if options.thin else tuple(VARIANTS)):
        outcomes[name] = outcome
        rows.append(_row(name, outcome, bound, allowed_s))
    if options.plot is not None:
        _draw(options, fleet, {"bound": bounds} | {name: each.throughputs for name, each in outcomes.items()})
    plan = outcomes["the plan"]
    aims = [at_least("the plan, of the bound", plan.net_tokens_per_s / bound, 0.95)]
    if PAPER in outcomes:
        aims.append(
            at_most("moves of the plan, of those of the paper's rule", plan.moves / max(1, outcomes[PAPER].moves), 1.0)
        )
    aims.append(at_most("seconds by which the plan closed gaps late", plan.gap_s_beyond(allowed_s), 0.0))
    return rows, aims


def _row(name: str, outcome: SwarmFigures, bound: float, allowed_s: float) -> Row:
    return {
        "variant": name,
        "net tokens/s": outcome.net_tokens_per_s,
        "of the bound": outcome.net_tokens_per_s / bound,
        "moves": outcome.moves,
        "loaded blocks": outcome.loaded_blocks,
        "most moving at once": outcome.most_moving,
        "gaps, s": outcome.gap_s,
        "gaps that were closed late, s": outcome.gap_s_beyond(allowed_s),
    }


def _lied_to(options: Options) -> tuple[list[Row], list[Aim]]:
    """The first hours once more, without and with liars, for several schedules of the hosts.

    Each node then has a plan of its own, which takes minutes.
    """
    rows, shares = list[Row](), dict[str, list[float]]()
    for seed in range(1 if options.thin else LIED_TO_SEEDS):
        fleet = fleet_of(options, seed)
        fleet = replace(fleet, seconds=min(fleet.seconds, LIED_TO_S))
        bound = mean_between(bounds_tokens_per_s(fleet), 0.0, fleet.seconds)
        allowed_s = allowed_gap_s(fleet, RebalancePolicy())
        for name, more in (("no liars", []), (LIED_TO, liars(fleet))):
            for _, outcome in figure_4(replace(fleet, hosts=[*fleet.hosts, *more]), ["the plan"]):
                row = _row(f"the plan, first {fleet.seconds / 3600:.3g} h, {name}", outcome, bound, allowed_s)
                rows.append(row | {"schedule": seed})
                shares.setdefault(name, []).append(outcome.net_tokens_per_s / bound)
    ratio = statistics.fmean(shares[LIED_TO]) / statistics.fmean(shares["no liars"])
    return rows, [at_least("the plan beside liars, of its share of the bound without them", ratio, 0.85)]


def liars(fleet: Fleet) -> list[Host]:
    """Hosts that are always on. Boasters claim 1000 times their speed, and ghosts announce blocks and serve nothing."""
    always, own = [Uptime(0.0, fleet.seconds)], one_speed(LIAR_TOKENS_PER_S, min(10, fleet.blocks))
    return [
        Host(PeerId(f"liar-{number}"), own, always, boast=1000.0, ghost=number >= LIARS) for number in range(2 * LIARS)
    ]


def _precisions(options: Options) -> tuple[list[Row], list[Aim]]:
    move = partial(settled, precisions.BLOCKS, policy=PlanPolicy())
    rows, ratios = precisions.precision_rows(20 if options.thin else precisions.SEEDS, move)
    return rows, [at_least("throughput with nodes on auto, of that by the former rule", min(ratios), 1.0)]


def _small_cases(options: Options) -> tuple[list[Row], list[Aim]]:
    servers_number, blocks, most = SMALL
    shares: dict[str, list[float]] = {"new servers only": [], "the plan": [], "bound on all placements": []}
    for seed in range(1 if options.thin else 6):
        rng, servers = random.Random(seed), list[PlacedServer]()
        for number in range(servers_number):
            own = one_speed(rng.uniform(0, 100), rng.randint(1, most))
            span = choose_span(len(own), block_speeds(blocks, servers))
            servers.append(PlacedServer(PeerId(f"{number:02}"), span, own))
        best = best_throughput(blocks, servers)
        shares["new servers only"].append(throughput(blocks, servers) / best)
        shares["the plan"].append(throughput(blocks, settled(blocks, servers, PlanPolicy())) / best)
        shares["bound on all placements"].append(most_throughput(blocks, servers) / best)
    rows: list[Row] = [
        {"variant": f"small cases: {name}", "of the optimum": sum(each) / len(each), "worst": min(each)}
        for name, each in shares.items()
    ]
    return rows, []


def settled(blocks: int, servers: list[PlacedServer], policy: PlanPolicy) -> list[PlacedServer]:
    """The servers after all moves of plan after plan."""
    for _plan in range(PLANS):
        before, servers = servers, carried_out(blocks, servers, policy)
        if servers == before:
            break
    return servers


def _published_layouts(options: Options) -> tuple[list[Row], list[Aim]]:
    rows: list[Row] = []
    aims: list[Aim] = []
    for name, model in CASES[:1] if options.thin else CASES:
        cluster, case = read_cluster(name, model), f"{model} on {name} machines"
        blocks, machines = cluster.model.layers, cluster.machines()
        bound = most_throughput(blocks, machines)
        found = {who: cluster.placed(layout) for who, layout in read_published(name, model, cluster).items()}
        best = max(map(cluster.flow, found.values()))
        began_s, slowest = time.process_time(), _Slowest()
        found[OURS] = best_of(blocks, slowest.of(layouts(blocks, machines)), cluster.flow)
        taken_s = time.process_time() - began_s
        found[f"{OURS}, chosen without links"] = best_of(blocks, layouts(blocks, machines))
        rows += [
            {
                "variant": f"{case}: {who}",
                "net tokens/s": cluster.flow(layout),
                "of the bound": cluster.flow(layout) / bound,
                "links ignored": throughput(blocks, layout),
                "fewest hops": fewest_hops(blocks, layout),
            }
            for who, layout in found.items()
        ]
        rows[-2] |= {"decisions": slowest.decisions, "all of them, s": taken_s}
        aims.append(at_least(f"{case}: {OURS}, of the best layout", cluster.flow(found[OURS]) / best, 1.0))
        aims.append(below(f"{case}: the slowest decision, ms", slowest.decision_ms, 50.0))
    return rows, aims


class _Slowest:
    """The processor time of the slowest decision, and the number of all."""

    def __init__(self) -> None:
        self.decision_ms, self.decisions = 0.0, 0

    def of(self, decisions: Iterator[Layout]) -> Iterator[Layout]:
        began_s = time.process_time()
        for each in decisions:
            self.decision_ms = max(self.decision_ms, 1000 * (time.process_time() - began_s))
            self.decisions += 1
            yield each
            began_s = time.process_time()


def _large_swarms(options: Options) -> tuple[list[Row], list[Aim]]:
    rows = [scale_row(number) for number in ((200,) if options.thin else (200, 2000, 10_000))]
    by_number = {row["variant"]: row for row in rows}
    if (row := by_number.get("2000 servers")) is None:
        return rows, []
    return rows, [below("one decision among 2000 servers, ms", float(str(row["plan, ms"])), 50.0)]


def _draw(options: Options, fleet: Fleet, throughputs: Mapping[str, Sequence[tuple[float, float]]]) -> None:
    from bench.kit.drawing import axes_in

    assert options.plot is not None
    with axes_in(options.plot, fleet.name, "hours", "tokens/s") as axes:
        for name, steps in throughputs.items():
            dashes = "--" if name == "bound" else "-"
            axes.plot(*zip(*_curve(steps, fleet.seconds), strict=True), dashes, label=name, linewidth=1.0)
        axes.legend()


def _curve(steps: Sequence[tuple[float, float]], seconds: float) -> Iterator[tuple[float, float]]:
    """Hours, and the mean of the tokens/s over the `CURVE_S` around each."""
    for number in range(math.ceil(seconds / CURVE_S)):
        from_s, to_s = CURVE_S * number, min(seconds, CURVE_S * (number + 1))
        yield (from_s + to_s) / 7200, mean_between(steps, from_s, to_s)
