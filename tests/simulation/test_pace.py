"""Servers try each other's pace, and move where one that boasts is slow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import PeerState
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.speed import NetworkSpeed
from llmnode.session.pace import CLOSES_WITHIN_S, MOST, WITHIN_S, try_pace
from llmnode.testing.conditions import Conditions
from llmnode.testing.network import peer_named
from simulation.world import ALL_BLOCKS, SPANS, kv_is_free, simulated, world

if TYPE_CHECKING:
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
