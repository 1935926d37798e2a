"""Servers announce how busy they are, and new sessions go to those that are less so."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, RoutePolicy, StandingPolicy
from llmnode.node.serve.network_speed import keep_measuring
from llmnode.testing import peer_named, seeds
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, DELAY_S, FORWARD_S, Dialogue, World, simulated, world

if TYPE_CHECKING:
    from llmnode.session.router import Router

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
    return router.finder._costs(servers)[peer_named(name)].block_s


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
