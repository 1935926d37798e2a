"""Hostile clients of a simulated world: peers that open links and send what they like over them."""

from __future__ import annotations

import random
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import trio

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.policy import SwarmPolicy
from llmnode.core.priority import Priority
from llmnode.core.span import Span
from llmnode.errors import PeerError, single_error
from llmnode.testing.conditions import Conditions
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.hostile.role import HostileRole
from llmnode.testing.network import MemoryNetwork, peer_named
from llmnode.testing.simulate import simulated_ms
from llmnode.wire.announcement import pack_news, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, Neighbours, OpenRequest, Replay, pack
from llmnode.wire.payload import Codec
from llmnode.wire.profile import profile_fields

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.testing.link import MemoryLink
    from llmnode.testing.world import ServingNode, World

READS = Conditions(delay_s=0.02, bytes_per_s=200.0)
LONGEST = 64
"""Positions of a session."""


@dataclass(frozen=True, slots=True)
class HostileClients(HostileRole):
    """Clients that do the same at each server that is there when they come, and again after their link has ended."""

    async def play(self, world: World) -> None:
        nodes = self.victims(world)
        async with trio.open_nursery() as nursery:
            for number, name in enumerate(self.names):
                network = world.internet.network(name, self.host(number))
                for node in nodes:
                    nursery.start_soon(self._insist, world, network, node)

    def victims(self, world: World) -> list[ServingNode]:
        return list(world.nodes.values())

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        """Over one link, until it ends. Raises PeerError."""
        raise NotImplementedError

    async def _insist(self, world: World, network: MemoryNetwork, node: ServingNode) -> None:
        rng = random.Random(f"{network.peer} {node.name}")
        while True:
            with suppress(PeerError), single_error():
                link = await network.dial(node.network.addresses[0])
                await self.attack(world, link, node, rng)
            await trio.sleep(0.5)


@dataclass(frozen=True, slots=True)
class SlowReader(HostileClients):
    """It asks for results again and again, and reads few of them."""

    @classmethod
    def draw_peers(cls, rng: random.Random) -> tuple[int, int]:
        return 8, rng.choice((1, 4))

    def victims(self, world: World) -> list[ServingNode]:
        return list(world.nodes.values())[:2]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        world.internet.set_conditions(node.peer, link.own.peer, READS)
        session, positions = name_at_random(rng), 60
        await link.send(open_frame(world, node, session, LONGEST))
        await link.send(Frame(FrameType.STEP, session, length=positions, payload=exact_input(rng, positions)))
        while True:
            for step in range(1, 40):
                meta = pack(Replay(push=False))
                await link.send(Frame(FrameType.REPLAY, session, Epoch(0), Step(step), 0, positions, meta))
            await trio.sleep(1)


@dataclass(frozen=True, slots=True)
class Flooder(HostileClients):
    """It sends frames without an end, most of them malformed, and reads the answers."""

    def victims(self, world: World) -> list[ServingNode]:
        return list(world.nodes.values())[:2]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                for _ in range(20):
                    await link.send(self._frame(world, node, rng))
                await trio.sleep(0.2)

    def _frame(self, world: World, node: ServingNode, rng: random.Random) -> Frame:
        kind = rng.choice(list(FrameType))
        if kind is FrameType.OPEN and rng.random() < 0.5:
            return open_frame(world, node, name_at_random(rng), 2**31)
        numbers = rng.choice((0, 1, 2**32 - 1)), rng.choice((0, 1, 2**32 - 1))
        return Frame(kind, name_at_random(rng), Epoch(0), Step(0), *numbers, rng.randbytes(8), rng.randbytes(64))


@dataclass(frozen=True, slots=True)
class KvHog(HostileClients):
    """It reserves all KV of one server in two, or of all. If it `uses` its sessions, each has a step every second."""

    everywhere: bool = False
    uses: bool = False

    SESSIONS: ClassVar = 4
    """Sessions of each peer at each server."""

    @classmethod
    def draw(cls, rng: random.Random) -> KvHog:
        peers, uses = rng.choice((1, 3, 6)), rng.random() < 0.5
        # With a session in use from each of many groups, it has a right to most of the KV.
        return cls(peers, 1 if uses else rng.choice((1, peers)), rng.random() < 0.7, uses)

    def victims(self, world: World) -> list[ServingNode]:
        return [node for node in world.nodes.values() if self.everywhere or node.name.endswith("a")]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        steps: dict[SessionId, int] = {}

        async def hear() -> None:
            while True:
                if (frame := await link.receive()).type is FrameType.REFUSAL:
                    steps.pop(frame.session, None)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            while True:
                while len(steps) < self.SESSIONS:
                    steps[session := name_at_random(rng)] = 0
                    await link.send(open_frame(world, node, session, 100))
                for session, step in list(steps.items()) if self.uses else ():
                    await link.send(
                        Frame(FrameType.STEP, session, Epoch(0), Step(step), step, 1, payload=exact_input(rng, 1))
                    )
                    steps[session] = step + 1
                await trio.sleep(1)


