"""`tests/bench/run plan`: what `llmnode plan` forecasts, against what sessions and servers then do.

Four real servers and a client, twice. Blocks compute nothing, and take a time of their own (`paced.py`). A proxy before
each server gives its links a delay and a rate, which differ from topology to topology. In each, a plan is made as the
command makes it, out of what servers announce and what this machine measures. Then a client that has settled measures.
In the end a fifth server joins where the plan said that it would.
"""

from __future__ import annotations

import math
import random
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trio

from bench.kit.options import add_repeats, add_thin, add_tokens
from bench.kit.proxy import open_proxies
from bench.kit.report import Aim, Report, Row, Series, at_most, exactly
from bench.plan.fleet import PacedServer, start_fleet, start_paced
from bench.plan.paced import AGAIN_S, PacedLoader, forget_load_soon
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.span import Span
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.net.invite import Invite
from llmnode.node.app import THREAD, NodeConfig
from llmnode.node.plan import make_plan
from llmnode.node.processes import all_ready

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.proxy import Proxies
    from llmnode.client.connect import Client, ClientParts
    from llmnode.core.forecast import SessionForecast, SwarmForecast
    from llmnode.core.ids import PeerId
    from llmnode.node.plan import Plan
    from llmnode.node.processes import ServerProcess

HOSTS = tuple(f"127.0.1.{number + 1}" for number in range(4))
FLEETS = (
    (
        PacedServer(Span(0, 10), 8000, HOSTS[0]),
        PacedServer(Span(10, 20), 7000, HOSTS[1]),
        PacedServer(Span(20, 30), 10000, HOSTS[2]),
        PacedServer(Span(20, 30), 7000, HOSTS[3]),
    ),
    (
        PacedServer(Span(0, 14), 5000, HOSTS[0]),
        PacedServer(Span(14, 30), 6000, HOSTS[1]),
        PacedServer(Span(8, 24), 8000, HOSTS[2]),
        PacedServer(Span(14, 30), 9000, HOSTS[3]),
    ),
)
"""They are slow, so that many sessions leave the machine idle for most of the time. See the README."""
NEWCOMER_US = 7000
NEWCOMER_BLOCKS = 10
PROMPT_TOKENS = 96
SETTLE_S = 4 * AGAIN_S + 10.0
"""By then servers have measured what has changed, and have told each other that they are idle."""
DIRECT_WITHIN_S = 60.0
MOST_MEDIAN, MOST_WORST = 0.10, 0.20
SPEED, FIRST, ALL = "tokens/s", "first token, s", "many sessions, tokens/s"
COMPUTE, REST = "servers compute, ms", "the rest of a token, ms"
"""The parts of a token's time: not aims, but they say where an error comes from."""


@dataclass(frozen=True, slots=True)
class Topology:
    """One way in ms between the client and each server, and the rate of each link in one direction in bytes/s.

    Two servers have the longer delay of both between them, whichever has dialled.
    """

    name: str
    delays_ms: tuple[float, float, float, float]
    bytes_per_s: float = math.inf

    def shape(self, proxies: Proxies) -> None:
        """Give the links their delays and rates."""
        rate = self.bytes_per_s
        for index, delay_ms in enumerate(self.delays_ms):
            proxies.shape(one_way_s=delay_ms / 1e3, bytes_per_s=rate, only=index)
            for host, other_ms in zip(HOSTS, self.delays_ms, strict=True):
                one_way_s = max(delay_ms, other_ms) / 1e3
                proxies.shape_from(host, index, one_way_s=one_way_s, bytes_per_s=rate, back_bytes_per_s=rate)


SEED = 1
DRAWN = 12
MOST_DELAY_MS = 80.0
LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 200e3, 10e6


def _drawn() -> Iterator[Topology]:
    rng = random.Random(SEED)
    for number in range(DRAWN):
        first, second, third, fourth = (round(rng.uniform(0, MOST_DELAY_MS)) for _ in range(4))
        rate = math.exp(rng.uniform(math.log(LEAST_BYTES_PER_S), math.log(MOST_BYTES_PER_S)))
        yield Topology(f"drawn {number + 1}", (first, second, third, fourth), round(rate, -3))


