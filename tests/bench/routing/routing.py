"""`tests/bench/run routing`: the route that a client chooses, against all routes, tried one by one.

Each topology is drawn from a seed. Its servers are real processes whose blocks take a time of their own. The proxy
before each gives every link the delay between its two ends, and the upload of each end. A client measures its round
trips, and chooses. Then it takes every route in turn, and measures the steps. In the end it chooses again.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bench.kit.drawing import axes_in
from bench.kit.options import add_plot, add_repeats, add_thin, add_tokens
from bench.kit.proxy import open_proxies
from bench.kit.report import Report, Spread, at_most, below
from bench.plan.fleet import start_fleet
from bench.routing.beam import beam_route
from bench.routing.decisions import decision_row
from bench.routing.directed import directed_client
from bench.routing.topologies import all_routes, draw_topology, thin_topology
from llmnode.client.connect import load_parts
from llmnode.core.forecast import ClientPlace, forecast_route
from llmnode.core.ids import PeerId
from llmnode.core.peers.standing import Standing, candidate_of
from llmnode.core.peers.ways import believed_ways
from llmnode.core.policy import StandingPolicy
from llmnode.core.route import Hop
from llmnode.errors import NoRoute, single_error
from llmnode.models.embedded import open_embedded

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from bench.kit.options import Options
    from bench.kit.report import Aim, Row
    from bench.routing.directed import DirectedClient
    from bench.routing.topologies import Topology
    from llmnode.client.connect import ClientParts
    from llmnode.core.announcement import Announcement
    from llmnode.core.model import ModelInfo
    from llmnode.core.route import Route

CHOSEN, EXPERIENCED, AT_ONCE = "chosen", "chosen after sessions", "chosen at once"
BEAMS = {"beam of 4": 4, "beam of 1": 1}
MOST_WORSE = 1.10
MOST_DECISION_MS = 10.0
LARGE = (2000, 10_000)


@dataclass(slots=True)
class _Outcome:
    """One topology: each route's step, as it was measured and as it was forecast; and the routes that were chosen."""

    topology: Topology
    measured_s: dict[Route, list[float]] = field(default_factory=dict)
    forecast_s: dict[Route, float] = field(default_factory=dict)
    chosen: dict[str, Route] = field(default_factory=dict)
    not_direct: int = 0

    def step_s(self, route: Route) -> float:
        return statistics.median(self.measured_s[route])

    @property
    def best_s(self) -> float:
        return min(map(self.step_s, self.measured_s))

    def of_best(self, name: str) -> float:
        """The step of a chosen route, over that of the best one."""
        return self.step_s(self.chosen[name]) / self.best_s

    @property
    def forecast_errors(self) -> list[float]:
        return [self.forecast_s[route] / self.step_s(route) - 1 for route in self.measured_s]


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 10)
    add_tokens(parser, 8, "steps of each route")
    add_thin(parser)
    add_plot(parser, "the steps of all routes")


async def run(options: Options) -> Report:
    parts = load_parts(open_embedded())
    outcomes = []
    topologies = [thin_topology()] if options.thin else [draw_topology(seed) for seed in range(options.repeats)]
    with single_error():
        for each in topologies:
            outcomes.append(await _measure(options, parts, each))
            print(f"topology {each.seed}: {len(outcomes)} of {len(topologies)}", file=sys.stderr)
    if options.plot is not None:
        _draw(options.plot, outcomes)
    decisions = [decision_row(number) for number in LARGE[: 1 if options.thin else 2]]
    conditions = {"steps": options.tokens, "seeds": [each.seed for each in topologies]}
    rows = [*map(_row, outcomes), *decisions]
    legend = "steps of the chosen route over those of the best one; ms of a step"
    return Report(rows, list(_aims(outcomes, decisions)), conditions, legend)


async def _measure(options: Options, parts: ClientParts, topology: Topology) -> _Outcome:
    outcome, servers = _Outcome(topology), len(topology.fleet)
    async with AsyncExitStack() as stack:
        proxies = stack.enter_context(open_proxies(servers))
        topology.shape(proxies)
        started = await start_fleet(stack, proxies, topology.fleet)
        peers = [each.address for each in started]
        async with directed_client(peers, parts, topology.seed) as first:
            await first.until_measured(servers)
        async with directed_client(peers, parts, topology.seed) as client:
            outcome.chosen[AT_ONCE] = await client.choose()
            await client.until_measured(servers)
            outcome.chosen[CHOSEN] = await client.choose()
            announced, held = client.servers, [Hop(each.peer, each.offer.span) for each in client.servers]
            outcome.chosen |= _beams(parts.model, announced, client.round_trips_s)
            place = ClientPlace(client.round_trips_s, 0.0, topology.client.upload_bytes_per_s)
            routes = dict.fromkeys([*all_routes(parts.model.blocks, held), *outcome.chosen.values()])
            await _try(outcome, client, [*routes], options.tokens)
            outcome.chosen[EXPERIENCED] = await client.choose()
            best = min(outcome.measured_s, key=outcome.step_s)
            await _try(outcome, client, [*dict.fromkeys([best, *outcome.chosen.values()])], options.tokens)
            for route in outcome.measured_s:
                outcome.forecast_s[route] = forecast_route(parts.model, announced, place, 1, route).step_s
    _explain(outcome, [PeerId(each.peer) for each in started])
    return outcome


