"""A program of hostile peers: `python -m bench.hostile.attacks JSON`, with what an `Order` has. It ends with its stdin.

Its peers connect from addresses of 127.0.0.0/8. Attacks look like those of `llmnode.testing.hostile`, over real links.
"""

from __future__ import annotations

import json
import random
import sys
from contextlib import AsyncExitStack, suppress
from dataclasses import asdict, dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import trio
from libp2p.custom_types import TProtocol
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from bench.hostile.servers import SERVERS, news
from bench.kit.sources import dial_from_sources, source
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import SESSION_ID_BYTES, Epoch, PeerId, SessionId, Step
from llmnode.core.policy import DialPolicy, LinkPolicy
from llmnode.core.span import Span
from llmnode.errors import LlmnodeError, single_error
from llmnode.models.embedded import open_embedded
from llmnode.net.circuit_wire import send
from llmnode.net.host import open_network
from llmnode.net.select import open_unanswered
from llmnode.swarm.membership import wall_clock_ms
from llmnode.wire.announcement import sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, OpenRequest, Replay, pack
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.model import ModelInfo
    from llmnode.net.host import Libp2pNetwork
    from llmnode.net.link import Libp2pLink

POLICY = LinkPolicy(dials=DialPolicy(burst=10**6, per_s=1e6, contact_burst=10**6, contact_per_s=1e6))
IDENTITIES = 16
"""The peers of one attack, at one address or at this many."""
SOCKETS = 400
SYBILS = 800
PIECES = 100
SESSION_TOKENS = 256


@dataclass(frozen=True, slots=True)
class Order:
    """The order of an attack. `spans` are those of the `servers`. Honest nodes should not dial the `victims`."""

    attacks: list[str]
    addresses: int
    servers: list[str]
    spans: list[tuple[int, int]]
    victims: list[tuple[str, int]]

    def packed(self) -> str:
        return json.dumps(asdict(self))


@dataclass(slots=True)
class Attacker:
    """One peer, and what it attacks."""

    network: Libp2pNetwork
    host: str
    order: Order
    model: ModelInfo
    rng: random.Random

    async def at_each(self, attack: Callable[[Libp2pLink, Span], Awaitable[None]]) -> None:
        """Attack each server over a link, again and again."""
        async with trio.open_nursery() as nursery:
            for address, span in zip(self.order.servers, self.order.spans, strict=True):
                nursery.start_soon(self._insist, address, Span(*span), attack)

    async def _insist(self, address: str, span: Span, attack: Callable[[Libp2pLink, Span], Awaitable[None]]) -> None:
        while True:
            with suppress(LlmnodeError), single_error():
                link = await self.network.dial(address)
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(_read_all, link)
                    await attack(link, span)
            await trio.sleep(0.5)

    def name(self) -> SessionId:
        return SessionId(self.rng.randbytes(SESSION_ID_BYTES))

    def open(self, session: SessionId, span: Span, max_length: int = SESSION_TOKENS) -> Frame:
        fields = profile_fields(self.model.profile)
        message = OpenRequest(
            **fields,
            span_start=span.start,
            span_end=span.end,
            max_length=max_length,
            codec=Codec.RAW,
            priority="interactive",
            keep_outputs=True,
        )
        return Frame(FrameType.OPEN, session, meta=pack(message))

    def step(self, session: SessionId, positions: int) -> Frame:
        rows = np.ones((positions, self.model.hidden_size), "<f4").tobytes()
        return Frame(FrameType.STEP, session, length=positions, payload=rows, value_bytes=4)

    def announced(self, peer: PeerId, addresses: Sequence[str], sign: Callable[[bytes], bytes]) -> SignedAnnouncement:
        model, now_ms = self.model, wall_clock_ms()
        kv_tokens = 1 << 20
        offer = Offer(
            model.name, model.profile, model.blocks, Span(0, model.blocks), PeerState.ONLINE, 1, kv_tokens, kv_tokens
        )
        return sign_announcement(
            Announcement(peer, tuple(addresses), now_ms, now_ms + 45_000, "llmnode/0", offer), sign
        )


