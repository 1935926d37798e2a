"""Rows with adapters go over to better servers, which get the adapters."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.testing import exact_input, exact_output
from llmnode.wire.payload import Codec
from simulation.adapters import drawn_adapter
from simulation.test_moving import MOVES
from simulation.test_moving_rows import LENGTH, STEPS, slow_world
from simulation.world import ALL_BLOCKS, kv_is_free, simulated

if TYPE_CHECKING:
    from llmnode.session.session import InferenceSession
    from llmnode.wire.adapter import Adapter


@pytest.mark.parametrize("adapters", [1, 2])
@simulated
async def test_rows_with_adapters_move_and_the_newcomer_gets_each_adapter_once(adapters: int) -> None:
    """They compute the same as before, to the bit."""
    rng = random.Random(3)
    drawn = [drawn_adapter(rng) for _ in range(adapters)]
    async with slow_world() as (swarm, _), swarm.client(MOVES) as (router, _), AsyncExitStack() as stack:
        rows: list[tuple[InferenceSession, Adapter]] = []
        for number in range(2):
            adapter, first = drawn[number % adapters], rows[0][0] if rows else None
            opening = router.open_session(LENGTH, Codec.RAW, first, adapter=adapter)
            rows.append((await stack.enter_async_context(opening), adapter))
        said = [b"" for _ in rows]

        async def step(number: int) -> None:
            session, adapter = rows[number]
            hidden = exact_input(rng, 1)
            said[number] += hidden
            answer = bytes(await session.step(hidden))
            assert answer == exact_output(said[number], ALL_BLOCKS, adapter.parts)[-len(hidden) :]

        for _ in range(STEPS):
            async with trio.open_nursery() as steps:
                for number in range(len(rows)):
                    steps.start_soon(step, number)
        assert [len(session.moves) for session, _ in rows] == [1, 1]
        assert not any(session.recoveries for session, _ in rows)
        assert swarm.nodes["fast"].worker.executor.adapters.keys() == {each.digest for each in drawn}
        await stack.aclose()
        await kv_is_free(swarm)
