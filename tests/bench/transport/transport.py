"""`llmnode bench transport`: our transport beside go-libp2p, py-libp2p as it is, and bare TCP, in one run.

Of each kind two peers, each a process, one of which dials the other: directly, and through proxies that make the link
long or narrow. What is sent is the same, and measured by who sends it (`peers.py`, `tests/interop/go`).
"""

from __future__ import annotations

import math
import statistics
import sys
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import trio

from bench.kit.proxy import open_proxies
from bench.kit.report import Aim, Row, environment, print_report, spread
from bench.transport.steered import go_peer, python_peer, steer
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.kit.proxy import Address
    from bench.transport.steered import SteeredPeer

OURS, GO = "llmnode", "go-libp2p"
PYTHON = (OURS, "py-libp2p", "tcp")
MESSAGE_BYTES = 16 << 10
SMALL_BYTES = 2304  # as one position of SmolLM2 in fp32
OPEN_BYTES = 1 << 10
STREAMS = 8
CONNECTS = 5

MOST_ROUND_TRIP = 2.0
MOST_CONNECT_MS = 20.0
MOST_BESIDE = 3.0


@dataclass(frozen=True, slots=True)
class Way:
    """Between two peers, and how much to send over it."""

    name: str
    round_trip_s: float
    bytes_per_s: float
    bulk_bytes: int
    messages: int
    opens: int


NEAR = Way("0 ms", 0.0, math.inf, 64 << 20, 400, 40)
FAR = Way("100 ms", 0.1, math.inf, 32 << 20, 20, 8)
NARROW = Way("20 ms, 10 MB/s", 0.02, 10e6, 8 << 20, 50, 8)
WAYS = (NEAR, FAR, NARROW)


@dataclass(frozen=True, slots=True)
class TransportBench:
    """What was asked for."""

    repeats: int
    thin: bool
    json: bool


@dataclass(slots=True)
class _Variant:
    """One kind over one way; a value a round."""

    kind: str
    way: Way
    dialer: SteeredPeer
    server: SteeredPeer
    address: str
    connect_ms: list[float] = field(default_factory=list)
    message_ms: list[float] = field(default_factory=list)
    slow_message_ms: list[float] = field(default_factory=list)
    """p99."""
    open_ms: list[float] = field(default_factory=list)
    one_mb_s: list[float] = field(default_factory=list)
    many_mb_s: list[float] = field(default_factory=list)
    cpu_s_gb: list[float] = field(default_factory=list)
    alone_ms: list[float] = field(default_factory=list)
    """p99 of small messages."""
    beside_ms: list[float] = field(default_factory=list)
    """The same beside a bulk transfer."""


async def bench_transport(config: TransportBench) -> None:
    with TemporaryDirectory(prefix="llmnode-transport-") as folder:
        commands = {kind: python_peer(kind) for kind in PYTHON}
        try:
            commands[GO] = await trio.to_thread.run_sync(go_peer, Path(folder))
        except ConfigError as error:
            print(f"without go-libp2p: {error}", file=sys.stderr)
        async with AsyncExitStack() as stack:
            proxies = stack.enter_context(open_proxies(len(commands) * len(WAYS)))
            variants: list[_Variant] = []
            for kind, command in commands.items():
                server = await stack.enter_async_context(steer(command))
                dialer = await stack.enter_async_context(steer(command))
                for way in WAYS:
                    index = len(variants)
                    proxies.aim(index, _where(server.address))
                    proxies.shape(one_way_s=way.round_trip_s / 2, bytes_per_s=way.bytes_per_s, only=index)
                    moved = _moved(server.address, proxies.addresses[index])
                    variants.append(_Variant(kind, way, dialer, server, server.address if way is NEAR else moved))
            for number in range(config.repeats + 1):
                turn = number % len(variants)
                for variant in [*variants[turn:], *variants[:turn]]:
                    await _measure(variant, config, keep=number > 0)
                print(f"round {number} of {config.repeats}", file=sys.stderr)
    surroundings = environment(1) | {
        "rounds": config.repeats,
        "message_bytes": MESSAGE_BYTES,
        "small_bytes": SMALL_BYTES,
        "proxy": "for long and narrow ways: a TCP proxy in Python, one process for all",
    }
    rows = [_row(variant) for variant in variants]
    print_report(
        "transport", surroundings, rows, _aims(variants), as_json=config.json, legend="median (lowest-highest)"
    )