TOPOLOGIES = (
    Topology("one house", (0, 0, 0, 0)),
    Topology("one city", (4, 4, 4, 4)),
    Topology("one country", (15, 15, 15, 15)),
    Topology("two sides of an ocean", (10, 60, 10, 60)),
    Topology("the faster replica is far", (10, 10, 10, 50)),
    Topology("all far", (60, 60, 60, 60)),
    Topology("narrow lines", (10, 10, 10, 10), 400e3),
    *_drawn(),
)
"""The first half is measured with the first fleet, and the others with the second one."""
THIN = ("one country",)


@dataclass(slots=True)
class _Result:
    """A forecast and the measurements for it."""

    name: str
    forecast: SwarmForecast
    series: Series = field(default_factory=Series)
    same_route: bool = False

    @property
    def session(self) -> SessionForecast:
        assert self.forecast.session is not None, "the swarm serves all blocks"
        return self.forecast.session

    @property
    def forecasts(self) -> dict[str, float]:
        return {
            SPEED: self.session.tokens_per_s,
            FIRST: self.session.first_token_s,
            ALL: self.forecast.tokens_per_s,
            COMPUTE: 1e3 * self.session.compute_s,
            REST: 1e3 * (self.session.step_s - self.session.compute_s),
        }

    @property
    def told(self) -> str:
        """In a line."""
        both = [f"{name} {self.series.median(name):.4g} ({self.forecasts[name]:.4g})" for name in self.series]
        return ", ".join([*both, "same route" if self.same_route else "another route"])

    def error(self, quantity: str) -> float | None:
        """By which share of the measured value the forecast is wrong. None if it was not measured."""
        if not self.series.get(quantity):
            return None
        measured = self.series.median(quantity)
        return self.forecasts[quantity] / measured - 1


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 3)
    add_tokens(parser, 24)
    add_thin(parser)


