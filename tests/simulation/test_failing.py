"""A session through stages that fail when they are sent something, as `tests/bench/run table1` has them."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from bench.table1.failing import Draws, FailingNetwork
from llmnode.core.policy import ClientPolicy, SwarmPolicy
from llmnode.errors import SessionLost
from llmnode.session.peer_finder import PeerFinder
from llmnode.session.router import Router
from llmnode.session.session import open_session
from llmnode.swarm.membership import Swarm
from llmnode.swarm.pool import open_pool
from llmnode.testing import check_coverage, inline, seeds, simulated_ms
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms
from simulation.world import ALL_BLOCKS, MODEL, ROW, SPANS, Dialogue, World, kv_is_free, simulated, world
from simulation.world import pairs_of_servers as two_servers_a_span

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

RATES = [0.03, 0.1, 0.3]
STEPS = 40
UNDISTURBED_S = 0.12
RECOVERY_S = 0.9
"""Some round trips and reading at most 40 positions; less than `RoutePolicy.retry_s`."""


@asynccontextmanager
async def failing_client(swarm: World) -> AsyncIterator[tuple[FailingNetwork, Router]]:
    network = FailingNetwork(swarm.internet.network("client"))
    contacts = [address for node in swarm.nodes.values() for address in node.network.addresses]
    async with open_pool(network) as pool, trio.open_nursery() as nursery:
        view = Swarm(
            network, pool, SwarmPolicy(), contacts=contacts, now_ms=simulated_ms, rng=random.Random(1), roams=False
        )
        await view.meet_all(contacts)
        nursery.start_soon(view.run)
        yield network, Router(PeerFinder(MODEL, pool, view, ClientPolicy(chunk_tokens=8), random.Random(1), inline))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("seed", seeds(30, long_run=50))  # the last that takes a new branch is 28
@simulated
async def test_each_failure_is_one_recovery_at_once_though_all_peers_have_failed_lately(seed: int) -> None:
    rng = random.Random(seed)
    draws = Draws(str(seed), rng.choice(RATES), len(SPANS))
    async with two_servers_a_span(seed) as swarm:
        async with failing_client(swarm) as (network, router), router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, rng)
            failures = 0
            for step in range(STEPS):
                stages = draws.failing(step, 0)
                failures += len(stages)
                began_s = trio.current_time()
                with network.failing(session, session.position, stages):
                    await dialogue.step(1)
                assert trio.current_time() - began_s < UNDISTURBED_S + RECOVERY_S * len(stages)
                assert len(session.recoveries) == network.broken == failures
                assert all(hop.direct for hop in session.timings[1:])
        await kv_is_free(swarm)


@pytest.mark.parametrize("stage", range(len(SPANS)))
@simulated
async def test_without_a_finder_a_failure_ends_the_session_when_the_stages_before_have_computed(stage: int) -> None:
    async with world() as swarm:
        workers = [(await swarm.start(str(number), span)).worker for number, span in enumerate(SPANS)]
        await check_coverage(swarm)
        async with failing_client(swarm) as (network, router):
            route, connections = await router.finder.find(ALL_BLOCKS, 0, (), hurry=True)
            async with open_session(route, connections, SessionTerms(MODEL, 64, Codec.RAW, ClientPolicy())) as session:
                await session.step(bytes(ROW))
                with network.failing(session, 1, [stage]), pytest.raises(SessionLost) as lost:
                    await session.step(bytes(ROW))
            assert [error.span for error in lost.value.causes] == [SPANS[stage]]
            assert [worker.executor.forwards for worker in workers[:stage]] == [2] * stage
            assert {worker.executor.forwards for worker in workers[stage + 1 :]} <= {1}
        await kv_is_free(swarm)
