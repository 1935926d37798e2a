"""Whole nodes on an internet in memory, on a mock clock: who hears of whom, and how soon."""

from __future__ import annotations

import functools
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from llmnode.client.pool import ConnectionPool, open_pool
from llmnode.client.swarm import Swarm
from llmnode.core.announcement import Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.errors import RemoteProtocolError
from llmnode.node.serve.links import serve_links, serve_view
from llmnode.testing import MemoryDirectory, MemoryInternet, MemoryNetwork, open_internet

POLICY = SwarmPolicy()
DIGEST = b"m" * 32
OFFER = Offer("exact", DIGEST, 30, "float32", Span(0, 10), PeerState.ONLINE, block_us=1000, kv_tokens_free=64)
NEW_WITHIN_S = 10.0
DEAD_WITHIN_S = 60.0


def simulated(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        trio.run(functools.partial(test, **fixtures), clock=MockClock(autojump_threshold=0))

    return run


def clock_ms() -> int:
    return int(1_700_000_000_000 + trio.current_time() * 1000)


@dataclass
class Node:
    """A node that serves nothing but its view, and its life."""

    network: MemoryNetwork
    swarm: Swarm
    pool: ConnectionPool
    scope: trio.CancelScope

    @property
    def peer(self) -> PeerId:
        return self.network.peer

    @property
    def knows(self) -> set[PeerId]:
        self.swarm.view.drop_expired(clock_ms())
        return {each.peer for each in self.swarm.view.announcements()}


class World:
    """Starts nodes, and kills them."""

    def __init__(self, internet: MemoryInternet, nursery: trio.Nursery, seed: int) -> None:
        self.internet = internet
        self.directory = MemoryDirectory()
        self.nodes: dict[PeerId, Node] = {}
        self._nursery = nursery
        self._rng = random.Random(seed)

    async def start(self, name: str, contacts: list[str], offer: Offer | None = OFFER, **options: Any) -> Node:
        node: Node = await self._nursery.start(functools.partial(self._live, name, contacts, offer, **options))
        return node

    def kill(self, node: Node) -> None:
        """Not cancelled first: the dead say no farewell."""
        self.internet.kill(node.peer)
        self.nodes.pop(node.peer).scope.cancel()

    async def _live(
        self, name: str, contacts: list[str], offer: Offer | None, task_status: Any, now_ms: Any = clock_ms
    ) -> None:
        network = self.internet.network(name)
        rng = random.Random(self._rng.random())
        with trio.CancelScope() as scope:
            async with open_pool(network) as pool, trio.open_nursery() as nursery:
                swarm = Swarm(
                    network, pool, POLICY, contacts=contacts, directory=self.directory, now_ms=now_ms, rng=rng
                )
                node = self.nodes[network.peer] = Node(network, swarm, pool, scope)
                nursery.start_soon(serve_links, network, 256, functools.partial(serve_view, swarm))
                nursery.start_soon(swarm.run)
                if offer is not None:
                    nursery.start_soon(swarm.announce, lambda: offer)
                task_status.started(node)


@asynccontextmanager
async def world(seed: int = 0) -> AsyncIterator[World]:
    async with open_internet(delay_s=0.05) as internet, trio.open_nursery() as nursery:
        yield World(internet, nursery, seed)
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], bool], within_s: float) -> None:
    with trio.fail_after(within_s):
        while not condition():  # noqa: ASYNC110 - simulated time costs nothing, and views change by expiry too
            await trio.sleep(0.1)


@pytest.mark.parametrize("seed", range(3))
@simulated
async def test_a_hundred_nodes_hear_of_a_new_one_in_ten_seconds_and_of_a_death_in_sixty(seed: int) -> None:
    async with world(seed) as swarm:
        relay = await swarm.start("relay", [], offer=None)
        for number in range(100):
            await swarm.start(f"server{number}", relay.network.addresses)
        await until(lambda: all(len(node.knows) == 100 for node in swarm.nodes.values()), 30)

        newcomer = await swarm.start("newcomer", relay.network.addresses)
        await until(lambda: all(newcomer.peer in node.knows for node in swarm.nodes.values()), NEW_WITHIN_S)

        swarm.kill(newcomer)
        await until(lambda: not any(newcomer.peer in node.knows for node in swarm.nodes.values()), DEAD_WITHIN_S)
        assert all(len(node.knows) == 100 for node in swarm.nodes.values()), "a peer that lives was forgotten"


