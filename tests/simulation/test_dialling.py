"""Peers with several addresses: how long it takes until one that answers is found, and what stays of the others."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.whereabouts import groups_of
from llmnode.core.policy import LinkPolicy, PoolPolicy, RoutePolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import PeerTimeout, PeerUnreachable
from llmnode.session.reaching import Reaching
from llmnode.swarm.pool import open_pool
from llmnode.testing import Conditions, open_internet
from simulation.world import simulated

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.swarm.pool import ConnectionPool
    from llmnode.testing.network import MemoryInternet, MemoryNetwork

DELAY_S = 0.3
SLACK_S = 0.01
DIAL_S = 3 * DELAY_S
POLICY = PoolPolicy()
ROUTES = RoutePolicy()
GOOD, OTHER, HOLE = (f"/memory/{name}/p2p/peer-server" for name in ("good", "other", "hole"))
RELAYED = "/memory/relay/p2p-circuit/p2p/peer-server"


@asynccontextmanager
async def dialling(policy: PoolPolicy = POLICY) -> AsyncIterator[tuple[MemoryInternet, MemoryNetwork, ConnectionPool]]:
    """A server, and the pool of a client that dials it."""
    async with open_internet(Conditions(delay_s=DELAY_S)) as internet:
        internet.black_holes.add(HOLE)
        server = internet.network("server")
        async with open_pool(internet.network("client"), policy) as pool:
            yield internet, server, pool


async def timed_connect(pool: ConnectionPool, *addresses: str) -> float:
    began_s = trio.current_time()
    connection = await pool.connect(addresses)
    assert pool.living() == [connection]
    return trio.current_time() - began_s


@pytest.mark.parametrize("holes", [0, 1, 2, 3])
@simulated
async def test_addresses_without_an_answer_cost_a_fifth_of_a_second_each(holes: int) -> None:
    async with dialling() as (_, server, pool):
        took_s = await timed_connect(pool, *holes * [HOLE], GOOD)
        assert took_s == pytest.approx(DIAL_S + holes * POLICY.stagger_s, abs=SLACK_S)
        await trio.sleep(2 * LinkPolicy().dial_timeout_s)
        assert len(server.links) == 1


@simulated
async def test_the_first_that_answers_is_taken_and_of_the_others_nothing_stays() -> None:
    async with dialling() as (_, server, pool):
        assert await timed_connect(pool, GOOD, OTHER, HOLE) == pytest.approx(DIAL_S, abs=SLACK_S)
        await trio.sleep(2 * LinkPolicy().dial_timeout_s)
        assert len(server.links) == 1


@simulated
async def test_two_that_answer_in_the_same_moment_leave_one() -> None:
    async with dialling(PoolPolicy(stagger_s=0.0)) as (_, server, pool):
        await timed_connect(pool, GOOD, OTHER)
        await trio.sleep(2 * DELAY_S)
        assert len(server.links) == 1


@simulated
async def test_an_address_where_nobody_is_has_the_next_tried_at_once() -> None:
    async with dialling() as (_, _, pool):
        nobody = GOOD.replace("server", "nobody")
        took_s = await timed_connect(pool, nobody, GOOD)
        assert took_s == pytest.approx(min(2 * DELAY_S, POLICY.stagger_s) + DIAL_S, abs=SLACK_S)


@simulated
async def test_a_relay_is_tried_last_and_later() -> None:
    async with dialling() as (_, _, pool):
        took_s = await timed_connect(pool, RELAYED, HOLE)
        assert took_s == pytest.approx(POLICY.relay_stagger_s + DIAL_S, abs=SLACK_S)


@simulated
async def test_if_none_answers_all_have_had_their_time() -> None:
    async with dialling() as (internet, _, pool):
        internet.black_holes |= {GOOD, OTHER}
        began_s = trio.current_time()
        with pytest.raises(PeerUnreachable):
            await pool.connect([GOOD, OTHER, HOLE])
        patience_s = LinkPolicy().dial_timeout_s + 2 * POLICY.stagger_s
        assert trio.current_time() - began_s == pytest.approx(patience_s, abs=SLACK_S)


@simulated
async def test_each_address_says_why_it_failed_and_several_that_say_the_same_say_it_once() -> None:
    async with open_internet() as internet, open_pool(internet.network("client")) as pool:
        with pytest.raises(PeerUnreachable) as caught:
            await pool.connect(["/memory/one/p2p/peer-nobody", "/memory/two/p2p/peer-nobody"])
        message = "no answer from /memory/one/p2p/peer-nobody; no answer from /memory/two/p2p/peer-nobody"
        assert caught.value.message == message
        with pytest.raises(PeerUnreachable) as caught:
            await pool.connect(["/memory/three/p2p/peer-nobody"])
        assert caught.value.message == "no answer from /memory/three/p2p/peer-nobody"
        with pytest.raises(PeerUnreachable) as caught:
            await pool.connect(["/memory/one/p2p/peer-nobody", "/memory/two/p2p/peer-nobody"])
        assert caught.value.message == "not dialled: it could not be reached lately"


def announced_at(address: str) -> Announcement:
    offer = Offer("m", Profile(b"d" * 32, Precision()), 9, Span(0, 9), PeerState.ONLINE, 1, 9, 9)
    return Announcement(PeerId(address.rpartition("/")[2]), (address,), 1, 2, "llmnode/1", offer)


@pytest.mark.parametrize("measures", [True, False])
@simulated
async def test_addresses_that_drop_everything_are_counted_although_no_session_waits_for_them(measures: bool) -> None:
    async with dialling() as (_, _, pool):
        reaching = Reaching(pool, RoutePolicy(unreached_of_all=0.0), dict)
        announced = announced_at(HOLE)
        if measures:
            reaching.measure_some([], [announced])
        else:
            reaching.warm_some([announced])
        await trio.sleep(2 * LinkPolicy().dial_timeout_s)
        assert reaching.doubt_s(groups_of(announced, {})) > 0


@simulated
async def test_a_peer_that_never_answers_a_dial_is_blamed_for_the_time_that_it_took() -> None:
    async with dialling() as (_, _, pool):
        announced = announced_at(HOLE)
        reaching, began_s = Reaching(pool, ROUTES, dict), trio.current_time()
        connections, (error,) = await reaching.connect([Hop(announced.peer, announced.offer.span)], [announced])
        assert not connections and isinstance(error, PeerTimeout) and error.peer == announced.peer
        assert error.waited_s == ROUTES.connect_timeout_s
        assert trio.current_time() == pytest.approx(began_s + error.waited_s, abs=SLACK_S)
