"""`llmnode bench forwarding`: hidden states from server to server, against every hop by way of the client.

Three real servers and a client, with a proxy before each server that makes every link as long as wanted; so each node
reaches each other one through a delay. Two clients, alike but for `ClientPolicy.push`, take turns in each round. What a
step waits for is its time less what the servers say that they computed.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pydoc_data.topics import topics
from typing import TYPE_CHECKING

import torch
import trio

from bench.kit.paired import change_percent
from bench.kit.report import Aim, Row, environment, print_report, spread
from bench.kit.shaped import shaped_swarm
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.policy import ClientPolicy
from llmnode.core.span import split_evenly
from llmnode.errors import single_error
from llmnode.models.sources.embedded import open_embedded
from llmnode.models.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from bench.kit.proxy import Address, Proxies
    from llmnode.client.connect import Client, ClientParts
    from llmnode.client.generate import TokenTiming

PROMPT = "The history of computing begins long before the first electronic machines. " * 2
SERVERS = 3
ROUND_TRIPS_S = (0.0, 0.02, 0.1)
DIRECT, RELAYED = "direct", "relayed"
PASSAGES = SERVERS + 1
"""One-way delays that a step cannot do without: into the first server, between two, and out of the last."""
PREFILL_TOKENS = 1024
CHUNK_TOKENS = 128
PINGS = 8
PING_BYTES = 2304  # as one position of SmolLM2 in fp32
SETTLE_S = 60.0

MOST_STEP = 1.05
MOST_WAITING = 0.7
MOST_APART = 1e-4
"""Relative, of what is the same but for the order of sums."""


@dataclass(frozen=True, slots=True)
class ForwardingBench:
    """What was asked for. `threads` is torch's, in this process and in each server."""

    repeats: int
    tokens: int
    thin: bool
    threads: int
    json: bool


@dataclass(slots=True)
class _Variant:
    """Of one round trip time. What a round's decodes took is their median, in ms."""

    name: str
    round_trip_s: float
    step_ms: list[float] = field(default_factory=list)
    compute_ms: list[float] = field(default_factory=list)
    queue_ms: list[float] = field(default_factory=list)
    waiting_ms: list[float] = field(default_factory=list)
    one_way_ms: list[float] = field(default_factory=list)
    """What one way took over bare TCP through such a proxy, just before."""
    of_least: list[float] = field(default_factory=list)
    """The step, over its compute and `PASSAGES` times as much."""
    of_nominal: list[float] = field(default_factory=list)
    """The same with the delays that the proxies were told."""
    prefill_s: list[float] = field(default_factory=list)
    direct: int = 0
    """Inputs that came from the hop before, of `given`: those of all hops but the first."""
    given: int = 0
    texts: set[tuple[int, ...]] = field(default_factory=set)
    """The chosen tokens of each round."""
    prefilled: list[torch.Tensor] = field(default_factory=list)
    """The last position of each prefill, which a server on a busy machine computes in more and smaller parts."""


async def bench_forwarding(config: ForwardingBench) -> None:
    torch.set_num_threads(config.threads)
    folder = open_embedded()
    parts = load_parts(folder)
    round_trips = ROUND_TRIPS_S[:2] if config.thin else ROUND_TRIPS_S
    variants = [_Variant(name, seconds) for seconds in round_trips for name in (DIRECT, RELAYED)]
    with single_error():
        async with _open_rig(config, parts) as rig:
            await rig.until_direct()
            for number in range(-1, config.repeats):  # round -1 warms everything up
                print(f"round {number + 1} of {config.repeats}", file=sys.stderr)
                await rig.measure_round(variants, discard=number < 0, turn_round=bool(number % 2))
    conditions = environment(config.threads) | {
        "servers": SERVERS,
        "tokens": config.tokens,
        "rounds": config.repeats,
        "prefill_positions": rig.prefill_tokens,
        "prefill_chunk": CHUNK_TOKENS,
        "proxies": "a TCP proxy before each server, in one process; it delays what it passes on, both ways",
    }
    rows = [_row(each, relayed) for each, relayed in zip(variants, _relayed_of(variants), strict=True)]
    print_report("forwarding", conditions, rows, _aims(variants), as_json=config.json)


@asynccontextmanager
async def _open_rig(config: ForwardingBench, parts: ClientParts) -> AsyncIterator[_Rig]:
    async with AsyncExitStack() as stack:
        spans = split_evenly(parts.model.blocks, SERVERS)
        servers, proxies = await stack.enter_async_context(shaped_swarm(spans, config.threads, spare=1))
        clients = {}
        for name, push in ((DIRECT, True), (RELAYED, False)):
            policy = ClientPolicy(push=push, chunk_tokens=CHUNK_TOKENS)
            peers = [server.address for server in servers]
            clients[name] = await stack.enter_async_context(aconnect(peers, parts=parts, policy=policy))
        nursery = await stack.enter_async_context(trio.open_nursery())
        stack.callback(nursery.cancel_scope.cancel)
        proxies.aim(SERVERS, await nursery.start(_echo))
        yield _Rig(config, parts, clients, proxies)


