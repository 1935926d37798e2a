"""Servers announce how busy they are, and new sessions go to those that are less so."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack

import pytest
import trio

from llmnode.core.policy import ClientPolicy, RoutePolicy
from llmnode.testing import seeds
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, DELAY_S, FORWARD_S, Dialogue, World, simulated, world

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
