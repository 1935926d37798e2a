"""A server that is full ends links for others: it says so, and is not taken for one that has failed."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy
from llmnode.errors import PeerFull
from llmnode.testing import Dialogue
from llmnode.wire.payload import Codec
from simulation.world import pairs_of_servers, simulated

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.testing.world import ServingNode

ROUTES = ClientPolicy().route


def make_way(node: ServingNode, client: PeerId) -> None:
    """Others need the place of the client's link."""
    (link,) = [each for each in node.network.links if each.peer == client]
    link.connection.evict()


@pytest.mark.parametrize("steps", [0, 2], ids=["waits for its first step", "in use"])
@simulated
async def test_a_session_whose_link_made_way_goes_on_elsewhere_and_its_server_is_not_banned(steps: int) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, client):
        finder = router.finder
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(0))
            for _ in range(steps):
                await dialogue.step(3)
            node = swarm.node(session.route[1].peer)
            make_way(node, client)
            await dialogue.step(1)
            (recovery,) = session.recoveries
            assert recovery.lost == node.peer and node.peer not in recovery.taken_over_by
            await dialogue.step(1)
        assert not finder.banned  # type: ignore[attr-defined]
        assert finder.records.is_full(node.peer, trio.current_time()), "others are preferred for a while"
        await trio.sleep(ROUTES.ban_s)
        assert not finder.records.is_full(node.peer, trio.current_time())


@simulated
async def test_a_session_that_opens_as_its_link_makes_way_opens_elsewhere_and_its_server_is_not_banned() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, client):
        async with router.open_session(64, Codec.RAW) as session:
            first = swarm.node(session.route[0].peer)
        async with trio.open_nursery() as nursery:

            async def end_when_it_opens() -> None:
                while not first.server.sessions:  # noqa: ASYNC110  it watches from outside
                    await trio.sleep(0.001)
                make_way(first, client)

            nursery.start_soon(end_when_it_opens)
            async with router.open_session(64, Codec.RAW) as session:
                await Dialogue(session, random.Random(0)).step(1)
                assert first.peer not in [hop.peer for hop in session.route]
            nursery.cancel_scope.cancel()
        assert not router.finder.banned  # type: ignore[attr-defined]


@simulated
async def test_a_server_that_ends_links_again_and_again_costs_more_for_longer_each_time() -> None:
    """That it is full is its own word."""
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        peer, finder = swarm.nodes["0a"].peer, router.finder
        (announced,) = [each for each in finder.good() if each.peer == peer]
        before = finder.records.costs([announced])[peer]
        for length_s in (ROUTES.ban_s, 2 * ROUTES.ban_s, 4 * ROUTES.ban_s):
            finder.report(PeerFull("others need the place of this link", peer=peer))
            await trio.sleep(length_s - 0.1)
            assert finder.records.costs([announced])[peer].hop_s == before.hop_s + ROUTES.full_cost_s
            assert peer in [each.peer for each in finder.good()]
            await trio.sleep(0.2)
            assert finder.records.costs([announced])[peer] == before
