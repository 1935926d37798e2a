"""Descriptions that peers give of themselves cost a node little memory and little time, whatever is in them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.ping import PingService
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH
from libp2p.identity.update import _safe_parse_multiaddr_cached
from libp2p.kad_dht.common import PROTOCOL_ID as KAD
from libp2p.network.stream.exceptions import StreamEOF, StreamError
from libp2p.peer.id import ID
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.utils.varint import encode_uvarint
from multiaddr import Multiaddr

from llmnode.core.budget import Resource
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.select import open_unanswered
from unit.circuits import until
from unit.in_trio import in_trio
from unit.links import POLICY
from unit.longest_step import measured_steps

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from libp2p.abc import INetStream

MIB = 1 << 20
LARGEST = (64 << 10) - 200
"""The description that is read at all has hardly more bytes."""
LOOP_S = 0.005
ADDRESSES, ADDRESS_BYTES, PROTOCOLS, PROTOCOL_CHARS = 8, 256, 64, 64
"""This is kept of a peer."""
TINY = [Multiaddr(f"/ip4/10.0.{number // 250}.{number % 250}/tcp/1").to_bytes() for number in range(6000)]


def noise(size: int, seed: int) -> bytes:
    return random.Random(seed).randbytes(size)


SIGNED = b"a record that the peer signs"
DESCRIPTIONS = {
    "unparseable addresses": Identify(listen_addrs=[noise(LARGEST // 10, each) for each in range(10)]),
    "many addresses": Identify(listen_addrs=TINY[: LARGEST // 10]),
    "long names": Identify(listen_addrs=[b"\x36\xf0\x01" + b"a." * 120 + b"\x06\x00\x16"] * (LARGEST // 250)),
    "short protocols": Identify(protocols=[f"{each % 100:02}" for each in range(LARGEST // 4)]),
    "a long protocol": Identify(protocols=["p" * LARGEST]),
    "a long address where it sees the node": Identify(observed_addr=b"\xe0\x03" * (LARGEST // 2)),
    "a signed record of many addresses": Identify(signedPeerRecord=SIGNED),
    "a mebibyte of addresses": Identify(listen_addrs=[noise(MIB - 100, 1)]),
    "a mebibyte of protocols": Identify(protocols=[f"{each % 100:02}" for each in range((MIB - 100) // 4)]),
}


def packed(said: Identify) -> bytes:
    body = said.SerializeToString()
    return encode_uvarint(len(body)) + body


@dataclass(frozen=True)
class Stranger:
    """A peer that is connected to `server`, and says something of itself once it may."""

    network: Libp2pNetwork
    server: Libp2pNetwork
    go: trio.Event
    told: trio.Event

    async def tell(self) -> None:
        """Until the server has seen all of it. One that does not read on resets the stream."""
        self.go.set()
        await self.told.wait()
        await PingService(self.network.host).ping(ID.from_string(self.server.peer))
        await trio.testing.wait_all_tasks_blocked(0.05)


@asynccontextmanager
async def describing(server: Libp2pNetwork, said: Identify) -> AsyncIterator[Stranger]:
    go, told = trio.Event(), trio.Event()

    async def tell(stream: INetStream) -> None:
        await go.wait()
        with suppress(BaseLibp2pError, StreamError):
            await stream.write(packed(said))
            await stream.close()
        told.set()

    async with open_network([], POLICY) as stranger:
        stranger.vouch(server.addresses)
        if said.signedPeerRecord == SIGNED:
            named, key = [Multiaddr(each) for each in TINY[: LARGEST // 13]], stranger.host.get_private_key()
            record = create_signed_peer_record(stranger.host.get_id(), named, key)
            said = Identify(signedPeerRecord=record.marshal_envelope())
        stranger.host.set_stream_handler(IDENTIFY, tell)
        await stranger.host.connect(parse_peer(server.addresses[0]))
        yield Stranger(stranger, server, go, told)


def kept_of(server: Libp2pNetwork, stranger: Libp2pNetwork) -> tuple[list[bytes], list[str]]:
    """Addresses and protocols."""
    data = server.host.get_peerstore().peer_data_map.get(ID.from_string(stranger.peer))  # type: ignore[attr-defined]
    return ([], []) if data is None else ([each.to_bytes() for each in data.addrs], list(data.protocols))


@pytest.mark.parametrize("kind", DESCRIPTIONS)
@in_trio
async def test_little_is_kept_of_a_description_and_reading_it_holds_up_nobody(kind: str) -> None:
    before = _safe_parse_multiaddr_cached.cache_info().currsize
    async with (
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as server,
        describing(server, DESCRIPTIONS[kind]) as stranger,
    ):
        with measured_steps() as steps:
            await stranger.tell()
        addresses, protocols = kept_of(server, stranger.network)
        assert len(addresses) <= ADDRESSES
        assert all(len(each) <= ADDRESS_BYTES for each in addresses)
        assert len(protocols) <= PROTOCOLS
        assert all(len(each) <= PROTOCOL_CHARS for each in protocols)
        assert _safe_parse_multiaddr_cached.cache_info().currsize == before, "kept after the peer has left"
        assert not server.host.get_peerstore().peer_record_map  # type: ignore[attr-defined]
        assert steps.longest_s < LOOP_S


async def push(stranger: Libp2pNetwork, server: Libp2pNetwork, said: Identify) -> None:
    stream = await stranger.host.new_stream(ID.from_string(server.peer), [ID_PUSH])
    await stream.write(packed(said))
    await stream.close()
    await stream.read(1)  # until the other side has ended it


@in_trio
async def test_descriptions_that_nobody_has_asked_for_are_not_taken() -> None:
    before = _safe_parse_multiaddr_cached.cache_info().currsize
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as stranger:
        stranger.vouch(server.addresses)
        await stranger.host.connect(parse_peer(server.addresses[0]))
        for number in range(10):
            with pytest.raises(BaseLibp2pError):
                await push(stranger, server, Identify(listen_addrs=[noise(MIB - 100, number)]))
        assert _safe_parse_multiaddr_cached.cache_info().currsize == before
        assert kept_of(server, stranger)[0] == []


@in_trio
async def test_what_peers_need_of_a_description_is_kept_until_they_leave() -> None:
    """Its protocols tell whether it is in the DHT, and its addresses where others find it, later as well."""
    usable = ["/ip4/10.0.0.1/tcp/4001", "/ip6/fd00::1/tcp/4001"]
    others = [
        "/ip4/10.0.0.1/udp/4001/quic-v1",
        "/dns4/a.example/tcp/4001",
        "/ip4/10.0.0.1/tcp/80/ip4/10.0.0.2/tcp/1",
    ]
    said = Identify(listen_addrs=[Multiaddr(each).to_bytes() for each in (*others, *usable)], protocols=[KAD, "/other"])
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server:
        async with describing(server, said) as stranger:
            await stranger.tell()
            addresses = [Multiaddr(each).to_bytes() for each in usable]
            assert kept_of(server, stranger.network) == (addresses, [KAD, "/other"])
        await until(lambda: kept_of(server, stranger.network) == (addresses, []))


@in_trio
async def test_a_peer_that_comes_back_is_asked_again() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as client:
        client.vouch(server.addresses)
        for _ in range(2):
            await client.host.connect(parse_peer(server.addresses[0]))
            await until(lambda: bool(kept_of(server, client)[1]))
            await client.host.disconnect(ID.from_string(server.peer))
            await until(lambda: not kept_of(server, client)[1])


@in_trio
async def test_an_answered_stream_that_its_peer_keeps_open_counts_until_it_is_over() -> None:
    """The peer may fill its window, which nobody reads. The answer is complete, and the node has closed its side."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as stranger:
        stranger.vouch(server.addresses)
        peer, memory = ID.from_string(server.peer), server.budget.process.held
        await stranger.host.connect(parse_peer(server.addresses[0]))
        await until(lambda: server.budget.process.held[Resource.STREAMS] == 0)
        before = memory[Resource.MEMORY]
        streams = [await open_unanswered(stranger.host, peer, IDENTIFY) for _ in range(20)]
        for each in streams:
            with suppress(StreamEOF):
                while True:
                    await each.read(MIB)
            await each.write(bytes(200 << 10))
        await PingService(stranger.host).ping(peer)
        assert memory[Resource.MEMORY] >= before + 20 * POLICY.budget.stream_bytes
        assert memory[Resource.STREAMS] >= 20
        for each in streams:
            await each.reset()
        await until(lambda: memory[Resource.MEMORY] == before and not memory[Resource.STREAMS])
