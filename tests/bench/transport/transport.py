"""`tests/bench/run transport`: our transport beside go-libp2p, py-libp2p as it is, and bare TCP, in one run.

There are two peers of each kind, in a process each. One dials the other: directly, and through proxies that make the
link long or narrow. All send the same, and the sender measures it (`peers.py`, `tests/interop/go`).
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

from bench.kit.options import add_repeats, add_thin
from bench.kit.proxy import open_proxies
from bench.kit.report import Report, Row, Series, at_least, at_most, below, percentile, ratios, rounds
from bench.transport.steered import go_peer, python_peer, steer
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.proxy import Address
    from bench.kit.report import Aim
    from bench.transport.steered import SteeredPeer

OURS, GO = "llmnode", "go-libp2p"
PYTHON = (OURS, "py-libp2p", "tcp")
MESSAGE_BYTES = 16 << 10
SMALL_BYTES = 2304  # the size of one position of SmolLM2 in fp32
OPEN_BYTES = 1 << 10
STREAMS = 8
CONNECTS = 5

MOST_ROUND_TRIP = 2.0
MOST_CONNECT_MS = 20.0
MOST_BESIDE = 3.0


@dataclass(frozen=True, slots=True)
class Way:
    """A kind of link between two peers, and the amount to send over it."""

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


CONNECT, OPENED, CPU = "connect, ms", "stream and 1 KiB, ms", "CPU, s/GB"
MESSAGE, SLOW_MESSAGE = "16 KiB and back, ms", "p99"
ONE, MANY = "one stream, MB/s", f"{STREAMS} streams, MB/s"
ALONE, BESIDE = "small alone, p99, ms", "small beside bulk, p99, ms"


@dataclass(slots=True)
class _Variant:
    """One kind of peer over one kind of link."""

    kind: str
    way: Way
    dialer: SteeredPeer
    server: SteeredPeer
    address: str
    series: Series = field(default_factory=Series)


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser)
    add_thin(parser)


async def run(options: Options) -> Report:
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
            for number in rounds(options.repeats):
                turn = (number + 1) % len(variants)
                for variant in [*variants[turn:], *variants[:turn]]:
                    measured = await _measure(variant, 0.25 if options.thin else 1.0)
                    if number >= 0:
                        variant.series.note(measured)
    conditions = {
        "rounds": options.repeats,
        "message_bytes": MESSAGE_BYTES,
        "small_bytes": SMALL_BYTES,
        "proxy": "for long and narrow ways: a TCP proxy in Python, one process for all",
    }
    rows: list[Row] = [
        {"way": variant.way.name, "transport": variant.kind} | variant.series.row() for variant in variants
    ]
    return Report(rows, _aims(variants), conditions)


async def _measure(variant: _Variant, scale: float) -> dict[str, float]:
    """One round, over new connections, since the windows of streams begin small."""
    dialer, peer, way = variant.dialer, variant.server.peer, variant.way
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
    return {
        CONNECT: 1e3 * statistics.median(connects),
        MESSAGE: 1e3 * statistics.median(messages),
        SLOW_MESSAGE: 1e3 * percentile(messages, 0.99),
        OPENED: 1e3 * statistics.median(opened),
        ONE: bulk / one_s / 1e6,
        MANY: bulk / many_s / 1e6,
        CPU: cpu_s / bulk * 1e9,
        ALONE: 1e3 * percentile(alone, 0.99),
        BESIDE: 1e3 * percentile(beside, 0.99),
    }


async def _cpu_s(variant: _Variant) -> float:
    """The CPU time of both processes."""
    return float((await variant.dialer.tell("cpu"))["seconds"] + (await variant.server.tell("cpu"))["seconds"])


def _where(address: str) -> Address:
    """The host and port of `/ip4/HOST/tcp/PORT/...`, or of `HOST:PORT`."""
    if address.startswith("/"):
        _, _, host, _, port, *_ = address.split("/")
    else:
        host, _, port = address.rpartition(":")
    return host, int(port)


def _moved(address: str, to: Address) -> str:
    host, port = _where(address)
    return address.replace(host, to[0], 1).replace(str(port), str(to[1]), 1)


def _aims(variants: Sequence[_Variant]) -> Iterator[Aim]:
    """Each round is compared with the same round of the other kind."""
    for way in WAYS:
        at = f"at {way.name}"
        here = {variant.kind: variant.series for variant in variants if variant.way is way}
        ours = here[OURS]
        if go := here.get(GO):
            round_trip = statistics.median(ratios(ours[MESSAGE], go[MESSAGE]))
            yield at_most(f"{at}: 16 KiB and back, of go's", round_trip, MOST_ROUND_TRIP)
            for speed in (ONE, MANY):
                yield at_least(f"{at}: {speed} of go's", statistics.median(ratios(ours[speed], go[speed])), 1)
        beside = statistics.median(ratios(ours[BESIDE], ours[ALONE]))
        yield at_most(f"{at}: small beside bulk, p99 of alone", beside, MOST_BESIDE)
        if way is NEAR:
            yield below("connect, ms", ours.median(CONNECT), MOST_CONNECT_MS)
