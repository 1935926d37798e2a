"""Nodes that join at the same moment all choose the same blocks. While they load, they hear of each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import PeerState
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.testing import seeds
from simulation.world import SPANS, simulated, world

if TYPE_CHECKING:
    from llmnode.core.span import Span
    from llmnode.testing.world import World

POLICY = RebalancePolicy()
LONG_S = 2 * POLICY.joins_together_s


async def start_together(swarm: World, first_load_s: float) -> None:
    """Nodes that all have chosen the first blocks, since they knew nobody. They are online at the end."""
    await swarm.start_relay("r0")
    swarm.first_load_s = first_load_s
    async with trio.open_nursery() as nursery:
        for number in range(len(SPANS)):
            nursery.start_soon(swarm.start, f"s{number}", SPANS[0])


@pytest.mark.parametrize("seed", seeds(5))
@simulated
async def test_nodes_that_load_for_long_choose_again_and_then_hold_all_blocks(seed: int) -> None:
    async with world(seed) as swarm:
        began_s = trio.current_time()
        await start_together(swarm, LONG_S)
        assert sorted(node.role.span for node in swarm.nodes.values()) == SPANS
        assert trio.current_time() - began_s < POLICY.joins_together_s + LONG_S + 1


@simulated
async def test_a_node_that_has_loaded_by_then_keeps_its_blocks() -> None:
    """It can move as any other, which costs as little."""
    async with world() as swarm:
        await start_together(swarm, POLICY.joins_together_s - 5)
        await trio.sleep(LONG_S)
        assert [node.role.span for node in swarm.nodes.values()] == [SPANS[0]] * len(SPANS)


@pytest.mark.parametrize("span", SPANS)
@simulated
async def test_a_node_that_joins_a_swarm_alone_goes_on_with_its_load(span: Span) -> None:
    """Whether or not these blocks are still those that need it most."""
    async with world() as swarm:
        for number, served in enumerate(SPANS[1:]):
            await swarm.start(f"s{number}", served)
        swarm.first_load_s = LONG_S
        began_s = trio.current_time()
        node = await swarm.start("late", span)
        assert trio.current_time() - began_s < LONG_S + 1
        assert (node.state, node.role.span) == (PeerState.ONLINE, span)
