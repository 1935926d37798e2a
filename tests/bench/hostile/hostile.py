"""`tests/bench/run hostile`: honest clients of real servers while hostile peers attack these, from one address or many.

Before each attack the same clients are measured without one: a ratio compares the two. Attackers run in a process of
their own at the lowest priority. On a small machine they still take processor time from honest peers. So after each
attack the clients are measured again, beside a process that burns the same processor time and sends nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import trio

from bench.hostile.attacks import ATTACKS, Order
from bench.kit.options import add_thin, add_threads, add_tokens, count
from bench.kit.report import Report, at_least, at_most, exactly, percentile
from bench.kit.sources import dial_from_sources, source
from llmnode.client.connect import aconnect, load_parts
from llmnode.core.ids import PeerId
from llmnode.core.policy import DialPolicy
from llmnode.core.span import split_evenly
from llmnode.errors import ConfigError, LlmnodeError, single_error
from llmnode.node.processes import all_ready, private_swarm, with_worker

if TYPE_CHECKING:
    import argparse
    from collections.abc import AsyncIterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Aim, Row
    from llmnode.client.connect import Client
    from llmnode.core.span import Span
    from llmnode.node.processes import ServerProcess

SPANS, TWINS, CLIENTS, SECONDS = 3, 2, 8, 20
THIN_SPANS, THIN_CLIENTS, THIN_SECONDS = 2, 2, 4
THIN_ATTACKS = ("silent", "refuse")
ALL_AT_ONCE = "all at once"
ADDRESSES = (1, 16)
PROMPT = "The history of computing begins long before the first electronic machines."
LOOK_EVERY_S = 0.5
SETTLE_S = 3.0
"""Attackers have this long until they are measured, and to be gone again."""
VICTIM = "127.0.0.200"
VICTIM_PORTS = 4
BURN = """
import sys, time
share, began_s = float(sys.argv[1]), time.monotonic()
while True:
    if time.process_time() > share * (time.monotonic() - began_s):
        time.sleep(0.001)
