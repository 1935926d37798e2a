"""Relays, peers behind them, and intruders, on real libp2p hosts on loopback."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, cast

import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb

from llmnode.core.policy import CircuitPolicy, LinkPolicy, PunchPolicy, RelayPolicy
from llmnode.errors import PeerError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.circuit_wire import HOP, receive, send
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.link import Libp2pLink
from llmnode.wire.frame import Frame, FrameType

POLICY = LinkPolicy()
IMPATIENT = LinkPolicy(heartbeat_s=0.05, silence_s=0.5)
EAGER = CircuitPolicy(retry_s=0.05, renew_least_s=0.05, punch=PunchPolicy(tries=0))
MEGABYTE = 1 << 20
OTHER_ID = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
OTHER = f"/ip4/127.0.0.1/tcp/1/p2p/{OTHER_ID}"


def relaying(
    policy: RelayPolicy | None = None, *, identity: bytes | None = None, listen: str = LISTEN_ANY_LOOPBACK
) -> Any:
    return open_network([listen], POLICY, identity, relay_policy=policy or RelayPolicy())


def reserving(*relays: Libp2pNetwork, link: LinkPolicy = POLICY) -> Any:
    """A peer that listens nowhere."""
    at = [each.addresses[0] for each in relays]
    return open_network([], link, relays=at, circuit_policy=EAGER)


def listening_behind(*relays: Libp2pNetwork, policy: CircuitPolicy = EAGER) -> Any:
    """A peer that listens, and says only through which relays it is reached."""
    return open_network(
        [LISTEN_ANY_LOOPBACK], POLICY, relays=[each.addresses[0] for each in relays], circuit_policy=policy
    )


def dialling(link: LinkPolicy = POLICY) -> Any:
    return open_network([], link)


def through(relay: Libp2pNetwork, peer: Libp2pNetwork) -> str:
    return f"{relay.addresses[0]}/p2p-circuit/p2p/{peer.peer}"


@asynccontextmanager
async def mortal(network: Any) -> AsyncIterator[tuple[Libp2pNetwork, Callable[[], Awaitable[None]]]]:
    """A network, and what ends it before the context does."""
    stop, stopped = trio.Event(), trio.Event()

    async def live(task_status: trio.TaskStatus[Libp2pNetwork]) -> None:
        async with network as opened:
            task_status.started(opened)
            await stop.wait()
        stopped.set()

    async def kill() -> None:
        stop.set()
        await stopped.wait()

    async with trio.open_nursery() as nursery:
        yield await nursery.start(live), kill
        stop.set()


@asynccontextmanager
async def echoing(network: Libp2pNetwork) -> AsyncIterator[None]:
    """Sends each frame back to every peer that dials."""

    async def echo(task_status: trio.TaskStatus[None]) -> None:
        async with network.accept() as link:
            task_status.started()
            with suppress(PeerError):
                while True:
                    await link.send(await link.receive())

    async def serve() -> None:
        while True:
            await nursery.start(echo)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(serve)
        yield
        nursery.cancel_scope.cancel()


def frame(payload: bytes, step: int = 0) -> Frame:
    return Frame(FrameType.RESULT, step=step, payload=payload)  # type: ignore[arg-type]  # any number will do


async def until(holds: Callable[[], bool]) -> None:
    """Other tasks' work on sockets has no event of its own here; the test's deadline ends this."""
    while not holds():  # noqa: ASYNC110
        await trio.sleep(0.005)


@asynccontextmanager
async def noting(network: Libp2pNetwork) -> AsyncIterator[list[list[str]]]:
    """The addresses that it has one after the other."""
    told: list[list[str]] = []

    async def note() -> None:
        while True:
            await network.wait_addresses_changed()
            told.append(network.addresses)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(note)
        yield told
        nursery.cancel_scope.cancel()


def nothing_of(network: Libp2pNetwork) -> bool:
    counts = network.count_open()
    return not (counts.circuits or counts.reservations or counts.links)


async def check_echo(link: Libp2pLink, size: int = 1000) -> None:
    sent = secrets.token_bytes(size)
    await link.send(frame(sent))
    assert bytes((await link.receive()).payload) == sent


class Intruder:
    """A host that speaks libp2p, and what it likes in circuits. `network` is what it is inside."""

    def __init__(self, network: Libp2pNetwork) -> None:
        self.network = network

    async def open(self, other: Libp2pNetwork, protocol: TProtocol) -> NetStream:
        info = parse_peer(other.addresses[0])
        self.network.vouch(other.addresses[:1])
        await self.network.host.connect(info)
        return cast(NetStream, await self.network.host.new_stream(info.peer_id, [protocol]))

    async def ask(self, relay: Libp2pNetwork, request: pb.HopMessage) -> pb.HopMessage:
        stream = await self.open(relay, HOP)
        await send(stream.muxed_stream, request)
        return await receive(stream.muxed_stream, pb.HopMessage())


def connect_to(peer: bytes) -> pb.HopMessage:
    return pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer))


RESERVE = pb.HopMessage(type=pb.HopMessage.RESERVE)
