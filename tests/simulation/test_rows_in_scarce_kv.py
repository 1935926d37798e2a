"""Rows of several generations at servers with scarce KV. They come in one after the other, and wait for each other."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.texts.beams import sessions_of_rows
from llmnode.errors import NoRoute, PeerError
from llmnode.testing import Cast, Dialogue, FaultPlan, Odds, check_kv_is_free, seeds, simulate
from simulation.beams import opened, step_all
from simulation.chaos import KINDS, LONGEST_OUTAGE_S
from simulation.scarce import PATIENT
from simulation.test_growing_kv import LONG_S, PLACES, WAITING, scarce
from simulation.world import KV_TOKENS

if TYPE_CHECKING:
    from llmnode.testing.world import SimulatedClient

ROWS = 3


@pytest.mark.parametrize("has_faults", [False, True], ids=["", "with faults"])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("seed", seeds(2))
def test_rows_of_generations_that_wait_for_each_other_all_end(seed: int, place: str, has_faults: bool) -> None:
    simulate(partial(search, seed, place, has_faults), seed=seed)


async def opened_at_last(stack: AsyncExitStack, client: SimulatedClient, max_length: int) -> list[Dialogue]:
    """All holders of a span may be away at the moment."""
    while True:
        try:
            return await stack.enter_async_context(opened(client.router, ROWS, beside=True, max_length=max_length))
        except (NoRoute, PeerError):
            await trio.sleep(1)


async def search(seed: int, place: str, has_faults: bool) -> None:
    """Five clients with three beams each want 960 positions in the end, and a server has 400."""
    rng, done, length = random.Random(seed), list[int](), KV_TOKENS // 6
    names = [f"{number}" for number in range(len(PLACES[place]))]
    odds = Odds(rng.randrange(1, 4) if has_faults else 0, longest_s=LONGEST_OUTAGE_S, kinds=KINDS)
    async with scarce(seed) as swarm, AsyncExitStack() as stack:
        for name, span in zip(names, PLACES[place], strict=True):
            await swarm.start(name, span)
        await trio.sleep(1)

        async def use(client: SimulatedClient, number: int) -> None:
            await trio.sleep(rng.uniform(0, 3))
            async with AsyncExitStack() as rows_of_one:
                beams = await opened_at_last(rows_of_one, client, length)
                for each in beams:
                    each._policy = WAITING
                while beams[0].session.position < length:
                    if rng.random() < 0.5:
                        sources = [rng.randrange(ROWS) for _ in beams]
                        rows = sessions_of_rows(sources)
                        for row, source in zip(rows, sources, strict=True):
                            if row != source:
                                await beams[source].fork(beams[row])
                        beams = [beams[row] for row in rows]
                    await step_all(beams, min(rng.choice((1, 3, 16)), length - beams[0].session.position))
                    await trio.sleep(rng.choice((0, 0, 0.5, 2, 6)))
                done.append(number)

        clients = [await stack.enter_async_context(swarm.client(PATIENT, name=f"c{each}")) for each in range(5)]
        async with FaultPlan.draw(seed, Cast(names, [f"c{number}" for number in range(5)]), odds).upon(swarm):
            with trio.fail_after(LONG_S):
                async with trio.open_nursery() as nursery:
                    for number, client in enumerate(clients):
                        nursery.start_soon(use, client, number)
        assert sorted(done) == list(range(5))
        if not has_faults:
            assert not any(client.router.finder.banned for client in clients)
        await check_kv_is_free(swarm)