"""
"""A program that takes a share of one processor."""
PRIVATE_VICTIM = ("10.201.77.1", 22)
"""An address in a network that no node is in. A node that dials it has a socket to it for a while."""
PRIVATE_VICTIM_HEX = "014DC90A:0016"
"""The same as Linux lists it in `SOCKETS`."""
SOCKETS = Path("/proc/net/tcp")
CLIENT_HOST = "127.8.0.{}"
"""Each client has an address of its own, as users have: nodes share by address what they have."""


@dataclass(slots=True)
class Phase:
    """Some seconds of the honest clients and servers."""

    seconds: float
    tokens: int = 0
    token_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    banned: set[tuple[int, PeerId]] = field(default_factory=set)
    """Honest peers that a client avoided, with the number of the client."""
    memory_mib: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    """The most memory of each server, by its number."""
    dials: int = 0
    """Connections to victims."""
    private_dials: set[int] = field(default_factory=set)
    """The servers that had a socket to the private victim."""
    processors: dict[str, float] = field(default_factory=dict)
    """The processors that each kind of process took, in the mean. All servers count together."""

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds

    @property
    def p95_s(self) -> float:
        return percentile(self.token_s, 0.95) if self.token_s else float("inf")


def add(parser: argparse.ArgumentParser) -> None:
    names = ",".join([*ATTACKS, "all"])
    parser.add_argument("--only", default="", metavar="NAMES", help=f"some of {names} (default: each of them)")
    parser.add_argument("--seconds", type=count(), default=0, metavar="S", help=f"of each attack (default {SECONDS})")
    parser.add_argument("--clients", type=count(), default=0, metavar="N", help=f"honest clients (default {CLIENTS})")
    add_tokens(parser, 8)
    add_thin(parser)
    add_threads(parser)


async def run(options: Options) -> Report:
    thin = options.thin
    seconds = options.seconds or (THIN_SECONDS if thin else SECONDS)
    clients = options.clients or (THIN_CLIENTS if thin else CLIENTS)
    names = [each for each in options.only.split(",") if each] or [*(THIN_ATTACKS if thin else ATTACKS), "all"]
    if unknown := [each for each in names if each != "all" and each not in ATTACKS]:
        raise ConfigError(f"--only {','.join(unknown)}: give some of {','.join([*ATTACKS, 'all'])}")
    attacks = {ALL_AT_ONCE if each == "all" else each: [*ATTACKS] if each == "all" else [each] for each in names}
    parts = load_parts()
    spans = split_evenly(parts.model.blocks, THIN_SPANS if thin else SPANS) * TWINS
    rows: list[Row] = []
    aims: list[Aim] = []
    with single_error():
        async with private_swarm(spans, threads=options.threads) as servers, AsyncExitStack() as stack:
            await all_ready(servers)
            addresses = [each.address for each in servers]
            dial_from_sources()
            users: list[Client] = []
            for number in range(clients):
                source.set(CLIENT_HOST.format(number + 1))
                users.append(await stack.enter_async_context(aconnect(addresses, parts=parts)))
            await _measure(users, servers, 2, options.tokens)
            for at in ADDRESSES[: 1 if thin else None]:
                for name, its_parts in attacks.items():
                    print(f"{name}, {at} address{'es' * (at > 1)}", file=sys.stderr)
                    before = await _measure(users, servers, seconds, options.tokens)
                    async with _attacked(its_parts, at, servers, spans) as victim:
                        during = await _measure(users, servers, seconds, options.tokens, victim.attackers)
                        during.dials = victim.dials
                    async with _burning(during.processors["attackers"]) as burner:
                        burning = await _measure(users, servers, seconds, options.tokens, burner)
                    rows.append(_row(name, at, before, during, burning))
                    aims += _aims(name, at, before, during, burning, len(servers) + clients)
    conditions = {"servers": len(spans), "clients": clients, "seconds": seconds, "tokens": options.tokens}
    return Report(rows, aims, conditions, "a ratio is of the attack and the seconds before it")


# The attackers


@dataclass(slots=True)
class Victim:
    """A host that strangers name, and the number of connections to it. `attackers` is their process."""

    listeners: list[trio.SocketListener]
    attackers: int = 0
    dials: int = 0

    @property
    def places(self) -> list[tuple[str, int]]:
        return [(VICTIM, each.socket.getsockname()[1]) for each in self.listeners]

    async def count(self) -> None:
        async with trio.open_nursery() as nursery:
            for each in self.listeners:
                nursery.start_soon(self._count, each)

    async def _count(self, listener: trio.SocketListener) -> None:
        while True:
            stream = await listener.accept()
            self.dials += 1
            await stream.aclose()


@asynccontextmanager
async def _attacked(
    attacks: list[str], addresses: int, servers: Sequence[ServerProcess], spans: Sequence[Span]
) -> AsyncIterator[Victim]:
    """The attackers are there meanwhile, and their victim too."""
    victim = Victim([(await trio.open_tcp_listeners(0, host=VICTIM))[0] for _ in range(VICTIM_PORTS)])
    order = Order(
        attacks,
        addresses,
        [each.address for each in servers],
        [(each.start, each.end) for each in spans],
        [*victim.places, PRIVATE_VICTIM],
    )
    command = ["nice", "-n", "19", sys.executable, "-P", "-m", "bench.hostile.attacks", order.packed()]
    process = await trio.lowlevel.open_process(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=os.environ
    )
    async with trio.open_nursery() as nursery:
        nursery.start_soon(victim.count)
        try:
            assert process.stdout is not None
            assert await process.stdout.receive_some(), "the attackers have failed to start"
            victim.attackers = process.pid
            await trio.sleep(SETTLE_S)
            yield victim
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()
        nursery.cancel_scope.cancel()
    for each in victim.listeners:
        await each.aclose()
    await trio.sleep(SETTLE_S)


@asynccontextmanager
async def _burning(processors: float) -> AsyncIterator[int]:
    """A process of the attackers' priority takes the processors that they took. It sends nothing. Yields its id."""
    command = ["nice", "-n", "19", sys.executable, "-P", "-c", BURN, str(processors)]
    process = await trio.lowlevel.open_process(command)
    try:
        await trio.sleep(SETTLE_S)
        yield process.pid
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()


# The honest clients


async def _measure(
    users: Sequence[Client], servers: Sequence[ServerProcess], seconds: float, tokens: int, other: int = 0
) -> Phase:
    """Each user has texts generated, one after the other, until the time is over. `other` is a process beside them."""
    phase = Phase(seconds)
    until_s = trio.current_time() + seconds
    before_s = _processor_s(servers, other)
    async with trio.open_nursery() as beside:
        beside.start_soon(_watch, phase, users, servers)
        async with trio.open_nursery() as nursery:
            for number, user in enumerate(users):
                source.set(CLIENT_HOST.format(number + 1))
                nursery.start_soon(_generate, phase, user, until_s, tokens)
        beside.cancel_scope.cancel()
    phase.seconds += trio.current_time() - until_s
    after_s = _processor_s(servers, other)
    phase.processors = {each: (after_s[each] - before_s[each]) / phase.seconds for each in after_s}
    return phase


