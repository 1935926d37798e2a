"""A newcomer whose only contact is hostile: it is told so, and soon."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import RoutePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import PeerError, PeerTimeout, single_error
from llmnode.testing import Conditions, open_world, simulated
from llmnode.testing.hostile.clients import announced
from llmnode.testing.network import MemoryNetwork, peer_named
from llmnode.wire.announcement import pack_news
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.payload import Codec

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.ids import PeerId
    from llmnode.testing.link import Tamper
    from llmnode.testing.world import World

INVENTED = 120
CONNECT_S = RoutePolicy().connect_timeout_s
ENDS_WITHIN_S = RoutePolicy().reach_s + 3 * CONNECT_S


@simulated
async def test_a_contact_that_never_tells_what_it_knows_is_given_up() -> None:
    async with open_world(conditions=Conditions(delay_s=0.02)) as world:
        (await world.start_relay("evil")).network.tamper = lambda _peer, frame: (
            [] if frame.type is FrameType.NEWS else [frame]
        )
        with trio.fail_after(SwarmPolicy().exchange_timeout_s + 1), pytest.raises(PeerTimeout), single_error():
            async with world.client():
                raise AssertionError("it joined")


@simulated
async def test_a_contact_that_invents_all_servers_costs_a_command_little_more_than_half_a_minute() -> None:
    """Nobody answers there. They would be tried for minutes."""
    async with open_world(conditions=Conditions(delay_s=0.02)) as world:
        relay = await world.start_relay("evil")
        relay.network.tamper = inventing(world)
        async with world.client() as client:
            assert len(client.router.swarm.view) > INVENTED / 2
            for work in (client.router.find_any, client.router.try_out):
                with trio.fail_after(ENDS_WITHIN_S), pytest.raises(PeerError):
                    await work()


@simulated
async def test_a_contact_that_invents_servers_beside_an_honest_route_costs_a_session_little() -> None:
    async with open_world(3, conditions=Conditions(delay_s=0.02)) as world:
        relay = await world.start_relay("evil")
        for name, span in {"0a": Span(0, 3), "1a": Span(3, 6)}.items():
            await world.start(name, span)
        await trio.sleep(5)
        relay.network.tamper = inventing(world)
        async with world.client() as client:
            with trio.fail_after(ENDS_WITHIN_S):
                async with client.router.open_session(8, Codec.RAW) as session:
                    await session.step(bytes(world.model.row_bytes))


def inventing(world: World) -> Tamper:
    """In place of all that the relay knows, servers that do not exist, at 16 addresses."""
    servers = [
        MemoryNetwork(world.internet, peer_named(f"invented {number}"), f"9.9.{number % 16}.1")
        for number in range(INVENTED)
    ]
    world.internet.black_holes.update(address for each in servers for address in each.addresses)
    payload = pack_news([announced(world, each, each.addresses).signed for each in servers], [], SwarmPolicy())

    def invent(_peer: PeerId, frame: Frame) -> Iterable[Frame]:
        return [replace(frame, payload=payload) if frame.type is FrameType.NEWS else frame]

    return invent
