"""Links that end together with thousands of sessions cost a server no look at all of these for each of them."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.ids import SessionId
from llmnode.node.serve.admission import Admission
from llmnode.node.serve.session import ServerSession
from llmnode.testing import Conditions, open_world, simulated
from llmnode.testing.hostile.clients import open_frame, read_all
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Lease, pack
from simulation.world import ALL_BLOCKS

if TYPE_CHECKING:
    from llmnode.testing import ServingNode, World
    from llmnode.testing.link import MemoryLink

LINKS, OF_LINK = 4, 60
SESSIONS = LINKS * OF_LINK


async def hold(world: World, link: MemoryLink, node: ServingNode, number: int, *, leased: bool) -> None:
    """Open sessions of one position, which cost a stranger two small frames each."""
    for each in range(OF_LINK):
        session = SessionId(bytes([1 + number, each]) * 8)
        await link.send(open_frame(world, node, session, 1))
        if leased:
            await link.send(Frame(FrameType.LEASE, session, meta=pack(Lease(lease_ms=30_000, leaves=False))))


@pytest.mark.parametrize("leased", [False, True])
@simulated
async def test_the_end_of_many_sessions_is_no_search_for_each(leased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 8,000 of them, the event loop of a server stood still for half a minute, and all its links died."""
    looks, held = 0, Admission.held

    def counted(admission: Admission, session: SessionId) -> int:
        nonlocal looks
        looks += 1
        return held(admission, session)

    async with open_world(conditions=Conditions(delay_s=0.01)) as world:
        node = await world.start("0", ALL_BLOCKS)
        strangers = [world.internet.network(f"stranger {number}") for number in range(LINKS)]
        async with trio.open_nursery() as nursery:
            for number, stranger in enumerate(strangers):
                link = await stranger.dial(node.network.addresses[0])
                nursery.start_soon(read_all, link)
                nursery.start_soon(partial(hold, world, link, node, number, leased=leased))
            while len(node.server.sessions) < SESSIONS:  # noqa: ASYNC110  a server has no event for it
                await trio.sleep(1)
            await trio.sleep(30)
            nursery.cancel_scope.cancel()
        monkeypatch.setattr(Admission, "held", counted)
        for stranger in strangers:
            world.internet.kill(stranger.peer)
        await trio.sleep(1)
        assert len(node.server.sessions) == (SESSIONS if leased else 0)
        assert looks == (SESSIONS if leased else 0)
        await trio.sleep(60)
        assert not node.server.sessions


class Looked(dict[SessionId, ServerSession]):
    """All sessions of a server. It notes each look at all of them."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


@simulated
async def test_a_session_that_opens_or_a_link_that_ends_is_no_look_at_those_of_others() -> None:
    """With 10,000 of them, each OPEN took 0.2 ms of the event loop."""
    async with open_world(conditions=Conditions(delay_s=0.01)) as world:
        node = await world.start("0", ALL_BLOCKS)
        sessions = node.server.sessions = Looked()
        async with trio.open_nursery() as nursery:
            stranger = world.internet.network("stranger")
            link = await stranger.dial(node.network.addresses[0])
            nursery.start_soon(read_all, link)
            await hold(world, link, node, 0, leased=True)
            while len(sessions) < OF_LINK:  # noqa: ASYNC110  a server has no event for it
                await trio.sleep(1)
            await trio.sleep(5)
            sessions.looks = 0
            for number in range(0, OF_LINK, 2):
                await link.send(Frame(FrameType.CLOSE, SessionId(bytes([1, number]) * 8)))
            await trio.sleep(1)
            for number in range(10):
                await link.send(open_frame(world, node, SessionId(bytes([9, number]) * 8), 1))
            await trio.sleep(1)
            nursery.cancel_scope.cancel()
        world.internet.kill(stranger.peer)
        await trio.sleep(1)
        assert len(sessions) == OF_LINK // 2, "the leased ones"
        assert sessions.looks <= 3, "it looks every 0.1 s which groups have work"