def _processor_s(servers: Sequence[ServerProcess], other: int) -> dict[str, float]:
    """The processor time of each kind of process since it began, in seconds."""
    taken: dict[str, float] = defaultdict(float)
    for server in servers:
        own, *workers = with_worker(server.pid)
        taken["servers"] += _taken_s(own)
        taken["workers"] += sum(map(_taken_s, workers))
    taken["clients"] = _taken_s(psutil.Process())
    taken["attackers"] = _taken_s(psutil.Process(other)) if other else 0.0
    return taken


def _taken_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def _generate(phase: Phase, user: Client, until_s: float, tokens: int) -> None:
    prompt = user.tokenizer.encode(PROMPT)
    while trio.current_time() < until_s:
        try:
            generation = await user.generate(prompt, tokens, stop_at_eos=False)
        except LlmnodeError as error:
            phase.failed.append(str(error))
            await trio.sleep(LOOK_EVERY_S)
        else:
            phase.tokens += len(generation.tokens)
            phase.token_s += [timing.total_s for timing in generation.timings]


async def _watch(phase: Phase, users: Sequence[Client], servers: Sequence[ServerProcess]) -> None:
    honest = [PeerId(each.peer) for each in servers]
    processes = [with_worker(each.pid) for each in servers]
    while True:
        for number, user in enumerate(users):
            phase.banned |= {(number, peer) for peer in honest if _is_avoided(user, peer)}
        for number, its in enumerate(processes):
            memory = sum(each.memory_info().rss - each.memory_info().shared for each in its)
            phase.memory_mib[number] = max(phase.memory_mib[number], memory / 2**20)
        if PRIVATE_VICTIM_HEX in SOCKETS.read_text():  # noqa: ASYNC240  no disk. Whose takes longer
            dials = [{tuple(each.raddr) for each in its[0].net_connections("tcp")} for its in processes]
            phase.private_dials |= {number for number, to in enumerate(dials) if PRIVATE_VICTIM in to}
        await trio.sleep(LOOK_EVERY_S)


def _is_avoided(user: Client, peer: PeerId) -> bool:
    finder, now_s = user.router.finder, trio.current_time()
    return finder.records.bans.is_banned(peer, now_s) or finder.records.suspicion.is_excluded(peer, now_s)


# The report


def _row(name: str, addresses: int, before: Phase, during: Phase, burning: Phase) -> Row:
    return {
        "attack": name,
        "addresses": addresses,
        "tokens/s before": before.tokens_per_s,
        "tokens/s": during.tokens_per_s,
        "ratio": during.tokens_per_s / before.tokens_per_s,
        "ratio beside burners": burning.tokens_per_s / before.tokens_per_s,
        "p95 of a token, ms": during.p95_s * 1e3,
        "p95 ratio": during.p95_s / before.p95_s,
        "failed": len(during.failed),
        "wrong bans": len(during.banned - before.banned),
        "a server, MiB": max(during.memory_mib.values()),
        "it grew, MiB": max(during.memory_mib[number] - before.memory_mib[number] for number in before.memory_mib),
        "dials to victims": during.dials,
        **{f"processors: {each}": taken for each, taken in during.processors.items()},
        **{f"before: {each}": taken for each, taken in before.processors.items() if each != "attackers"},
        "processors: burners": burning.processors["attackers"],
        "first failure": during.failed[0] if during.failed else "",
    }


def _aims(name: str, addresses: int, before: Phase, during: Phase, burning: Phase, nodes: int) -> list[Aim]:
    what, policy = f"{name}, from {addresses}: ", DialPolicy()
    allowed = nodes * VICTIM_PORTS * (policy.place_burst + policy.place_per_s * (during.seconds + SETTLE_S))
    return [
        at_least(f"{what}tokens/s of before", during.tokens_per_s / before.tokens_per_s, 0.8),
        at_least(f"{what}tokens/s beside burners", during.tokens_per_s / burning.tokens_per_s, 0.8),
        at_most(f"{what}p95 of before", during.p95_s / before.p95_s, 2.0),
        exactly(f"{what}failed sessions", len(during.failed)),
        exactly(f"{what}wrong bans", len(during.banned - before.banned)),
        exactly(f"{what}dials to victims beyond the gate", max(0, during.dials - int(allowed))),
        exactly(f"{what}servers that dialled a private network", len(during.private_dials)),
    ]
