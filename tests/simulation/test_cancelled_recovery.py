"""A step that is cancelled, or a session that is closed, at any moment of a recovery."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.span import Span
from llmnode.errors import SessionClosed
from simulation.world import ALL_BLOCKS, ROW, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.session.session import InferenceSession


@asynccontextmanager
async def recovering_session() -> AsyncIterator[tuple[World, InferenceSession]]:
    """A session that has lost its only peer and is about to open two hops instead."""
    async with world() as swarm:
        await swarm.start("whole", ALL_BLOCKS)
        for half in (Span(0, 3), Span(3, 6)):
            await swarm.start(f"from{half.start}", half)
        await trio.sleep(10)
        async with swarm.session() as (session, _):
            await Dialogue(session, random.Random(1)).step(20)
            swarm.kill("whole")
            yield swarm, session
        await kv_is_free(swarm)


DURING_RECOVERY_S = [0.01 * n for n in range(1, 25)]
"""Moments after the loss; all is over in a quarter of a second."""


@pytest.mark.parametrize("after_s", DURING_RECOVERY_S)
@simulated
async def test_a_step_that_is_cancelled_during_recovery_ends_its_session(after_s: float) -> None:
    async with recovering_session() as (_, session):
        with trio.move_on_after(after_s) as patience:
            await session.step(bytes(ROW))
        if patience.cancelled_caught:
            with pytest.raises(SessionClosed):
                await session.step(bytes(ROW))


@pytest.mark.parametrize("after_s", DURING_RECOVERY_S)
@simulated
async def test_a_session_that_is_closed_during_recovery_leaves_no_kv(after_s: float) -> None:
    async with recovering_session() as (swarm, session):

        async def step() -> None:
            with suppress(SessionClosed):
                await session.step(bytes(ROW))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(step)
            await trio.sleep(after_s)
            await session.close()
        await kv_is_free(swarm)
