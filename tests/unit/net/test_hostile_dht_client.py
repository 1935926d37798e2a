"""A node that asks others of the DHT: their answers cost it little time, and send it nowhere."""

from __future__ import annotations

from contextlib import AsyncExitStack, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import pytest
import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerstore import create_signed_peer_record
from libp2p.stream_muxer.exceptions import MuxedStreamError
from multiaddr import Multiaddr

from llmnode.core.policy import DhtPolicy, LinkPolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.circuit_wire import receive, send
from llmnode.net.directory import _model_key, open_directory
from llmnode.net.host import open_network
from llmnode.net.identity import fresh_identity
from unit.circuits import until
from unit.dht_members import DIGEST, POLICY, member
from unit.in_trio import in_trio
from unit.longest_step import measured_steps

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from libp2p.abc import INetStream
    from libp2p.network.swarm import Swarm

    from llmnode.net.yamux import YamuxConnection
    from unit.dht_members import Member

LARGEST = DhtPolicy().message_bytes - 200
LOOP_S = 0.005
"""No answer takes the event loop for longer."""
TYPES = (Message.FIND_NODE, Message.GET_VALUE, Message.GET_PROVIDERS, Message.PUT_VALUE)
TINY = Multiaddr("/ip4/10.0.0.1/tcp/1").to_bytes()
"""In a network where no node of these tests is, so nobody dials it."""


def peer_id(number: int) -> bytes:
    return b"\x00\x04" + number.to_bytes(4, "big")


