"""A session whose client is silent for too long is closed, and no other one."""

from __future__ import annotations

import random

import trio

from llmnode.core.policy import ClientPolicy
from llmnode.testing import check_coverage
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, Dialogue, simulated, world


@simulated
async def test_each_session_is_closed_when_it_has_been_idle_for_its_own_time() -> None:
    async with world() as swarm:
        await swarm.start("server", ALL_BLOCKS)
        await check_coverage(swarm)
        async with (
            swarm.client(ClientPolicy()) as (router, _),
            router.open_session(200, Codec.RAW) as silent,
            router.open_session(200, Codec.RAW) as talking,
        ):
            server = swarm.node(silent.route[0].peer).server
            idle_s = server.policy.session_idle_s
            dialogue = Dialogue(talking, random.Random(1))
            await Dialogue(silent, random.Random(2)).step(1)
            await dialogue.step(1)
            await trio.sleep(0.9 * idle_s)
            await dialogue.step(1)
            await trio.sleep(0.09 * idle_s)
            assert len(server.sessions) == 2
            await trio.sleep(0.02 * idle_s)
            assert len(server.sessions) == 1, "the silent one is over"
            await trio.sleep(0.88 * idle_s)
            assert len(server.sessions) == 1, "the other one has had a step since then"
            await trio.sleep(0.02 * idle_s)
            assert not server.sessions
            await dialogue.step(1)
            assert talking.recoveries, "it is opened again, and its positions are replayed"