async def _measure(variant: _Variant, config: TransportBench, *, keep: bool) -> None:
    """One round; the first one warms up. Connections are made anew: the windows of streams begin small."""
    dialer, peer, way = variant.dialer, variant.server.peer, variant.way
    scale = 0.25 if config.thin else 1.0
    connects: list[float] = []
    for _ in range(CONNECTS if way is NEAR else 1):
        await dialer.tell("disconnect", peer=peer)
        connects.append((await dialer.tell("connect", address=variant.address))["seconds"])
    repeats, bulk = int(way.messages * scale), int(way.bulk_bytes * scale)
    messages = (await dialer.tell("echo", peer=peer, bytes=MESSAGE_BYTES, repeats=repeats))["seconds"]
    opened = (await dialer.tell("open", peer=peer, bytes=OPEN_BYTES, repeats=int(way.opens * scale)))["seconds"]
    before_s = await _cpu_s(variant)
    one_s = (await dialer.tell("send", peer=peer, bytes=bulk, streams=1))["seconds"]
    cpu_s = await _cpu_s(variant) - before_s
    many_s = (await dialer.tell("send", peer=peer, bytes=bulk // STREAMS, streams=STREAMS))["seconds"]
    alone = (await dialer.tell("echo", peer=peer, bytes=SMALL_BYTES, repeats=repeats))["seconds"]
    beside = (await dialer.tell("beside", peer=peer, bytes=2 * bulk, small=SMALL_BYTES))["seconds"]
    if keep:
        variant.connect_ms.append(1e3 * statistics.median(connects))
        variant.message_ms.append(1e3 * statistics.median(messages))
        variant.slow_message_ms.append(1e3 * _p99(messages))
        variant.open_ms.append(1e3 * statistics.median(opened))
        variant.one_mb_s.append(bulk / one_s / 1e6)
        variant.many_mb_s.append(bulk / many_s / 1e6)
        variant.cpu_s_gb.append(cpu_s / bulk * 1e9)
        variant.alone_ms.append(1e3 * _p99(alone))
        variant.beside_ms.append(1e3 * _p99(beside))


async def _cpu_s(variant: _Variant) -> float:
    """Of both processes."""
    return float((await variant.dialer.tell("cpu"))["seconds"] + (await variant.server.tell("cpu"))["seconds"])


def _p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, int(0.99 * len(values)))]


def _where(address: str) -> Address:
    """Of `/ip4/HOST/tcp/PORT/...`, or of `HOST:PORT`."""
    if address.startswith("/"):
        _, _, host, _, port, *_ = address.split("/")
    else:
        host, _, port = address.rpartition(":")
    return host, int(port)


def _moved(address: str, to: Address) -> str:
    host, port = _where(address)
    return address.replace(host, to[0], 1).replace(str(port), str(to[1]), 1)


def _row(variant: _Variant) -> Row:
    return {
        "way": variant.way.name,
        "transport": variant.kind,
        "connect, ms": spread(variant.connect_ms),
        "16 KiB and back, ms": spread(variant.message_ms),
        "p99": spread(variant.slow_message_ms),
        "stream and 1 KiB, ms": spread(variant.open_ms),
        "one stream, MB/s": spread(variant.one_mb_s),
        f"{STREAMS} streams, MB/s": spread(variant.many_mb_s),
        "CPU, s/GB": spread(variant.cpu_s_gb),
        "small alone, p99, ms": spread(variant.alone_ms),
        "small beside bulk, p99, ms": spread(variant.beside_ms),
    }


def _aims(variants: Sequence[_Variant]) -> list[Aim]:
    """Each round is compared with the other kind's of the same round."""
    aims: list[Aim] = []
    for way in WAYS:
        at = f"at {way.name}"
        here = {variant.kind: variant for variant in variants if variant.way is way}
        ours = here[OURS]
        if go := here.get(GO):
            ratio = _ratio(ours.message_ms, go.message_ms)
            aims.append(
                Aim(f"{at}: 16 KiB and back, of go's", ratio, f"<= {MOST_ROUND_TRIP}", ratio <= MOST_ROUND_TRIP)
            )
            for name, mine, theirs in (
                ("one stream", ours.one_mb_s, go.one_mb_s),
                (f"{STREAMS} streams", ours.many_mb_s, go.many_mb_s),
            ):
                ratio = _ratio(mine, theirs)
                aims.append(Aim(f"{at}: {name}, MB/s of go's", ratio, ">= 1", ratio >= 1))
        ratio = _ratio(ours.beside_ms, ours.alone_ms)
        aims.append(Aim(f"{at}: small beside bulk, p99 of alone", ratio, f"<= {MOST_BESIDE}", ratio <= MOST_BESIDE))
        if way is NEAR:
            connect_ms = statistics.median(ours.connect_ms)
            aims.append(Aim("connect, ms", connect_ms, f"< {MOST_CONNECT_MS:g}", connect_ms < MOST_CONNECT_MS))
    return aims


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))
