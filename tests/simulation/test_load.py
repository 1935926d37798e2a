"""Servers announce how busy they are, and new sessions go to those that are less so."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.peers import own_load
from llmnode.core.policy import ClientPolicy, RoutePolicy, StandingPolicy
from llmnode.core.span import Span
from llmnode.node.serve.network_speed import keep_measuring
from llmnode.testing import peer_named, seeds
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, DELAY_S, FORWARD_S, Dialogue, World, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.session.router import Router
    from llmnode.testing.world import ServingNode

OTHERS, NEW = 2, 6
LENGTH = 40
SETTLED_S = 20.0
"""A server that is busy from now on has announced it, and everybody has heard of that."""


async def decode(swarm: World, name: str, server: str) -> None:
    """Decodes at one server without a pause, from prompt to prompt."""
    only = ClientPolicy(route=RoutePolicy(allowed=frozenset([swarm.nodes[server].peer])))
    async with swarm.client(only, name=name) as (router, _), router.open_session(LENGTH, Codec.RAW) as session:
        dialogue = Dialogue(session, random.Random(1))
        while True:
            for _ in range(LENGTH - 1):
                await dialogue.step(1)
            await dialogue.go_back(LENGTH - 1)


async def start_measured(swarm: World, nursery: trio.Nursery, name: str) -> None:
    """A server of all blocks that announces its speed."""
    node = await swarm.start(name, ALL_BLOCKS, said_us=round(1e6 * FORWARD_S / len(ALL_BLOCKS)))
    nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)


def cost_s(router: Router, name: str) -> float:
    """The cost of a block at that server."""
    servers = router.finder.swarm.view.of_model(router.finder.model.digest)
    return router.finder.records.costs(servers)[peer_named(name)].block_s


@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_new_sessions_go_to_the_server_that_others_leave_alone(seed: int) -> None:
    async with world(seed) as swarm, trio.open_nursery() as nursery:
        busy, idle = [await swarm.start(name, ALL_BLOCKS) for name in ("busy", "idle")]
        for number in range(OTHERS):
            nursery.start_soon(decode, swarm, f"other {number}", "busy")
        await trio.sleep(SETTLED_S)
        load = busy.role.offer().load
        assert load is not None and OTHERS * FORWARD_S / (FORWARD_S + 4 * DELAY_S) < load < OTHERS
        assert idle.role.offer().load == 0
        for number in range(NEW):
            async with swarm.client(name=f"new {number}") as (router, _):
                assert [hop.peer for hop in await router.find_any()] == [idle.peer]
        nursery.cancel_scope.cancel()


@simulated
async def test_sessions_that_only_wait_are_no_load() -> None:
    async with world() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("one", ALL_BLOCKS)
        router, _ = await stack.enter_async_context(swarm.client())
        for _ in range(4):
            session = await stack.enter_async_context(router.open_session(LENGTH, Codec.RAW))
            await Dialogue(session, random.Random(1)).step(5)
        assert node.role.offer().load > 0
        await trio.sleep(SETTLED_S)
        assert node.role.offer().load < 0.001


@simulated
async def test_a_session_counts_at_once_where_it_came_by_a_recovery_and_no_more_when_it_only_waits() -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        await start_measured(swarm, nursery, "first")
        async with swarm.client() as (router, _), router.open_session(LENGTH, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            for _ in range(StandingPolicy().proven_positions):
                await dialogue.step(1)
            await start_measured(swarm, nursery, "other")
            await trio.sleep(SETTLED_S)
            swarm.kill("first")
            for _ in range(StandingPolicy().proven_positions):
                await dialogue.step(1)
            assert session.route[0].peer == peer_named("other")
            lately_s = cost_s(router, "other")
            await trio.sleep(SETTLED_S + RoutePolicy().announced_after_s)
            assert cost_s(router, "other") < 0.7 * lately_s
        nursery.cancel_scope.cancel()


@simulated
async def test_what_own_sessions_have_left_of_a_load_steers_no_new_ones() -> None:
    """Else the sessions of a client would go to and fro between two servers, from one wave of them to the next."""
    async with world() as swarm, trio.open_nursery() as nursery:
        await start_measured(swarm, nursery, "used")
        async with swarm.client() as (router, _):
            over = trio.Event()

            async def decode() -> None:
                async with router.open_session(LENGTH, Codec.RAW) as session:
                    dialogue = Dialogue(session, random.Random(1))
                    await dialogue.step(LENGTH - 1)
                    while not over.is_set():
                        await dialogue.go_back(1)
                        await dialogue.step(1)

            async with trio.open_nursery() as texts:
                for _ in range(8):
                    texts.start_soon(decode)
                await trio.sleep(2 * SETTLED_S)
                over.set()
            (used,) = router.finder.swarm.view.of_model(router.finder.model.digest)
            assert used.offer.load > 0.5
            assert cost_s(router, "used") < 1.1 * FORWARD_S / len(ALL_BLOCKS)
        nursery.cancel_scope.cancel()


@dataclass(frozen=True, slots=True)
class Wave:
    """Sessions that decode at once, with what they took."""

    routes: Mapping[tuple[PeerId, ...], int]
    took_s: float


async def decode_at_once(router: Router, sessions: int, steps: int) -> Wave:
    """That number of sessions, each with its `steps`. In the end nothing is left of their load."""
    routes: Counter[tuple[PeerId, ...]] = Counter()

    async def decode(number: int) -> None:
        async with router.open_session(steps, Codec.RAW) as session:
            routes[tuple(hop.peer for hop in session.route)] += 1
            dialogue = Dialogue(session, random.Random(number))
            for _ in range(steps):
                await dialogue.step(1)

    began_s = trio.current_time()
    async with trio.open_nursery() as texts:
        for number in range(sessions):
            texts.start_soon(decode, number)
    took_s = trio.current_time() - began_s
    await trio.sleep(own_load.KEPT_S)
    return Wave(routes, took_s)


FLEET = {
    "whole": (ALL_BLOCKS, 0.06),
    "slower": (ALL_BLOCKS, 0.08),
    "first": (Span(0, 3), 0.05),
    "last": (Span(3, 6), 0.05),
}
"""The blocks of each server, and the seconds of its forward, as it says."""
SHARE = 0.15
"""Each further decode of a forward adds this share to it."""
SESSIONS, STEPS = 16, 20


@asynccontextmanager
async def proved_fleet() -> AsyncIterator[tuple[World, Router]]:
    """A client to which all of `FLEET` have proved themselves."""
    async with world() as swarm, trio.open_nursery() as nursery:
        swarm.said_share = SHARE
        for name, (span, forward_s) in FLEET.items():
            node = await swarm.start(name, span, said_us=round(1e6 * forward_s / len(span)))
            take_s(node, forward_s)
            nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)
        await trio.sleep(SETTLED_S)
        async with swarm.client() as (router, _):
            proved = await decode_at_once(router, len(FLEET), StandingPolicy().proven_positions)
            assert {peer for route in proved.routes for peer in route} == {peer_named(name) for name in FLEET}
            yield swarm, router
        nursery.cancel_scope.cancel()


def take_s(node: ServingNode, forward_s: float) -> None:
    """Its forward takes this time from now on, and each further decode a share of it."""
    node.worker.slower_by_s, node.worker.further_s = forward_s - FORWARD_S, SHARE * forward_s


@simulated
async def test_a_second_wave_of_sessions_takes_the_routes_of_the_first_one_at_the_same_rate() -> None:
    """Steps that were slow beside others of the same client are no server's fault."""
    async with proved_fleet() as (_, router):
        first, second = [await decode_at_once(router, SESSIONS, STEPS) for _ in range(2)]
        assert second.routes == first.routes
        assert second.took_s == pytest.approx(first.took_s, rel=0.02)


@simulated
async def test_a_server_that_has_become_slower_than_it_says_is_found_in_company() -> None:
    async with proved_fleet() as (swarm, router):
        said_s = FLEET["whole"][1]
        take_s(swarm.nodes["whole"], 4 * said_s)
        first, second = [await decode_at_once(router, SESSIONS, STEPS) for _ in range(2)]
        whole = (peer_named("whole"),)
        assert first.routes[whole] > SESSIONS / 2, "it is believed until it has computed"
        assert second.routes[whole] == 0
        alone = await decode_at_once(router, 1, STEPS)
        assert alone.routes[whole] == 0