async def silent(attacker: Attacker) -> None:
    """Connections that say nothing."""
    sockets: list[trio.socket.SocketType] = []
    while True:
        for address in attacker.order.servers:
            place = Multiaddr(address)
            one = trio.socket.socket()
            with suppress(OSError):
                await one.bind((attacker.host, 0))
                await one.connect((place.value_for_protocol("ip4"), int(place.value_for_protocol("tcp"))))
                sockets.append(one)
        for old in sockets[: -SOCKETS // IDENTITIES]:
            old.close()
        del sockets[: -SOCKETS // IDENTITIES]
        await trio.sleep(0.05)


async def links(attacker: Attacker) -> None:
    """Links that only live."""

    async def live(_link: Libp2pLink, _span: Span) -> None:
        await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(POLICY.links_per_peer):
            nursery.start_soon(attacker.at_each, live)


async def unfinished(attacker: Attacker) -> None:
    """Large frames that never end."""

    async def begin(link: Libp2pLink, _span: Span) -> None:
        whole = _large_frame()
        for at in range(0, PIECES * POLICY.piece_bytes, POLICY.piece_bytes):
            await link.send(Frame(FrameType.PIECE, payload=whole[at : at + POLICY.piece_bytes]))
        await trio.sleep_forever()

    await attacker.at_each(begin)


async def unread(attacker: Attacker) -> None:
    """Results that are asked for again and again, and not read."""

    async def ask(link: Libp2pLink, span: Span) -> None:
        session, positions = attacker.name(), 64
        await link.send(attacker.open(session, span))
        await link.send(attacker.step(session, positions))
        await trio.sleep(1)
        link._stream.read = _never  # type: ignore[method-assign, assignment]
        for step in range(1, 10**6):
            await link.send(
                Frame(FrameType.REPLAY, session, Epoch(0), Step(step), 0, positions, pack(Replay(push=False)))
            )
            await trio.sleep(0.005)

    await attacker.at_each(ask)


async def flood(attacker: Attacker) -> None:
    """Frames without end, most of them malformed. Those of `hollow` would end the link at once."""
    kinds = [kind for kind in FrameType if kind not in (FrameType.PIECE, FrameType.HEARTBEAT)]

    async def send(link: Libp2pLink, _span: Span) -> None:
        while True:
            rng = attacker.rng
            for _ in range(20):
                garbage = rng.randbytes(16), rng.randbytes(64)
                await link.send(Frame(rng.choice(kinds), attacker.name(), Epoch(0), Step(0), 0, 0, *garbage))
            await trio.sleep(0.02)

    await attacker.at_each(send)


async def hollow(attacker: Attacker) -> None:
    """Frames without end that ask for nothing: heartbeats, or pieces of frames without a byte."""
    kind = attacker.rng.choice((FrameType.HEARTBEAT, FrameType.PIECE))

    async def send(link: Libp2pLink, _span: Span) -> None:
        while True:
            for _ in range(200):
                await link.send(Frame(kind))
            await trio.sleep(0.02)

    await attacker.at_each(send)


async def views(attacker: Attacker) -> None:
    """Announcements of peers that do not exist."""
    made = _keys(SYBILS // IDENTITIES)

    async def stuff(link: Libp2pLink, _span: Span) -> None:
        while True:
            sybils = [
                attacker.announced(peer, [f"/ip4/{attacker.host}/tcp/9/p2p/{peer}"], sign).signed for peer, sign in made
            ]
            await link.send(news(sybils))
            await trio.sleep(10)

    await attacker.at_each(stuff)


async def bait(attacker: Attacker) -> None:
    """Peers at the addresses of victims, to which servers are asked to push."""
    made = _keys(len(attacker.order.victims))

    async def lure(link: Libp2pLink, span: Span) -> None:
        session = attacker.name()
        await link.send(attacker.open(session, span, 1))
        baits = []
        for (host, port), (peer, sign) in zip(attacker.order.victims, made, strict=True):
            baits.append(attacker.announced(peer, [f"/ip4/{host}/tcp/{port}/p2p/{peer}"], sign))
        step = 0
        while True:
            await link.send(news([each.signed for each in baits]))
            for each in baits:
                step += 1
                meta = pack(Neighbours("", each.announcement.peer, attacker.name(), quiet=False, again=False))
                await link.send(Frame(FrameType.NEIGHBOURS, session, step=Step(step), meta=meta))
                await trio.sleep(0.1)

    await attacker.at_each(lure)


async def hog(attacker: Attacker) -> None:
    """Sessions that take KV, and use none."""

    async def reserve(link: Libp2pLink, span: Span) -> None:
        while True:
            for _ in range(8):
                await link.send(attacker.open(attacker.name(), span, 2048))
            await trio.sleep(2)

    await attacker.at_each(reserve)


async def records(attacker: Attacker) -> None:
    """Records of the DHT without end, each under a key of its own."""
    numbers = count()

    async def offer(link: Libp2pLink, _span: Span) -> None:
        host = attacker.network.host
        named = Message.Peer(id=host.get_id().to_bytes(), addrs=[Multiaddr("/ip4/127.0.0.1/tcp/1").to_bytes()])
        stream = await open_unanswered(host, ID.from_base58(link.peer), TProtocol("/ipfs/kad/1.0.0"))
        for number in numbers:
            key = b"\x12\x20" + attacker.rng.randbytes(24) + number.to_bytes(8, "big")
            await send(stream.muxed_stream, Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[named]))

    await attacker.at_each(offer)


ATTACKS: dict[str, Callable[[Attacker], Awaitable[None]]] = {
    each.__name__: each
    for each in (silent, links, unfinished, unread, flood, hollow, views, bait, hog, records, *SERVERS)
}


def _large_frame() -> bytes:
    """The bytes of a frame with a payload of the largest size, as it goes over a link."""
    from llmnode.wire.frame import encode

    return bytes(encode(Frame(FrameType.STEP, length=1, payload=bytes(POLICY.max_payload_bytes)), POLICY))


def _keys(count: int) -> list[tuple[PeerId, Callable[[bytes], bytes]]]:
    """Fresh identities, each with what signs for it."""
    from libp2p.crypto.ed25519 import create_new_key_pair
    from libp2p.peer.id import ID

    pairs = [create_new_key_pair() for _ in range(count)]
    return [(PeerId(ID.from_pubkey(each.public_key).to_base58()), each.private_key.sign) for each in pairs]


async def _read_all(link: Libp2pLink) -> None:
    while True:
        await link.receive()


async def _never(*_: Any) -> NoReturn:  # Any: in place of another function
    await trio.sleep_forever()


async def main() -> None:
    """Read the order, carry it out, and end with stdin."""
    order = Order(**json.loads(sys.argv[1]))
    dial_from_sources()
    model = open_embedded().info
    async with trio.open_nursery() as nursery, AsyncExitStack() as stack:
        identities = []
        for number in range(IDENTITIES):
            host = f"127.7.0.{1 + number % order.addresses}"
            source.set(host)
            network = await stack.enter_async_context(open_network([f"/ip4/{host}/tcp/0"], POLICY))
            identities.append(network.peer)
            attacker = Attacker(network, host, order, model, random.Random(number))
            for name in order.attacks:
                nursery.start_soon(ATTACKS[name], attacker)
        print(json.dumps(identities), flush=True)
        async for _ in trio.lowlevel.FdStream(sys.stdin.fileno()):
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
