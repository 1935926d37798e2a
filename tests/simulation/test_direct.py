"""Sessions whose links go through relays until their peers can reach each other: they move, exact to the bit."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import combinations
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PoolPolicy, SpotCheckPolicy
from llmnode.errors import PeerUnreachable
from llmnode.session.saved import read
from llmnode.testing import Conditions, check_coverage, peer_named, seeds
from llmnode.wire.payload import Codec
from simulation.world import DELAY_S, SPANS, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from llmnode.core.ids import PeerId
    from llmnode.session.session import InferenceSession
    from llmnode.testing.link import MemoryLink
    from llmnode.testing.network import MemoryNetwork

POLICY = ClientPolicy(chunk_tokens=4)
MAX_LENGTH = 120
ME = peer_named("client")
SETTLE_S = 5.0
CONDITIONS = Conditions(delay_s=DELAY_S, jitter_s=DELAY_S)


@asynccontextmanager
async def relayed_world(seed: int = 0, twins: str = "a") -> AsyncIterator[World]:
    """A server or several for each span, and nobody reaches anybody but through a relay."""
    async with world(seed, CONDITIONS) as swarm:
        names = [f"{index}{twin}" for index in range(len(SPANS)) for twin in twins]
        for one, other in combinations([ME, *map(peer_named, names)], 2):
            swarm.internet.relay(one, other)
        for name in names:
            await swarm.start(name, SPANS[int(name[0])])
        await check_coverage(swarm)
        yield swarm


@asynccontextmanager
async def opened(swarm: World, policy: ClientPolicy = POLICY) -> AsyncIterator[tuple[InferenceSession, Dialogue]]:
    async with swarm.client(policy) as (router, _), router.open_session(MAX_LENGTH, Codec.RAW) as session:
        yield session, Dialogue(session, random.Random(1), policy=POLICY)


def punch_all(swarm: World) -> None:
    for one, other in combinations([ME, *(node.peer for node in swarm.nodes.values())], 2):
        swarm.internet.punch(one, other)


def ways(session: InferenceSession) -> set[bool]:
    """Whether its hops are reached through relays."""
    return {connection.relayed for connection in session.connections.values()}


def networks(swarm: World) -> list[MemoryNetwork]:
    return list(swarm.internet._networks.values())


def links_between(swarm: World, one: PeerId, other: PeerId) -> list[MemoryLink]:
    return [link for network in networks(swarm) if network.peer == one for link in network.links if link.peer == other]


@pytest.mark.parametrize("seed", seeds(30, long_run=60))  # the last that takes a new branch is 13
@simulated
async def test_sessions_move_whenever_two_peers_reach_each_other_and_nothing_is_lost(seed: int) -> None:
    rng = random.Random(seed)
    async with relayed_world(seed) as swarm, opened(swarm) as (session, dialogue):
        pairs = list(combinations([ME, *(node.peer for node in swarm.nodes.values())], 2))
        rng.shuffle(pairs)

        async def punch_one_after_the_other() -> None:
            for pair in pairs:
                await trio.sleep(rng.uniform(0, 1.0))
                swarm.internet.punch(*pair)

        assert ways(session) == {True}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(punch_one_after_the_other)
            for _ in range(20):
                await dialogue.step(rng.choice([1, 1, 1, 3, 7]))
                if session.position > 8 and rng.random() < 0.3:
                    await dialogue.go_back(rng.randrange(8))
        await trio.sleep(SETTLE_S)
        await dialogue.step(1)
        assert ways(session) == {False}
        assert not session.recoveries
        pushed = sum(node.server.tally.given_directly for node in swarm.nodes.values())
        assert pushed, "from server to server"
        await trio.sleep(3 * PoolPolicy().idle_s)
        assert not [link for network in networks(swarm) for link in network.links if link.relayed]
        await dialogue.step(1)
        assert not session.recoveries
        assert [timing.direct for timing in session.timings] == [False, True, True], "servers still push"


@simulated
async def test_a_session_that_is_idle_keeps_its_relayed_link_until_its_next_step() -> None:
    async with relayed_world() as swarm, opened(swarm) as (session, dialogue):
        await dialogue.step(3)
        punch_all(swarm)
        await trio.sleep(4 * PoolPolicy().idle_s)
        assert ways(session) == {True}
        await dialogue.step(1)
        assert ways(session) == {False}
        assert not session.recoveries
        await trio.sleep(3 * PoolPolicy().idle_s)
        assert not [link for peer in session.connections for link in links_between(swarm, ME, peer) if link.relayed]


@pytest.mark.parametrize("twins", ["a", "ab"])
@simulated
async def test_a_direct_link_that_dies_is_recovered_from_as_any(twins: str) -> None:
    async with relayed_world(twins=twins) as swarm, opened(swarm) as (session, dialogue):
        await dialogue.step(3)
        punch_all(swarm)
        await trio.sleep(SETTLE_S)
        await dialogue.step(3)
        assert ways(session) == {False}
        for peer in session.connections:
            for link in links_between(swarm, ME, peer):
                if not link.relayed:
                    link.fail(PeerUnreachable("cut"))
        for _ in range(3):
            await dialogue.step(2)
        assert session.recoveries
    await kv_is_free(swarm)


@simulated
async def test_a_direct_link_that_dies_before_a_session_moves_disturbs_nobody_and_another_is_tried() -> None:
    async with relayed_world() as swarm, opened(swarm) as (session, dialogue):
        await dialogue.step(3)
        punch_all(swarm)
        await trio.sleep(SETTLE_S)
        for peer in session.connections:
            for link in links_between(swarm, ME, peer):
                if not link.relayed:
                    link.fail(PeerUnreachable("cut"))
        await trio.sleep(0.5)
        await dialogue.step(1)
        assert ways(session) == {True}
        await trio.sleep(SETTLE_S + PoolPolicy().retry_s)
        await dialogue.step(1)
        assert ways(session) == {False}
        assert not session.recoveries


@simulated
async def test_a_server_that_is_draining_keeps_the_session_where_it_is() -> None:
    async with relayed_world() as swarm, opened(swarm) as (session, dialogue):
        await dialogue.step(3)
        for node in swarm.nodes.values():
            node.server.is_draining = True
        punch_all(swarm)
        await trio.sleep(SETTLE_S)
        for _ in range(3):
            await dialogue.step(1)
        assert ways(session) == {True}
        assert not session.recoveries


@simulated
async def test_a_session_that_was_exported_moves_and_is_still_leased(tmp_path: Path) -> None:
    file = tmp_path / "session"
    async with relayed_world() as swarm:
        async with opened(swarm) as (session, dialogue):
            await dialogue.step(3)
            assert await session.export(file) > 0
            punch_all(swarm)
            await trio.sleep(SETTLE_S)
            await dialogue.step(1)
            assert ways(session) == {False}
            assert not session.recoveries
        assert all(node.server.sessions for node in swarm.nodes.values())
        async with swarm.client(POLICY) as (router, _), router.resume_session(read(file)) as again:
            assert again.position == 3
            assert not again.recoveries


@pytest.mark.parametrize("seed", seeds(20))
@simulated
async def test_a_spot_check_that_is_under_way_is_not_moved_away_from(seed: int) -> None:
    rng = random.Random(seed)
    policy = replace(POLICY, spot_checks=SpotCheckPolicy(1.0))
    async with relayed_world(seed, twins="ab") as swarm, opened(swarm, policy) as opening:
        session, dialogue = opening
        checks = session.spot_checks
        assert checks is not None
        for number in range(12):
            await dialogue.step(rng.choice([1, 3]))
            if number == 4:
                punch_all(swarm)
            await trio.sleep(rng.uniform(0, 0.3))
        await checks.finish()
        await dialogue.step(1)
        await checks.finish()
        assert ways(session) == {False}
        assert not session.recoveries
        assert checks.passed and not checks.given_up
