"""A server that is full ends links for others: it says so, and is not taken for one that has failed."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, LinkPolicy
from llmnode.errors import PeerFull, PeerRefused
from llmnode.testing import Conditions, Dialogue, open_world, peer_named
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.world import ALL_BLOCKS, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llmnode.core.ids import PeerId
    from llmnode.errors import PeerError
    from llmnode.testing.world import ServingNode

ROUTES = ClientPolicy().route
COST_S = 16.0
WAITS_S = 7.0
"""This is less than a server has for its first step (`StandingPolicy.first_patience_s`)."""


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


@simulated
async def test_a_server_that_evicts_sessions_again_and_again_counts_as_full_for_longer_each_time() -> None:
    """It may have to. So it is not banned, whatever time it says."""
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        peer, finder = swarm.nodes["0a"].peer, router.finder
        for length_s, said_s in (
            (ROUTES.ban_s, None),
            (2 * ROUTES.ban_s, 0.001),
            (10 * ROUTES.ban_s, 10 * ROUTES.ban_s),
        ):
            refusal = PeerRefused(RefusalCode.UNKNOWN_SESSION, "for others", retry_after_s=said_s, peer=peer)
            refusal.evicts = True
            finder.report(refusal)
            await trio.sleep(length_s - 0.1)
            assert finder.records.is_full(peer, trio.current_time())
            assert peer in [each.peer for each in finder.good()]
            await trio.sleep(0.2)
            assert not finder.records.is_full(peer, trio.current_time())
        assert not finder.banned  # type: ignore[attr-defined]


@simulated
async def test_a_server_that_evicts_a_session_has_to_prove_itself_anew_and_is_not_banned() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        standing = router.finder.records.standing
        async with router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(0))
            for _ in range(20):
                await dialogue.step(1)
            first = swarm.node(session.route[0].peer)
            assert standing.is_proven(first.peer, trio.current_time())
            (held,) = first.server.sessions.values()
            held.evict(PeerRefused(RefusalCode.UNKNOWN_SESSION, "for others", retry_after_s=0.5))
            await dialogue.step(1)
            (recovery,) = session.recoveries
            assert recovery.lost == first.peer and first.peer not in recovery.taken_over_by
            assert not standing.is_proven(first.peer, trio.current_time())
            assert router.finder.records.is_full(first.peer, trio.current_time())
        assert not router.finder.banned  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "make",
    [
        partial(PeerFull, "others need the place of this link"),
        partial(PeerRefused, RefusalCode.BUSY, "no memory", retry_after_s=1.0),
        partial(PeerRefused, RefusalCode.NO_ROOM, "no KV", retry_after_s=1.0),
    ],
    ids=["full", "busy", "no-room"],
)
@simulated
async def test_a_server_is_banned_that_keeps_a_client_waiting_and_then_says_that_it_is_full(
    make: Callable[..., PeerError],
) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _):
        peer, finder = swarm.nodes["0a"].peer, router.finder
        finder.report(make(peer=peer).after(ROUTES.refused_within_s))
        assert not finder.banned  # type: ignore[attr-defined]
        assert not finder.records.bans.is_banned(peer, trio.current_time()), "it may have looked for memory"
        finder.report(make(peer=peer).after(COST_S))
        assert finder.records.bans.left_s(peer, trio.current_time()) == ROUTES.ban_times * COST_S


@pytest.mark.parametrize("says", ["full", "moved"])
@simulated
async def test_servers_that_wait_and_then_say_that_they_are_full_cost_a_session_no_more_than_silent_ones(
    says: str,
) -> None:
    async with open_world(0, conditions=Conditions(delay_s=0.02), link_policy=LinkPolicy()) as world:
        await world.start("honest", ALL_BLOCKS)
        hostile = [await world.start(f"hostile{number}", ALL_BLOCKS, said_us=1) for number in range(3)]
        async with trio.open_nursery() as nursery, world.client() as client:
            for node in hostile:
                world.internet.locate(node.peer, f"9.1.{node.name[-1]}.1")
                node.network.tamper = Withholder(node, says, nursery)
            began_s, finder = trio.current_time(), client.router.finder
            async with client.router.open_session(64, Codec.RAW) as session:
                await Dialogue(session, random.Random(0)).step(9)
                assert len(session.recoveries) == 1
            assert trio.current_time() - began_s < WAITS_S + 2
            banned = {error.peer for _, error in finder.banned}  # type: ignore[attr-defined]
            assert peer_named("honest") not in banned
            assert bool(banned) is (says == "full")
            nursery.cancel_scope.cancel()


class Withholder:
    """The frames of a server that withholds its results, and says some seconds later why there are none."""

    def __init__(self, node: ServingNode, says: str, nursery: trio.Nursery) -> None:
        self._node = node
        self._says = says
        self._nursery = nursery

    def __call__(self, peer: PeerId, frame: Frame) -> Iterable[Frame]:
        if frame.type is not FrameType.RESULT:
            return [frame]
        self._nursery.start_soon(self._say, peer, frame)
        return []

    async def _say(self, peer: PeerId, frame: Frame) -> None:
        await trio.sleep(WAITS_S)
        for link in [each for each in self._node.network.links if each.peer == peer]:
            if self._says == "full":
                link.connection.evict()
            else:
                await link.send(refusal_of(frame, RefusalCode.UNKNOWN_SESSION, "for others", 1.0))
