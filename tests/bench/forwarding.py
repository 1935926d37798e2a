"""`tests/bench/run forwarding`: hidden states from server to server, against every hop through the client.

There are three real servers and a client. A proxy before each server gives every link the same delay, also those
between servers. Two clients, which differ in `PushPolicy.enabled`, take turns in each round. The wait of a step is its
time without the compute time that the servers report.
"""

from __future__ import annotations

import statistics
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.kit.options import add_repeats, add_thin, add_threads, add_tokens
from bench.kit.paired import change_percent
from bench.kit.report import Report, Row, Series, at_most, exactly, ratios, rounds
from bench.kit.shaped import shaped_swarm
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import ClientPolicy, PushPolicy
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.proxy import Address, Proxies
    from bench.kit.report import Aim
    from llmnode.client.connect import Client, ClientParts
    from llmnode.client.generate import TokenTiming

PROMPT = "The history of computing begins long before the first electronic machines. " * 2
SERVERS = 3
ROUND_TRIPS_S = (0.0, 0.02, 0.1)
DIRECT, RELAYED = "direct", "relayed"
PASSAGES = SERVERS + 1
"""The one-way delays that every step has: into the first server, between servers, and out of the last one."""
PREFILL_TOKENS = 1024
CHUNK_TOKENS = 128
PINGS = 8
PING_BYTES = 2304  # the size of one position of SmolLM2 in fp32
SETTLE_S = 60.0

MOST_STEP = 1.05
MOST_WAITING = 0.7
MOST_APART = 1e-4
"""The largest relative error between outputs that differ only in the order of sums."""


# A round's time is the median of its decodes. `ONE_WAY` is the time of one way over bare TCP through such a proxy, just
# before. `OF_LEAST` is the step's time, divided by its compute time and `PASSAGES` of these ways. `OF_NOMINAL` takes
# the delays that the proxies were given instead.
STEP, COMPUTE, QUEUE, WAITING, ONE_WAY = "step, ms", "compute", "queue", "waiting", "TCP one way"
OF_LEAST, OF_NOMINAL, PREFILL = "of least", "of nominal", "prefill, s"


@dataclass(slots=True)
class _Variant:
    """A path through the servers, at one round trip time."""

    name: str
    round_trip_s: float
    series: Series = field(default_factory=Series)
    direct: int = 0
    """The inputs that came from the hop before, out of `given`: the inputs of all hops but the first."""
    given: int = 0
    texts: set[tuple[int, ...]] = field(default_factory=set)
    """The tokens of each round."""
    prefilled: list[torch.Tensor] = field(default_factory=list)
    """The last position of each prefill. A server on a busy machine computes a prefill in more and smaller parts."""


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)
    add_tokens(parser, 24)
    add_thin(parser)
    add_threads(parser)


async def run(options: Options) -> Report:
    parts = load_parts(open_embedded())
    round_trips = ROUND_TRIPS_S[:2] if options.thin else ROUND_TRIPS_S
    variants = [_Variant(name, seconds) for seconds in round_trips for name in (DIRECT, RELAYED)]
    with single_error():
        async with _open_rig(options, parts) as rig:
            await rig.until_direct()
            for number in rounds(options.repeats, thin=options.thin):
                await rig.measure_round(variants, discard=number < 0, turn_round=bool(number % 2))
    conditions = {
        "servers": SERVERS,
        "tokens": options.tokens,
        "rounds": options.repeats,
        "prefill_positions": rig.prefill_tokens,
        "prefill_chunk": CHUNK_TOKENS,
        "proxies": "a TCP proxy before each server, in one process; it delays what it passes on, both ways",
    }
    rows = [_row(each, relayed) for each, relayed in zip(variants, _relayed_of(variants), strict=True)]
    return Report(rows, _aims(variants), conditions)


@asynccontextmanager
async def _open_rig(options: Options, parts: ClientParts) -> AsyncIterator[_Rig]:
    async with AsyncExitStack() as stack:
        spans = split_evenly(parts.model.blocks, SERVERS)
        servers, proxies = await stack.enter_async_context(shaped_swarm(spans, options.threads, spare=1))
        clients = {}
        for name, push in ((DIRECT, True), (RELAYED, False)):
            policy = ClientPolicy(push=PushPolicy(push), chunk_tokens=CHUNK_TOKENS)
            peers = [server.address for server in servers]
            clients[name] = await stack.enter_async_context(aconnect(peers, parts=parts, policy=policy))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        proxies.aim(SERVERS, await nursery.start(_echo))
        yield _Rig(options, parts, clients, proxies)


