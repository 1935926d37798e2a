"""A node looks at few unknown peers that one address group tells it of unasked: identities are free."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import Announcement
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.testing import open_world, simulated, simulated_ms
from llmnode.testing.network import MemoryNetwork, _signature, peer_named
from llmnode.wire.announcement import pack_news, sign_announcement
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Clock, pack

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.announcement import Offer
    from llmnode.core.ids import PeerId
    from llmnode.ports import Link

POLICY = SwarmPolicy(view_peers=40)
"""So a group may tell of 40 at once."""
SECONDS = 10


async def tell(link: Link, names: Iterable[str], offer: Offer) -> None:
    """Sends announcements of peers with these names."""
    signed = []
    for name in names:
        peer, now_ms = peer_named(name), simulated_ms()
        told = Announcement(peer, (f"/memory/p2p/{peer}",), now_ms, now_ms + 40_000, "llmnode/0", offer)
        signed.append(sign_announcement(told, partial(_signature, peer)).signed)
    payload = pack_news(signed, [], SwarmPolicy())
    await link.send(Frame(FrameType.NEWS, meta=pack(Clock(simulated_ms())), payload=payload))


@simulated
async def test_sybils_without_end_are_not_looked_at_and_others_are_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    verified: set[PeerId] = set()
    verify = MemoryNetwork.verify

    def noted(network: MemoryNetwork, peer: PeerId, message: bytes, signature: bytes) -> bool:
        if network.peer == peer_named("server"):
            verified.add(peer)
        return verify(network, peer, message, signature)

    async with open_world(swarm_policy=POLICY) as world:
        server = await world.start("server", Span(0, 3))
        offer = server.role.offer()
        address = server.network.addresses[0]
        links = [await world.internet.network(f"rude {each}", f"9.9.9.{each}").dial(address) for each in range(4)]
        monkeypatch.setattr(MemoryNetwork, "verify", noted)
        for second in range(SECONDS):
            for number, link in enumerate(links):
                await tell(link, [f"sybil {second} {number} {each}" for each in range(30)], offer)
            await trio.sleep(1)
        most = POLICY.view_peers + SECONDS * POLICY.newcomers_per_s
        assert POLICY.view_peers <= len(verified) <= most < 30 * SECONDS
        polite = await world.internet.network("polite", "8.8.8.8").dial(address)
        await tell(polite, ["newcomer"], offer)
        newcomer = await world.internet.network("itself", "9.9.9.99").dial(address)
        await tell(newcomer, ["itself"], offer)
        await trio.sleep(1)
        assert {peer_named("newcomer"), peer_named("itself")} <= server.knows


@simulated
async def test_a_swarm_that_grows_by_hundreds_at_once_is_known_within_some_seconds() -> None:
    """The node that tells of them is at the address of one that has told of too many."""
    async with open_world() as world:
        server, other = await world.start("server", Span(0, 3)), await world.start("other", Span(3, 6))
        with trio.fail_after(60):
            while len(server.knows) < 2:
                await server.swarm.wait_changed()
        (theirs,) = {each.group for each in server.network.links}
        server.swarm.view._newcomers.count(theirs, simulated_ms() / 1000, 2 * SwarmPolicy().view_peers)
        link = await world.internet.network("friend", "8.8.8.8").dial(other.network.addresses[0])
        await tell(link, [f"newcomer {each}" for each in range(300)], other.role.offer())
        with trio.fail_after(10):
            while len(server.knows) < 302:
                await server.swarm.wait_changed()