@simulated
async def test_who_stops_on_purpose_is_out_of_views_at_once() -> None:
    async with world() as swarm:
        first = await swarm.start("first", [])
        second = await swarm.start("second", first.network.addresses)
        await until(lambda: second.peer in first.knows, NEW_WITHIN_S)
        await second.swarm.leave(OFFER)
        second.scope.cancel()
        await until(lambda: second.peer not in first.knows, 1)


@simulated
async def test_the_swarm_outlives_the_relay_that_introduced_it() -> None:
    async with world() as swarm:
        relay = await swarm.start("relay", [], offer=None)
        nodes = [await swarm.start(f"server{number}", relay.network.addresses) for number in range(10)]
        await until(lambda: all(len(node.knows) == 10 for node in nodes), NEW_WITHIN_S)
        swarm.kill(relay)
        newcomer = await swarm.start("newcomer", nodes[0].network.addresses)
        await until(lambda: all(newcomer.peer in node.knows for node in nodes), NEW_WITHIN_S)
        await trio.sleep(DEAD_WITHIN_S)
        assert all(len(node.knows) == 11 for node in [*nodes, newcomer])


@simulated
async def test_halves_that_could_not_hear_each_other_become_one_again() -> None:
    async with world() as swarm:
        nodes = [await swarm.start(f"server{number}", ["/memory/p2p/peer-server0"]) for number in range(8)]
        await until(lambda: all(len(node.knows) == 8 for node in nodes), NEW_WITHIN_S)
        pairs = [(one.peer, other.peer) for one in nodes[:4] for other in nodes[4:]]
        for pair in pairs:
            swarm.internet.cut(*pair)
        await until(lambda: all(len(node.knows) == 4 for node in nodes), DEAD_WITHIN_S)
        for pair in pairs:
            swarm.internet.mend(*pair)
        await until(lambda: all(len(node.knows) == 8 for node in nodes), DEAD_WITHIN_S)


@simulated
async def test_a_model_is_found_in_the_directory_without_a_contact() -> None:
    async with world() as swarm:
        first = await swarm.start("first", [])
        second = await swarm.start("second", first.network.addresses)
        await until(lambda: second.peer in first.knows, NEW_WITHIN_S)
        stranger = await swarm.start("stranger", [], offer=None)
        await stranger.swarm.look_up(DIGEST)
        assert stranger.knows == {first.peer, second.peer}


@simulated
async def test_a_clock_that_is_wrong_is_noticed_and_its_announcements_are_not_believed() -> None:
    async with world() as swarm:
        right = await swarm.start("right", [])
        ahead = await swarm.start("ahead", right.network.addresses, now_ms=lambda: clock_ms() + 3_600_000)
        await until(lambda: right.peer in ahead.swarm.clock_offsets_ms, NEW_WITHIN_S)
        assert ahead.swarm.clock_offsets_ms[right.peer] == pytest.approx(-3_600_000, abs=1000)
        assert ahead.peer not in right.knows


@simulated
async def test_an_announcement_that_its_peer_did_not_sign_is_blamed_on_who_passes_it_on() -> None:
    async with world() as swarm:
        liar = await swarm.start("liar", [])
        victim = await swarm.start("victim", [])
        await until(lambda: liar.peer in liar.knows and victim.peer in victim.knows, 1)
        (signed,) = victim.swarm.view.newer_than({})
        body = signed.body.replace(b"float32", b"float16")
        liar.swarm.view.accept(replace(signed, body=body), clock_ms())
        reader = await swarm.start("reader", [], offer=None)
        with pytest.raises(RemoteProtocolError, match="did not sign") as raised:
            await reader.swarm.meet(liar.network.addresses[0])
        assert raised.value.peer == liar.peer
        assert victim.peer not in reader.knows


@simulated
async def test_an_old_announcement_replayed_does_not_bring_back_the_dead() -> None:
    async with world() as swarm:
        hoarder = await swarm.start("hoarder", [])
        mortal = await swarm.start("mortal", hoarder.network.addresses)
        await until(lambda: mortal.peer in hoarder.knows, NEW_WITHIN_S)
        old = [each for each in hoarder.swarm.view.newer_than({}) if each.announcement.peer == mortal.peer]
        swarm.kill(mortal)
        await until(lambda: mortal.peer not in hoarder.knows, DEAD_WITHIN_S)
        hoarder.swarm.view._newest[mortal.peer] = old[0]
        hoarder.swarm.view.drop_expired = lambda _now_ms: []  # type: ignore[method-assign]  # it hoards
        reader = await swarm.start("reader", [], offer=None)
        await reader.swarm.meet(hoarder.network.addresses[0])
        assert reader.knows == {hoarder.peer}