def peers_named(size: int) -> list[Message.Peer]:
    return [Message.Peer(id=peer_id(number), addrs=[TINY]) for number in range(size // 25)]


def signed(addresses: int) -> tuple[ID, bytes]:
    identity = fresh_identity()
    peer = ID.from_pubkey(identity.public_key)
    named = [Multiaddr(f"/ip4/10.0.{each // 250}.{each % 250}/tcp/1") for each in range(addresses)]
    return peer, create_signed_peer_record(peer, named, identity.private_key).marshal_envelope()


def many_peers(answer: Message) -> None:
    answer.closerPeers.extend(peers_named(LARGEST))


def many_providers(answer: Message) -> None:
    answer.providerPeers.extend(peers_named(LARGEST))


def many_nobodies(answer: Message) -> None:
    answer.closerPeers.extend(Message.Peer() for _ in range(LARGEST // 2))


def many_addresses(answer: Message) -> None:
    named = [Multiaddr(f"/ip4/10.0.{each // 250}.{each % 250}/tcp/1").to_bytes() for each in range(LARGEST // 10)]
    answer.closerPeers.append(Message.Peer(id=peer_id(1), addrs=named))


def many_signed_records(answer: Message) -> None:
    while answer.ByteSize() < LARGEST - 300:
        peer, record = signed(1)
        answer.closerPeers.append(Message.Peer(id=peer.to_bytes(), addrs=[TINY], signedRecord=record))


def a_long_signed_record(answer: Message) -> None:
    answer.senderRecord = signed(LARGEST // 12)[1]


def a_long_peer_id(answer: Message) -> None:
    answer.closerPeers.append(Message.Peer(id=bytes(LARGEST - 100), addrs=[TINY]))


ATTACKS = (
    *(many_peers, many_providers, many_nobodies, many_addresses),
    *(many_signed_records, a_long_signed_record, a_long_peer_id),
)


async def hostile(stack: AsyncExitStack, spoil: Callable[[Message], None]) -> str:
    """The address of a peer of the DHT that gives such answers."""
    network = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()))
    answers = {}
    for kind in TYPES:
        answer = Message(type=kind)
        spoil(answer)
        answers[kind] = Message.FromString(answer.SerializeToString())
        assert answer.ByteSize() < DhtPolicy().message_bytes

    async def tell(stream: INetStream) -> None:
        request: Any = await receive(stream.muxed_stream, Message(), 1 << 20)  # type: ignore[attr-defined]
        if request.type in answers:
            await send(stream.muxed_stream, answers[request.type])  # type: ignore[attr-defined]
        await stream.close()

    network.host.set_stream_handler(PROTOCOL_ID, tell)
    return network.addresses[0]


async def asking(stack: AsyncExitStack, contact: str) -> Member:
    """A member of the DHT that is connected to `contact`, and has heard of nearly 1,000 peers."""
    asks = await stack.enter_async_context(member(contact))
    for number in range(995):
        peer = ID(b"\x00\x06\x00\x00" + number.to_bytes(4, "big"))
        asks.network.host.get_peerstore().add_addrs(peer, [Multiaddr(TINY)], 600)
    return asks


@pytest.mark.parametrize("spoil", ATTACKS)
@in_trio
async def test_no_answer_holds_up_the_event_loop(spoil: Callable[[Message], None]) -> None:
    async with AsyncExitStack() as stack:
        contact = await hostile(stack, spoil)
        asks = await asking(stack, contact)
        dht, peer = asks.directory._dht, ID.from_string(contact.rpartition("/")[2])
        key = bytes.fromhex(_model_key(DIGEST))
        with measured_steps() as steps:
            for _ in range(2):
                await dht.value_store._get_from_peer(peer, key, return_record=True, return_closer_peers=True)
                await dht.peer_routing._query_peer_for_closest(peer, key)
                await dht.provider_store._get_providers_from_peer_with_closers(peer, key)
                await dht.value_store._store_at_peer(peer, key, b"value")
        assert steps.longest_s < LOOP_S


@in_trio
async def test_whole_lookups_with_such_answers_hold_up_nobody_and_keep_little() -> None:
    async with AsyncExitStack() as stack:
        asks = await asking(stack, await hostile(stack, many_peers))
        with measured_steps() as steps:
            await asks.directory.publish(asks.announcement())
            assert await asks.directory.find(DIGEST) == []
        assert steps.longest_s < LOOP_S
        store: Any = asks.network.host.get_peerstore()
        table = asks.directory._dht.routing_table
        assert len(store.peer_data_map) <= 1000
        assert table.size() <= 20 * DhtPolicy().buckets


async def answer_and_go_on(stream: INetStream) -> None:
    request: Any = await receive(stream.muxed_stream, Message(), 1 << 20)  # type: ignore[attr-defined]
    muxed_stream: Any = stream.muxed_stream  # type: ignore[attr-defined]
    await send(muxed_stream, Message(type=request.type, key=request.key))
    with suppress(MuxedStreamError):
        await muxed_stream.write(bytes(1 << 20))
    await trio.sleep_forever()


@in_trio
async def test_a_peer_that_answers_and_goes_on_has_nothing_kept() -> None:
    """The window of a stream takes 256 KiB, which no budget counts for streams that we have opened."""
    async with AsyncExitStack() as stack:
        endless = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()))
        endless.host.set_stream_handler(PROTOCOL_ID, answer_and_go_on)
        asks = await stack.enter_async_context(member(endless.addresses[0]))
        peer, key = ID.from_string(str(endless.peer)), bytes.fromhex(_model_key(DIGEST))
        (connection,) = cast("Swarm", asks.network.host.get_network()).get_connections(peer)
        muxed = cast("YamuxConnection", connection.muxed_conn)
        before = set(muxed._streams)
        for _ in range(4):
            await asks.directory._dht.value_store._store_at_peer(peer, key, b"value")
            await asks.directory._dht.peer_routing._query_peer_for_closest(peer, key)
        assert set(muxed._streams) <= before


async def say_nothing(_stream: INetStream) -> None:
    await trio.sleep_forever()


@in_trio
async def test_a_lookup_that_does_not_end_is_given_up() -> None:
    policy = replace(POLICY, find_timeout_s=0.1, dht=DhtPolicy(lifetime_s=0.5))
    async with AsyncExitStack() as stack:
        silent = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()))
        silent.host.set_stream_handler(PROTOCOL_ID, say_nothing)
        network = await stack.enter_async_context(open_network([], LinkPolicy()))
        network.vouch(silent.addresses)
        await network.host.connect(parse_peer(silent.addresses[0]))
        directory = await stack.enter_async_context(open_directory(network, policy))
        began_s = trio.current_time()
        assert await directory.find(DIGEST) == []
        assert directory._nursery.child_tasks, "it may still find something"
        await until(lambda: not directory._nursery.child_tasks)
        assert trio.current_time() - began_s < 5