@dataclass(frozen=True, slots=True)
class QueueStuffer(HostileClients):
    """It opens sessions that have to wait for KV, and fills their queues meanwhile."""

    PAYLOAD_BYTES: ClassVar = 40_000

    def victims(self, world: World) -> list[ServingNode]:
        return [node for node in world.nodes.values() if node.name.endswith("a")]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        meta, payload = pack(Neighbours("", "", NO_SESSION, quiet=False, again=False)), bytes(self.PAYLOAD_BYTES)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                session = name_at_random(rng)
                await link.send(open_frame(world, node, session, 150))
                for step in range(12):
                    frame = Frame(FrameType.NEIGHBOURS, session, step=Step(1 + step), meta=meta, payload=payload)
                    await link.send(frame)
                    await trio.sleep(0.02)  # or they would fill the link


@dataclass(frozen=True, slots=True)
class ViewStuffer(HostileClients):
    """It announces peers that do not exist."""

    sybils: int = 60

    def victims(self, world: World) -> list[ServingNode]:
        return list(world.nodes.values())[:2]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        names = [f"{self.names[0]}'s sybil {rng.random()}" for _ in range(self.sybils)]
        sybils = [MemoryNetwork(world.internet, peer_named(name), self.host(0)) for name in names]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                await link.send(news_of([announced(world, each, each.addresses) for each in sybils]))
                await trio.sleep(20)


@dataclass(frozen=True, slots=True)
class DialBait(HostileClients):
    """It announces peers at the addresses of victims, and asks servers to push results to them."""

    VICTIMS: ClassVar = (
        ("9.9.9.9", 443, 12),
        ("10.1.2.3", 22, 2),
        ("192.168.1.1", 80, 2),
        ("127.0.0.1", 6379, 2),
        ("169.254.0.1", 1, 2),
    )
    """Addresses of victims, their ports, and the number of identities that announce them."""

    def victims(self, world: World) -> list[ServingNode]:
        return list(world.nodes.values())[:3]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        baits = []
        for host, port, identities in self.VICTIMS:
            for number in range(identities):
                bait = MemoryNetwork(world.internet, peer_named(f"bait {host} {number}"), host)
                world.internet.locate(bait.peer, host)
                baits.append((bait, f"/memory/{port}/p2p/{bait.peer}"))
        session = name_at_random(rng)
        await link.send(open_frame(world, node, session, 1))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                await link.send(news_of([announced(world, each, [address]) for each, address in baits]))
                for number, (bait, _) in enumerate(baits):
                    meta = pack(Neighbours("", bait.peer, name_at_random(rng), quiet=False, again=False))
                    await link.send(Frame(FrameType.NEIGHBOURS, session, step=Step(number), meta=meta))
                    await trio.sleep(0.05)


async def read_all(link: MemoryLink) -> None:
    while True:
        await link.receive()


def name_at_random(rng: random.Random) -> SessionId:
    return SessionId(rng.randbytes(SESSION_ID_BYTES))


def open_frame(world: World, node: ServingNode, session: SessionId, max_length: int) -> Frame:
    span = node.worker.span
    message = OpenRequest(
        **profile_fields(world.model.profile),
        span_start=span.start,
        span_end=span.end,
        max_length=max_length,
        codec=Codec.RAW,
        priority=Priority.INTERACTIVE.word,
        keep_outputs=True,
    )
    return Frame(FrameType.OPEN, session, meta=pack(message))


def announced(world: World, network: MemoryNetwork, addresses: Sequence[str]) -> SignedAnnouncement:
    """An announcement that `network`'s peer serves all blocks, as if a server had signed it.

    It is from the future, as far as that is believed, and so lives longer than an honest one.
    """
    model, policy = world.model, SwarmPolicy()
    sequence = simulated_ms() + int(1000 * policy.clock_skew_s) - 1
    offer = Offer(model.name, model.profile, model.blocks, Span(0, model.blocks), PeerState.ONLINE, 1, 10_000, 10_000)
    expires_ms = sequence + int(1000 * policy.lifetime_s)
    announcement = Announcement(network.peer, tuple(addresses), sequence, expires_ms, "llmnode/0", offer)
    return sign_announcement(announcement, network.sign)


def news_of(announcements: Iterable[SignedAnnouncement]) -> Frame:
    payload = pack_news([each.signed for each in announcements], [], SwarmPolicy())
    return Frame(FrameType.NEWS, meta=pack(Clock(simulated_ms())), payload=payload)
