"""Nodes that move by themselves, with real sessions: gaps are closed, and results stay right to the bit."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.announcement import PeerState
from llmnode.testing import seeds
from simulation.world import SPANS, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from llmnode.core.span import Span

PAIRS = sorted(2 * SPANS)


@asynccontextmanager
async def rebalancing(served: Sequence[Span], seed: int = 0) -> AsyncIterator[tuple[World, list[str]]]:
    """Nodes s0, s1 ... that serve these spans, and rebalance. There is a line for each move."""
    lines: list[str] = []
    async with world(seed) as swarm:
        for number, span in enumerate(served):
            await swarm.start(f"s{number}", span, report_move=lines.append)
        await trio.sleep(5)
        yield swarm, lines
        await kv_is_free(swarm)


def spans(swarm: World) -> Sequence[Span]:
    return sorted(node.role.span for node in swarm.nodes.values() if node.state is PeerState.ONLINE)


async def use(swarm: World, seed: int, steps: int = 10) -> None:
    """Steps of a session. They fail if an answer is not that of an undisturbed session."""
    async with swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(seed))
        for _step in range(steps):
            await dialogue.step(2)


@simulated
async def test_a_swarm_in_balance_stays_as_it_is() -> None:
    async with rebalancing(PAIRS) as (swarm, lines):
        await trio.sleep(600)
        assert spans(swarm) == PAIRS
        assert not lines


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_node_moves_to_blocks_that_nobody_serves_any_more(seed: int) -> None:
    async with rebalancing(PAIRS, seed) as (swarm, lines):
        swarm.kill("s2")
        swarm.kill("s3")
        await trio.sleep(90)
        assert set(spans(swarm)) == set(SPANS)
        assert len(lines) == 1, lines
        await use(swarm, seed)
        await trio.sleep(300)
        assert len(lines) == 1, "nobody moves back"


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_sessions_are_right_to_the_bit_while_nodes_move_to_slow_blocks(seed: int) -> None:
    async with rebalancing([SPANS[0]] * 4 + SPANS[1:], seed) as (swarm, lines):
        for number in range(12):
            await use(swarm, 100 * seed + number)
            await trio.sleep(30)
        assert spans(swarm) == PAIRS
        assert len(lines) == 2, lines


@simulated
async def test_the_last_server_of_a_block_stays_where_it_is() -> None:
    async with rebalancing(PAIRS) as (swarm, lines):
        for name in ("s1", "s2", "s3"):
            swarm.kill(name)
        await trio.sleep(300)
        assert set(spans(swarm)) == set(SPANS)
        assert len(lines) == 1
        swarm.kill("s0")  # three nodes are left, and then two: one block is lost whatever they do
        lines.clear()
        await trio.sleep(300)
        assert len(lines) <= 1, lines
