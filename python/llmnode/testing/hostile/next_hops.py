"""Hostile clients that have honest servers look for next hops, of sessions that push nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.testing.exact_blocks import exact_input
from llmnode.testing.hostile.clients import HostileClients, announced, name_at_random, news_of, open_frame, read_all
from llmnode.testing.network import MemoryNetwork, peer_named
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Neighbours, pack

if TYPE_CHECKING:
    import random

    from llmnode.core.ids import PeerId
    from llmnode.testing.link import MemoryLink
    from llmnode.testing.world import ServingNode, World


@dataclass(frozen=True, slots=True)
class HoleNamer(HostileClients):
    """It announces peers at addresses that never answer, and has servers of the first blocks push results to them."""

    HOLES: ClassVar = 100
    PAUSE_S: ClassVar = 0.05

    def victims(self, world: World) -> list[ServingNode]:
        return [node for node in world.nodes.values() if node.name.startswith("0")]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        names = [f"hole of {link.own.peer} {rng.random()}" for _ in range(self.HOLES)]
        holes = [MemoryNetwork(world.internet, peer_named(name), self.host(0)) for name in names]
        world.internet.black_holes.update(each.addresses[0] for each in holes)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                await link.send(news_of([announced(world, each, each.addresses) for each in holes]))
                session = name_at_random(rng)
                await link.send(open_frame(world, node, session, 1))
                for number, hole in enumerate(holes):
                    await link.send(named_next(session, number, hole.peer, rng))
                    await trio.sleep(self.PAUSE_S)
                await link.send(Frame(FrameType.CLOSE, session))


@dataclass(frozen=True, slots=True)
class RightsAsker(HostileClients):
    """It has servers of the first blocks ask those of the next ones for rights to push, to sessions that do not exist.

    The servers ask over the links that honest sessions push over.
    """

    AT_ONCE: ClassVar = 20
    PAUSE_S: ClassVar = 0.02

    def victims(self, world: World) -> list[ServingNode]:
        return [node for node in world.nodes.values() if node.name.startswith("0")]

    async def attack(self, world: World, link: MemoryLink, node: ServingNode, rng: random.Random) -> None:
        receivers = [each.peer for each in world.nodes.values() if each.name.startswith("1")]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(read_all, link)
            while True:
                session = name_at_random(rng)
                await link.send(open_frame(world, node, session, 60))
                for step in range(60):
                    await link.send(one_step(session, step, rng))
                    for number in range(self.AT_ONCE):
                        await link.send(named_next(session, number, rng.choice(receivers), rng))
                    await trio.sleep(self.PAUSE_S)
                await link.send(Frame(FrameType.CLOSE, session))


def named_next(session: SessionId, number: int, receiver: PeerId, rng: random.Random) -> Frame:
    """The question to push to a session of any name at this peer."""
    meta = pack(Neighbours("", receiver, name_at_random(rng), quiet=False, again=False))
    return Frame(FrameType.NEIGHBOURS, session, step=Step(number), meta=meta)


def one_step(session: SessionId, step: int, rng: random.Random) -> Frame:
    return Frame(FrameType.STEP, session, Epoch(0), Step(step), step, 1, payload=exact_input(rng, 1))