class _Rig:
    """Clients and servers, with delays between them."""

    def __init__(self, options: Options, parts: ClientParts, clients: dict[str, Client], proxies: Proxies) -> None:
        self.prefill_tokens = PREFILL_TOKENS // 4 if options.thin else PREFILL_TOKENS
        self._tokens = options.tokens
        self._clients = clients
        self._proxies = proxies
        self._prompt = parts.tokenizer.encode(PROMPT)
        text = parts.tokenizer.encode(topics["types"])[: self.prefill_tokens]
        self._prefill = to_bytes(parts.ends.embed(text, 0))
        self._hidden_size = parts.model.hidden_size

    async def until_direct(self) -> None:
        """Wait until servers push to each other. They have to hear of each other first, which takes some seconds."""
        with trio.fail_after(SETTLE_S):
            while True:
                generation = await self._clients[DIRECT].generate(self._prompt, 2, stop_at_eos=False)
                if all(hop.direct for hop in generation.timings[-1].hops[1:]):
                    return

    async def measure_round(self, variants: Sequence[_Variant], *, discard: bool, turn_round: bool) -> None:
        for round_trip_s in dict.fromkeys(variant.round_trip_s for variant in variants):
            self._proxies.shape(one_way_s=round_trip_s / 2)
            both = [variant for variant in variants if variant.round_trip_s == round_trip_s]
            for variant in reversed(both) if turn_round else both:
                await self._measure(_Variant(variant.name, round_trip_s) if discard else variant)

    async def _measure(self, variant: _Variant) -> None:
        client = self._clients[variant.name]
        one_way_s = await self._one_way_s()
        generation = await client.generate(self._prompt, self._tokens, stop_at_eos=False)
        _note(variant, one_way_s, generation.timings[1:])
        async with client.inference_session(self.prefill_tokens) as session:
            began_s = time.perf_counter()
            output = await session.step(self._prefill)
            variant.series.note({PREFILL: time.perf_counter() - began_s})
            assert not session.recoveries
        variant.texts.add(generation.token_ids)
        variant.prefilled.append(from_bytes(output, self._hidden_size)[-1].clone())

    async def _one_way_s(self) -> float:
        times = []
        async with await trio.open_tcp_stream(*self._proxies.addresses[SERVERS]) as stream:
            for _ in range(PINGS):
                began_s = time.perf_counter()
                await stream.send_all(bytes(PING_BYTES))
                missing = PING_BYTES
                while missing:
                    missing -= len(await stream.receive_some(missing))
                times.append((time.perf_counter() - began_s) / 2)
        return statistics.median(times)


async def _echo(task_status: trio.TaskStatus[Address]) -> None:
    async def echo(stream: trio.SocketStream) -> None:
        async for data in stream:
            await stream.send_all(data)

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    task_status.started(listener.socket.getsockname())
    await trio.serve_listeners(echo, [listener])


def _note(variant: _Variant, one_way_s: float, decodes: Sequence[TokenTiming]) -> None:
    steps = [timing.step_s for timing in decodes]
    compute = [sum(hop.compute_us for hop in timing.hops) / 1e6 for timing in decodes]
    both = list(zip(steps, compute, strict=True))

    def over(delay_s: float) -> float:
        return statistics.median(step / (computed + PASSAGES * delay_s) for step, computed in both)

    variant.series.note(
        {
            STEP: 1e3 * statistics.median(steps),
            COMPUTE: 1e3 * statistics.median(compute),
            QUEUE: statistics.median(sum(hop.queue_us for hop in timing.hops) / 1e3 for timing in decodes),
            WAITING: 1e3 * statistics.median(step - computed for step, computed in both),
            ONE_WAY: 1e3 * one_way_s,
            OF_LEAST: over(one_way_s),
            OF_NOMINAL: over(variant.round_trip_s / 2),
        }
    )
    inputs = [hop.direct for timing in decodes for hop in timing.hops[1:]]
    variant.direct += sum(inputs)
    variant.given += len(inputs)


def _relayed_of(variants: Sequence[_Variant]) -> list[_Variant]:
    relayed = {variant.round_trip_s: variant for variant in variants if variant.name == RELAYED}
    return [relayed[variant.round_trip_s] for variant in variants]


def _row(variant: _Variant, relayed: _Variant) -> Row:
    row: Row = {"round trip, ms": 1e3 * variant.round_trip_s, "path": variant.name}
    row |= variant.series.row()
    row["went direct"] = variant.direct / variant.given
    if variant is not relayed:
        row["step, % of relayed"] = change_percent(relayed.series[STEP], variant.series[STEP])
        row["prefill, % of relayed"] = change_percent(relayed.series[PREFILL], variant.series[PREFILL])
    return row


def _aims(variants: Sequence[_Variant]) -> Iterator[Aim]:
    texts = {text for variant in variants for text in variant.texts}
    first, *others = (prefilled for variant in variants for prefilled in variant.prefilled)
    apart = max(float((each - first).norm() / first.norm()) for each in others)
    yield exactly("different texts of all variants and rounds", len(texts), 1)
    yield at_most("prefills of all variants and rounds, most apart", apart, MOST_APART)
    for direct, relayed in zip(variants, _relayed_of(variants), strict=True):
        if direct is relayed:
            continue
        at, ours, theirs = f"at {1e3 * direct.round_trip_s:.0f} ms", direct.series, relayed.series
        yield exactly(f"{at}: share of steps that went direct", direct.direct / direct.given, 1)
        if direct.round_trip_s:
            yield at_most(f"{at}: step over compute and {PASSAGES} ways of TCP", ours.median(OF_LEAST), MOST_STEP)
            waiting = statistics.median(ratios(ours[WAITING], theirs[WAITING]))
            yield at_most(f"{at}: waiting over relayed", waiting, MOST_WAITING)
        else:
            change = change_percent(theirs[STEP], ours[STEP])
            yield at_most(f"{at}: step to relayed, %, low end of the interval", change.low, 0)
