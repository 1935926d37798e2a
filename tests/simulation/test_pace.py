"""Servers try each other's pace, and move where one that boasts is slow."""

from __future__ import annotations

import random
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import PeerState
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.speed import NetworkSpeed
from llmnode.node.serve.rebalance import rebalance
from llmnode.session.pace import CLOSES_WITHIN_S, MOST, WITHIN_S, try_pace
from llmnode.testing.conditions import Conditions
from llmnode.testing.hostile.clients import announced as signed_announcement
from llmnode.testing.hostile.clients import news_of, read_all
from llmnode.testing.network import peer_named
from simulation.world import ALL_BLOCKS, SPANS, kv_is_free, simulated, world

if TYPE_CHECKING:
    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.swarm.peer_connection import PeerConnection
    from simulation.world import ServingNode, World

LINE = NetworkSpeed(1e9)


async def tried(swarm: World, node: ServingNode, upload_bytes_per_s: float = 1e9) -> float | None:
    """The pace of `node` as another server finds it."""
    other = await swarm.start("other", ALL_BLOCKS)
    await trio.sleep(5)
    (announced,) = [each for each in other.swarm.view.announcements() if each.peer == node.peer]
    connection = await other.swarm.connect(announced.addresses)
    return await try_pace(connection, announced, node.role.model, upload_bytes_per_s)


@pytest.mark.parametrize("delay_s", [0.0, 0.2])
@pytest.mark.parametrize("slower_by_s", [0.25, 2.0])
@simulated
async def test_a_pace_is_that_of_the_blocks_however_far_the_server_is(slower_by_s: float, delay_s: float) -> None:
    async with world() as swarm:
        swarm.internet.set_conditions(peer_named("node"), peer_named("other"), Conditions(delay_s=delay_s))
        swarm.internet.set_conditions(peer_named("other"), peer_named("node"), Conditions(delay_s=delay_s))
        node = await swarm.start("node", SPANS[1], said_us=1)
        node.worker.slower_by_s = slower_by_s
        assert await tried(swarm, node) == pytest.approx(MOST / slower_by_s, rel=0.15)
        await kv_is_free(swarm)


@simulated
async def test_our_own_slow_line_is_not_taken_for_a_slow_server() -> None:
    async with world() as swarm:
        node = await swarm.start("node", SPANS[1], said_us=1)
        node.worker.slower_by_s = 1.0
        sends_s = 0.8
        found = await tried(swarm, node, MOST * node.role.model.row_bytes / sends_s)
        assert found == pytest.approx(MOST / (1.0 - sends_s), rel=0.3)


@simulated
async def test_a_server_that_hangs_has_shown_nearly_nothing_and_keeps_nobody_for_long() -> None:
    async with world() as swarm:
        node = await swarm.start("node", SPANS[1], said_us=1)
        node.worker.slower_by_s = 1000.0
        began_s = trio.current_time()
        found = await tried(swarm, node)
        assert found is not None
        assert found <= 1.1 * MOST / WITHIN_S
        assert trio.current_time() - began_s < 5 + WITHIN_S + CLOSES_WITHIN_S + 1


@simulated
async def test_a_server_that_refuses_a_trial_has_shown_nothing() -> None:
    async with world() as swarm:
        node = await swarm.start("node", SPANS[1], said_us=1)
        assert node.server.served is not None
        node.server.served.admission.close("as told")
        assert await tried(swarm, node) is None


@pytest.mark.parametrize(("slower_by_s", "moves"), [(5.0, 1), (0.0, 0)])
@simulated
async def test_nodes_leave_no_blocks_to_a_slow_server_that_boasts(slower_by_s: float, moves: int) -> None:
    """It alone has its blocks, and the others have two servers each."""
    lines: list[str] = []
    async with world() as swarm:
        nodes = [
            await swarm.start(f"s{number}", span, report_move=lines.append)
            for number, span in enumerate([*2 * SPANS[:1], *2 * SPANS[2:3]])
        ]
        boaster = await swarm.start("boaster", SPANS[1], said_us=1)
        boaster.worker.slower_by_s = slower_by_s
        for node in (*nodes, boaster):
            node.role.note_network(LINE)
        await trio.sleep(10 * RebalancePolicy().check_every_s)
        assert len(lines) == moves, lines
        served = [node.role.span for node in nodes if node.state is PeerState.ONLINE]
        assert served.count(SPANS[1]) == moves


@simulated
async def test_a_server_that_boasts_is_tried_though_others_beside_it_are_absent() -> None:
    """Else identities that answer nothing, which anybody may announce, keep a server beside them from being tried."""
    tried_peers: list[PeerId] = []

    async def noted(to: PeerConnection, announced: Announcement, model: ModelInfo, upload: float) -> float | None:
        tried_peers.append(announced.peer)
        return await try_pace(to, announced, model, upload)

    policy = RebalancePolicy(jitter=0.0)
    async with world() as swarm, trio.open_nursery() as nursery:
        node, boaster = await swarm.start("node", ALL_BLOCKS), await swarm.start("boaster", ALL_BLOCKS, said_us=1)
        node.role.note_network(LINE)
        node.role.stays = False
        by_plan = partial(rebalance, node.peer, node.role, node.swarm, policy=policy, rng=random.Random(0))
        nursery.start_soon(partial(by_plan, try_pace=noted))
        await trio.sleep(policy.check_every_s - 5)
        stranger = swarm.internet.network("stranger")
        fakes = [swarm.internet.network(f"fake {number}") for number in range(2)]
        for each in fakes:
            swarm.internet.black_holes.update(each.addresses[:1])
        link = await stranger.dial(node.network.addresses[0])
        nursery.start_soon(read_all, link)
        await link.send(news_of([signed_announcement(swarm, each, each.addresses) for each in fakes]))
        await trio.sleep(2)
        assert {each.peer for each in fakes} < {each.peer for each in node.swarm.view.announcements()}
        assert not tried_peers
        await trio.sleep(policy.check_every_s / 2)
        assert tried_peers == [boaster.peer]
        nursery.cancel_scope.cancel()