async def _try(outcome: _Outcome, client: DirectedClient, routes: Sequence[Route], steps: int) -> None:
    for route in routes:
        step_s, is_direct = await client.step_s(route, steps)
        outcome.measured_s.setdefault(route, []).append(step_s)
        outcome.not_direct += not is_direct


def _beams(
    model: ModelInfo, servers: Sequence[Announcement], round_trips_s: Mapping[PeerId, float]
) -> dict[str, Route]:
    """The routes of the paper's search, by what a client without experience believes. Without those that find none."""
    candidates = [candidate_of(each, model.row_bytes, round_trips_s.get(each.peer)) for each in servers]
    costs = Standing(StandingPolicy()).costs(candidates, 0.0)
    held, ways = [Hop(each.peer, each.offer.span) for each in servers], believed_ways(servers, round_trips_s)
    found: dict[str, Route] = {}
    for name, width in BEAMS.items():
        try:
            found[name], _cost_s = beam_route(model.blocks, held, costs, ways, width)
        except NoRoute:
            continue
    return found


def _explain(outcome: _Outcome, peers: Sequence[PeerId]) -> None:
    """Each route on stderr, by the numbers of its servers."""
    for route in sorted(outcome.measured_s, key=outcome.step_s):
        names = [name for name, chosen in outcome.chosen.items() if chosen == route]
        hops = " ".join(f"{peers.index(hop.peer)}{hop.span}" for hop in route)
        measured, forecast = 1e3 * outcome.step_s(route), 1e3 * outcome.forecast_s[route]
        print(f"  {measured:6.1f} ms, forecast {forecast:6.1f}: {hops} {', '.join(names)}", file=sys.stderr)


def _row(outcome: _Outcome) -> Row:
    steps_s = [outcome.step_s(route) for route in outcome.measured_s]
    errors = [abs(each) for each in outcome.forecast_errors]
    best = min(outcome.measured_s, key=outcome.step_s)
    row: Row = {"topology": f"seed {outcome.topology.seed}", "routes": len(steps_s), "hops of the best": len(best)}
    row |= {"the best, ms": 1e3 * min(steps_s), "the median, ms": 1e3 * statistics.median(steps_s)}
    row |= {name: outcome.of_best(name) for name in outcome.chosen}
    row |= {"forecasts off, % (median)": 100 * statistics.median(errors), "(worst)": 100 * max(errors)}
    return row | {"not pushed": outcome.not_direct}


def _draw(path: Path, outcomes: Sequence[_Outcome]) -> None:
    """The step of each route as a dot, and those that were chosen, over that of the best one."""
    seeds = [each.topology.seed for each in outcomes]
    with axes_in(path, "bench routing", "seed of the topology", "step, of that of the best route") as axes:
        for each in outcomes:
            steps = [each.step_s(route) / each.best_s for route in each.measured_s]
            axes.plot([each.topology.seed] * len(steps), steps, ".", color="grey")
        for name, mark in ((CHOSEN, "o"), (AT_ONCE, "s"), ("beam of 1", "^")):
            with_one = [each for each in outcomes if name in each.chosen]
            places = [each.topology.seed for each in with_one], [each.of_best(name) for each in with_one]
            axes.plot(*places, mark, label=name, fillstyle="none")
        axes.set_xticks(seeds)
        axes.legend()


def _aims(outcomes: Sequence[_Outcome], decisions: Sequence[Row]) -> Iterator[Aim]:
    for name in (CHOSEN, EXPERIENCED):
        of_best = [each.of_best(name) for each in outcomes]
        yield at_most(f"{name}, of the best route: median", statistics.median(of_best), MOST_WORSE)
        yield at_most(f"{name}, of the best route: worst", max(of_best), MOST_WORSE)
    yield decision_aim(decisions[0])


def decision_aim(row: Row) -> Aim:
    """The aim of a choice, by the median: what most choices take, and not the fastest one."""
    taken_ms = row["a decision, ms"]
    assert isinstance(taken_ms, Spread)
    return below(f"a choice among {LARGE[0]} servers, ms (median)", taken_ms.median, MOST_DECISION_MS)
