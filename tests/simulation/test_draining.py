"""Servers that drain: their sessions go on, and no new ones come."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import PeerState
from llmnode.errors import PeerRefused
from llmnode.session.saved import read
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, SPANS, Dialogue, pairs_of_servers, simulated, world

if TYPE_CHECKING:
    from pathlib import Path


def name_of(peer: str) -> str:
    return peer.removeprefix("peer-")


@simulated
async def test_a_draining_server_serves_what_it_has_and_takes_nothing_new() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        name = name_of(session.route[1].peer)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.drain, name, 30)
            await trio.sleep(10)
            await dialogue.step(3)
            assert not session.recoveries, "it serves its session"
            assert swarm.nodes[name].state is PeerState.DRAINING
            for _ in range(5):
                async with swarm.session() as (other, _):
                    assert name_of(other.route[1].peer) != name
            await trio.sleep(25)
            await dialogue.step(3)
        assert [name_of(each.lost) for each in session.recoveries] == [name], "then it left"
        await dialogue.step(3)


@simulated
async def test_a_draining_server_leaves_when_its_last_session_ends() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _), trio.open_nursery() as nursery:
        await Dialogue(session, random.Random(1)).step(20)
        name = name_of(session.route[1].peer)
        nursery.start_soon(swarm.drain, name, 1000)
        await trio.sleep(5)
        assert name in swarm.nodes
        await session.close()
        await trio.sleep(3)
        assert name not in swarm.nodes


@simulated
async def test_a_draining_server_does_not_wait_for_clients_that_have_left(tmp_path: Path) -> None:
    file = tmp_path / "session"
    async with pairs_of_servers() as swarm:
        async with swarm.client() as (router, _), router.open_session(64, Codec.RAW) as session:
            dialogue = Dialogue(session, random.Random(1))
            await dialogue.step(20)
            assert await session.export(file)
            drained = session.route[1].peer
        assert swarm.node(drained).server.sessions, "it waits for its client"
        with trio.fail_after(3):
            await swarm.drain(name_of(drained), 1000)
        async with swarm.client() as (router, _), router.resume_session(read(file)) as session:
            assert [each.span for each in session.recoveries] == [SPANS[1]]
            dialogue.session = session
            await dialogue.step(1)


@simulated
async def test_a_server_that_drains_refuses_whoever_has_not_heard_of_it() -> None:
    async with world() as swarm:
        await swarm.start("only", ALL_BLOCKS)
        await trio.sleep(10)
        async with swarm.client() as (router, _), router.open_session(64, Codec.RAW) as session:
            swarm.nodes["only"].server.is_draining = True
            with pytest.raises(PeerRefused) as refused:
                async with router.open_session(8, Codec.RAW):
                    pass
            assert refused.value.code == RefusalCode.BUSY
            assert "draining" in refused.value.reason
            await Dialogue(session, random.Random(1)).step(1)
