"""Worker processes that end, and are there again a while later: sessions go on at others, right to the bit."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio
import trio.lowlevel

from llmnode.core.announcement import PeerState
from llmnode.testing import seeds
from simulation.world import KV_TOKENS, MODEL, SPANS, Dialogue, World, kv_is_free, pairs_of_servers, simulated, wander

if TYPE_CHECKING:
    from llmnode.testing.world import ServingNode

STEPS = 40
LENGTH = 64


async def lose(node: ServingNode) -> None:
    """Its next worker comes when it may `begin`."""
    node.source.gate = trio.Event()
    node.source.lose()
    await until(node, PeerState.JOINING)


async def begin(node: ServingNode) -> None:
    assert node.source.gate is not None
    node.source.gate.set()
    node.source.gate = None
    await until(node, PeerState.ONLINE)


async def until(node: ServingNode, state: PeerState) -> None:
    while node.state is not state:
        await trio.lowlevel.checkpoint()


async def lose_workers(swarm: World, rng: random.Random) -> None:
    """One after the other, so that of each span there is always one that serves."""
    while True:
        await trio.sleep(rng.uniform(0, 2))
        node = swarm.nodes[rng.choice(sorted(swarm.nodes))]
        await lose(node)
        await trio.sleep(rng.uniform(0, 2))
        await begin(node)


@pytest.mark.parametrize("seed", seeds(30, long_run=50))  # the last that takes a new branch is 27
@simulated
async def test_sessions_outlive_the_workers_of_their_servers(seed: int) -> None:
    rng = random.Random(seed)
    async with pairs_of_servers(seed) as swarm:
        async with swarm.session(max_length=LENGTH) as (session, _), trio.open_nursery() as nursery:
            nursery.start_soon(lose_workers, swarm, rng)
            await wander(Dialogue(session, rng), rng, STEPS, LENGTH)
            nursery.cancel_scope.cancel()
        await kv_is_free(swarm)


@pytest.mark.parametrize("stage", range(len(SPANS)))
@simulated
async def test_a_worker_that_is_lost_between_two_steps_costs_one_recovery_and_no_waiting(stage: int) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        node = swarm.node(session.route[stage].peer)
        await lose(node)
        began_s = trio.current_time()
        await dialogue.step(1)
        assert trio.current_time() - began_s < 1.0, "who was to push to it need not find out by waiting"
        (recovery,) = session.recoveries
        assert recovery.lost == node.peer


@simulated
async def test_a_server_whose_worker_is_lost_takes_no_sessions_and_then_takes_them_again() -> None:
    async with pairs_of_servers() as swarm:
        first, second = (swarm.nodes[f"1{twin}"] for twin in "ab")
        for lost, other in ((first, second), (second, first)):
            await lose(lost)
            async with swarm.session() as (session, _):
                assert session.route[1].peer == other.peer
                await Dialogue(session, random.Random(1)).step(20)
            await begin(lost)


@simulated
async def test_what_idle_sessions_have_lost_is_free_for_others() -> None:
    async with pairs_of_servers() as swarm, AsyncExitStack() as stack:
        longest = MODEL.context_tokens
        for _ in range(2 * (KV_TOKENS // longest)):  # two servers hold each span
            await stack.enter_async_context(swarm.session(max_length=longest))
        assert {node.worker.kv_tokens_free for node in swarm.nodes.values()} == {0}
        for node in swarm.nodes.values():
            await lose(node)
            await begin(node)
        began_s = trio.current_time()
        async with swarm.session(max_length=longest) as (session, _):
            assert trio.current_time() - began_s < 1.0, "it need not wait for KV"
            await Dialogue(session, random.Random(1)).step(20)
