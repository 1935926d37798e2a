"""A client measures the round trips to servers: its links for that end again, and it learns what changes."""

from __future__ import annotations

from contextlib import asynccontextmanager
from itertools import permutations
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import SessionId
from llmnode.core.peers.whereabouts import NOWHERE
from llmnode.core.policy import ClientPolicy, RoutePolicy
from llmnode.core.span import Span
from llmnode.session.reaching import Reaching
from llmnode.testing import Conditions, open_world, simulated
from llmnode.testing.network import peer_named

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.ids import PeerId
    from llmnode.session.router import Router
    from llmnode.testing import World

SPANS = [Span(0, 2), Span(2, 4), Span(4, 6)]
NEAR = Conditions(delay_s=0.001)


@simulated
async def test_a_client_measures_its_servers_and_a_few_others_and_takes_near_ones() -> None:
    async with open_world(conditions=NEAR) as world:
        for number, span in enumerate([*SPANS, *SPANS]):
            await world.start(f"s{number}", span)
        for number in range(3):
            for pair in (
                (peer_named("client"), peer_named(f"s{number}")),
                (peer_named(f"s{number}"), peer_named("client")),
            ):
                world.internet.set_conditions(*pair, Conditions(delay_s=0.1))
        await trio.sleep(5)
        async with world.client() as (router, _peer):
            await router.find_any()
            await trio.sleep(5)
            assert len(router.finder.reaching.round_trips_s()) == 6
            route = await router.find_any()
            assert {hop.peer for hop in route} == {peer_named(f"s{number}") for number in (3, 4, 5)}


@asynccontextmanager
async def measuring_client() -> AsyncIterator[tuple[World, Router, set[PeerId]]]:
    """A client with a route, which has measured two more servers of each span; and those that it uses, or has met."""
    policy = ClientPolicy(chunk_tokens=8, route=RoutePolicy(standbys=False, measured_peers=6))
    async with open_world(conditions=NEAR) as world:
        await world.start("s0", SPANS[0])
        async with world.client(policy) as (router, _peer):
            for number, span in enumerate([*SPANS[1:], *SPANS, *SPANS], 1):
                await world.start(f"s{number}", span)
            await trio.sleep(10)
            route = await router.find_any()
            await trio.sleep(5)
            yield world, router, {peer_named("s0"), *(hop.peer for hop in route)}


def living(router: Router) -> set[PeerId]:
    return {each.peer for each in router.finder.pool.living()}


@simulated
async def test_a_link_that_was_opened_to_measure_ends_and_its_server_counts_as_reached() -> None:
    async with measuring_client() as (_, router, used):
        finder = router.finder
        figures = finder.reaching.round_trips_s()
        assert len(figures) == 9 and used <= figures.keys()
        assert living(router) == used
        doubted = [each for each in finder.swarm.view.announcements() if each.peer not in used]
        costs = finder.records.costs(doubted)
        for _ in range(20):
            finder.reaching._unreached.note({NOWHERE}, trio.current_time())
        assert finder.records.costs(doubted) == costs, "others that cannot be reached do not count against it"
        assert finder.reaching.doubt_s({NOWHERE}) > 0


@simulated
async def test_a_link_that_others_want_meanwhile_stays() -> None:
    async with open_world(conditions=NEAR) as world:
        node, other = [await world.start(f"s{number}", span) for number, span in enumerate(SPANS[:2])]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(node.pool.connect, other.network.addresses)
            passing = await node.pool.connect(other.network.addresses, keeps=False)
        await node.pool.release(passing)
        assert passing in node.pool.living()
        await passing.end()
        await passing.wait_ended()
        passing = await node.pool.connect(other.network.addresses, keeps=False)
        passing.take_session(SessionId(bytes(16)))
        await node.pool.release(passing)
        assert passing in node.pool.living()
        passing.sessions.clear()
        await node.pool.release(passing)
        assert passing not in node.pool.living()
        await passing.wait_ended()


@simulated
async def test_a_round_trip_is_measured_again_after_a_minute_and_forgotten_if_there_is_no_answer() -> None:
    async with measuring_client() as (world, router, _used):
        reaching, policy = router.finder.reaching, RoutePolicy()
        before = reaching.round_trips_s()
        for number in range(1, 9):
            for pair in permutations((peer_named("client"), peer_named(f"s{number}")), 2):
                world.internet.set_conditions(*pair, Conditions(delay_s=0.1))
        await router.find_any()
        await trio.sleep(5)
        assert reaching.round_trips_s() == before
        await trio.sleep(policy.measure_again_s)
        world.freeze("s8")
        await router.find_any()
        await trio.sleep(10)
        after = reaching.round_trips_s()
        assert peer_named("s8") not in after
        assert sum(after[peer] > 10 * before[peer] for peer in after) >= 6


@simulated
async def test_few_figures_are_remembered() -> None:
    async with open_world(conditions=NEAR) as world:
        for number, span in enumerate(SPANS):
            node = await world.start(f"s{number}", span)
        await trio.sleep(5)
        reaching = Reaching(node.pool, RoutePolicy(round_trips=2, measured_peers=9), dict)
        reaching.measure_some([], node.swarm.view.announcements())
        await trio.sleep(5)
        assert len(reaching.round_trips_s()) == 2