class _Rig:
    """Clients, servers and the delays between them."""

    def __init__(
        self, config: ForwardingBench, parts: ClientParts, clients: dict[str, Client], proxies: Proxies
    ) -> None:
        self.prefill_tokens = PREFILL_TOKENS // 4 if config.thin else PREFILL_TOKENS
        self._tokens = config.tokens
        self._clients = clients
        self._proxies = proxies
        self._prompt = parts.tokenizer.encode(PROMPT)
        text = parts.tokenizer.encode(topics["types"])[: self.prefill_tokens]
        self._prefill = to_bytes(parts.ends.embed(text, 0))
        self._hidden_size = parts.model.hidden_size

    async def until_direct(self) -> None:
        """Servers push to those that they have heard of, which takes some seconds at first."""
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
        variant.one_way_ms.append(1e3 * await self._one_way_s())
        generation = await client.generate(self._prompt, self._tokens, stop_at_eos=False)
        _note(variant, generation.timings[1:])
        async with client.inference_session(self.prefill_tokens) as session:
            began_s = time.perf_counter()
            output = await session.step(self._prefill)
            variant.prefill_s.append(time.perf_counter() - began_s)
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


def _note(variant: _Variant, decodes: Sequence[TokenTiming]) -> None:
    steps = [timing.step_s for timing in decodes]
    compute = [sum(hop.compute_us for hop in timing.hops) / 1e6 for timing in decodes]
    queue = [sum(hop.queue_us for hop in timing.hops) / 1e6 for timing in decodes]
    both = list(zip(steps, compute, strict=True))
    variant.step_ms.append(1e3 * statistics.median(steps))
    variant.compute_ms.append(1e3 * statistics.median(compute))
    variant.queue_ms.append(1e3 * statistics.median(queue))
    variant.waiting_ms.append(1e3 * statistics.median(step - computed for step, computed in both))
    for ratios, one_way_s in (
        (variant.of_least, variant.one_way_ms[-1] / 1e3),
        (variant.of_nominal, variant.round_trip_s / 2),
    ):
        ratios.append(statistics.median(step / (computed + PASSAGES * one_way_s) for step, computed in both))
    inputs = [hop.direct for timing in decodes for hop in timing.hops[1:]]
    variant.direct += sum(inputs)
    variant.given += len(inputs)


def _relayed_of(variants: Sequence[_Variant]) -> list[_Variant]:
    relayed = {variant.round_trip_s: variant for variant in variants if variant.name == RELAYED}
    return [relayed[variant.round_trip_s] for variant in variants]


def _row(variant: _Variant, relayed: _Variant) -> Row:
    row: Row = {
        "round trip, ms": 1e3 * variant.round_trip_s,
        "path": variant.name,
        "step, ms": spread(variant.step_ms),
        "compute": spread(variant.compute_ms),
        "queue": spread(variant.queue_ms),
        "waiting": spread(variant.waiting_ms),
        "TCP one way": spread(variant.one_way_ms),
        "of least": spread(variant.of_least),
        "of nominal": spread(variant.of_nominal),
        "went direct": variant.direct / variant.given,
        "prefill, s": spread(variant.prefill_s),
    }
    if variant is not relayed:
        row["step, % of relayed"] = change_percent(relayed.step_ms, variant.step_ms)
        row["prefill, % of relayed"] = change_percent(relayed.prefill_s, variant.prefill_s)
    return row


def _aims(variants: Sequence[_Variant]) -> list[Aim]:
    texts = {text for variant in variants for text in variant.texts}
    first, *others = (prefilled for variant in variants for prefilled in variant.prefilled)
    apart = max(float((each - first).norm() / first.norm()) for each in others)
    aims = [
        Aim("different texts of all variants and rounds", len(texts), "= 1", len(texts) == 1),
        Aim("prefills of all variants and rounds, most apart", apart, f"<= {MOST_APART}", apart <= MOST_APART),
    ]
    for direct, relayed in zip(variants, _relayed_of(variants), strict=True):
        if direct is relayed:
            continue
        at = f"at {1e3 * direct.round_trip_s:.0f} ms"
        share = direct.direct / direct.given
        aims.append(Aim(f"{at}: share of steps that went direct", share, "= 1", share == 1))
        if direct.round_trip_s:
            least = statistics.median(direct.of_least)
            aims.append(
                Aim(f"{at}: step over compute and {PASSAGES} ways of TCP", least, f"<= {MOST_STEP}", least <= MOST_STEP)
            )
            pairs = zip(direct.waiting_ms, relayed.waiting_ms, strict=True)
            ratio = statistics.median(ours / theirs for ours, theirs in pairs)
            aims.append(Aim(f"{at}: waiting over relayed", ratio, f"<= {MOST_WAITING}", ratio <= MOST_WAITING))
        else:
            change = change_percent(relayed.step_ms, direct.step_ms)
            name = f"{at}: step to relayed, %, low end of the interval"
            aims.append(Aim(name, change.low, "<= 0", change.low <= 0))
    return aims