async def run(options: Options) -> Report:
    forget_load_soon()
    parts = load_parts(open_embedded())
    results: list[_Result] = []
    half = -(-len(TOPOLOGIES) // 2)
    for number, topologies in enumerate((TOPOLOGIES[:half], TOPOLOGIES[half:])):
        wanted = [each for each in topologies if not options.thin or each.name in THIN]
        if wanted:
            with single_error():
                async with AsyncExitStack() as stack:
                    results += await _measure_fleet(options, parts, stack, number, wanted)
    rows = [row for each in results for row in _rows(each)]
    conditions = {"tokens": options.tokens, "rounds": options.repeats, "prompt": PROMPT_TOKENS, "seed": SEED}
    return Report(rows, list(_aims(results)), conditions)


async def _measure_fleet(
    options: Options, parts: ClientParts, stack: AsyncExitStack, number: int, topologies: Sequence[Topology]
) -> list[_Result]:
    """With the newcomer at the end, if it is the last fleet."""
    fleet = FLEETS[number]
    quiet = Path(stack.enter_context(TemporaryDirectory())) / "quiet"
    proxies = stack.enter_context(open_proxies(len(fleet)))
    topologies[0].shape(proxies)  # before there are any links: each keeps the shape of its host
    rig = _Rig(options, parts, await start_fleet(stack, proxies, fleet, quiet), proxies, quiet)
    results = []
    for each in topologies:
        results.append(await rig.measure(each))
        print(f"{each.name}: {results[-1].told}", file=sys.stderr)
    if number == len(FLEETS) - 1 and not options.thin:
        results.append(await rig.measure_newcomer(stack))
    return results


class _Rig:
    """The servers, and clients that measure."""

    def __init__(
        self,
        options: Options,
        parts: ClientParts,
        servers: Sequence[ServerProcess],
        proxies: Proxies,
        quiet: Path,
    ) -> None:
        """The servers do not measure their network while there is a file `quiet`."""
        self._options = options
        self._parts = parts
        self._peers = [each.address for each in servers]
        self._proxies = proxies
        self._quiet = quiet
        self._prompt = parts.tokenizer.encode(topics["types"])[:PROMPT_TOKENS]

    async def measure(self, topology: Topology) -> _Result:
        """The swarm as it is."""
        await self._settle(topology)
        plan = await self._plan()
        return await self._compare(topology.name, plan.without)

    async def measure_newcomer(self, stack: AsyncExitStack) -> _Result:
        """The swarm with one more server, on the client's own machine, where the plan says that it would be."""
        await self._settle(Topology("", (15, 15, 15, 15)))
        plan = await self._plan()
        newcomer = PacedServer(plan.node.span, NEWCOMER_US)
        started = await start_paced(stack, newcomer, self._quiet, ["--peers", *self._peers])
        await all_ready(started)
        await self._settle(Topology("", (15, 15, 15, 15)))
        self._peers.append(started[0].address)
        return await self._compare("with the newcomer", plan.with_it)

    async def _settle(self, topology: Topology) -> None:
        """Let servers measure these links, and tell each other. Then they measure no more."""
        self._quiet.unlink(missing_ok=True)
        topology.shape(self._proxies)
        await trio.sleep(SETTLE_S)
        self._quiet.touch()
        await trio.sleep(AGAIN_S)

    async def _plan(self) -> Plan:
        loader = partial(PacedLoader, block_s=NEWCOMER_US / 1e6)
        config = NodeConfig(blocks=str(NEWCOMER_BLOCKS), worker=THREAD, threads=1, make_loader=loader)
        return await make_plan(config, Invite(tuple(self._peers)), PROMPT_TOKENS)

    async def _compare(self, name: str, forecast: SwarmForecast) -> _Result:
        result = _Result(name, forecast)
        async with aconnect(self._peers, parts=self._parts) as client:
            route = await self._until_settled(client)
            result.same_route = route == [each.hop.peer for each in result.session.hops]
            for _ in range(self._options.repeats):
                generation = await client.generate(self._prompt, self._options.tokens, stop_at_eos=False)
                timings = generation.timings[1:]
                step_s = statistics.median(each.total_s for each in timings)
                compute_s = statistics.median(sum(hop.compute_us for hop in each.hops) / 1e6 for each in timings)
                parts = {COMPUTE: 1e3 * compute_s, REST: 1e3 * (step_s - compute_s)}
                result.series.note({SPEED: 1 / step_s, FIRST: generation.finish.usage.first_token_s, **parts})
            if not self._options.thin:
                await self._many(client, forecast.sessions)  # by this, servers of the same blocks prove themselves
                result.series.note({ALL: await self._many(client, forecast.sessions)})
        return result

    async def _until_settled(self, client: Client) -> list[PeerId]:
        """Until servers push to each other, and the client knows what it has measured. Returns its route."""
        with trio.fail_after(DIRECT_WITHIN_S):
            while len(client.router.finder.reaching.round_trips_s()) < len(self._peers):  # noqa: ASYNC110 - begun as it connected
                await trio.sleep(0.1)
            while True:
                generation = await client.generate(self._prompt[:8], 18, stop_at_eos=False)
                hops = generation.timings[-1].hops
                if all(hop.direct for hop in hops[1:]):
                    break
        await client.generate(self._prompt[:8], 2, stop_at_eos=False)
        return [each.peer for each in client.route]

    async def _many(self, client: Client, texts: int) -> float:
        """The tokens of many texts in a second, while all of them are going."""
        times_s: list[list[float]] = []

        async def generate() -> None:
            own: list[float] = []
            async for _token in client.generate(self._prompt[:8], self._options.tokens, stop_at_eos=False):
                own.append(trio.current_time())
            times_s.append(own)

        async with trio.open_nursery() as nursery:
            for _ in range(texts):
                nursery.start_soon(generate)
        since_s, until_s = max(own[0] for own in times_s), min(own[-1] for own in times_s)
        tokens = sum(since_s < each <= until_s for own in times_s for each in own)
        return tokens / (until_s - since_s)


def _rows(result: _Result) -> Iterator[Row]:
    for quantity, forecast in result.forecasts.items():
        error = result.error(quantity)
        if error is not None:
            yield {
                "topology": result.name,
                "quantity": quantity,
                "forecast": forecast,
                "measured": result.series.row()[quantity],
                "error, %": 100 * error,
                "same route": str(result.same_route),
            }


def _aims(results: Sequence[_Result]) -> Iterator[Aim]:
    for quantity in (SPEED, FIRST, ALL):
        errors = [abs(error) for each in results if (error := each.error(quantity)) is not None]
        if errors:
            yield at_most(f"{quantity}: median error", statistics.median(errors), MOST_MEDIAN)
            yield at_most(f"{quantity}: worst error", max(errors), MOST_WORST)
    yield exactly("other routes than forecast", sum(not each.same_route for each in results), 0)
