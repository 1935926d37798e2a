"""Rows of several generations at servers with scarce KV. They come in one after the other, and wait for each other."""

from __future__ import annotations

import random
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.policy import RecoveryPolicy
from llmnode.core.texts.beams import sessions_of_rows
from llmnode.errors import NoRoute, PeerError, PeerRefused
from llmnode.session.rows import Rows
from llmnode.testing import Cast, Dialogue, FaultPlan, Odds, check_kv_is_free, seeds, simulate, simulated
from llmnode.wire.payload import Codec
from simulation.beams import opened, step_all
from simulation.chaos import KINDS, LONGEST_OUTAGE_S
from simulation.scarce import PATIENT
from simulation.test_growing_kv import LONG_S, PIECE, PLACES, WAITING, scarce
from simulation.world import ALL_BLOCKS, KV_TOKENS, ROW

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


@simulated
async def test_a_search_for_kv_through_a_route_of_two_has_one_deadline() -> None:
    """The second server stays full. The first is let go, and computes the text again, in each turn of the search."""
    patience_s = 60.0
    policy = replace(PATIENT, recovery=RecoveryPolicy(kv_patience_s=patience_s))
    async with scarce() as swarm, AsyncExitStack() as stack:
        first, second = [await swarm.start(f"{number}", span) for number, span in enumerate(PLACES["a route of two"])]
        await trio.sleep(1)
        client = await stack.enter_async_context(swarm.client(policy))
        (dialogue,) = await stack.enter_async_context(opened(client.router, 1))
        await dialogue.step(PIECE)
        second.worker.executor.occupy(second.worker.kv_tokens_free)
        computed, began_s = first.server.tally.positions, trio.current_time()
        with pytest.raises(NoRoute):
            await dialogue.session.step(bytes(ROW))
        assert trio.current_time() - began_s == pytest.approx(patience_s, rel=0.2)
        assert first.server.tally.positions > computed + 1, "it has computed the text again"
        second.worker.executor.occupy(0)
        await dialogue.step(1)
        await dialogue.session.close()
        await check_kv_is_free(swarm)


@simulated
async def test_a_session_that_was_let_go_comes_back_before_it_is_copied() -> None:
    async with scarce() as swarm, AsyncExitStack() as stack:
        node = await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(PATIENT))
        source, copy = await stack.enter_async_context(opened(client.router, 2, beside=True))
        await source.step(20)
        await source.session._hops.let_go()
        await source.fork(copy)
        assert node.worker.executor.forks == [(0, 20)]
        await step_all([source, copy])
        assert (len(source.session.recoveries), len(copy.session.recoveries)) == (1, 0)


@simulated
async def test_a_source_keeps_its_kv_until_it_is_copied() -> None:
    """Meanwhile another row waits for KV, and has those that are not in use free theirs."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(PATIENT))
        source, copy, other = await stack.enter_async_context(opened(client.router, 3, beside=True))
        await step_all([source, other], 20)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(source.fork, copy)
            await trio.testing.wait_all_tasks_blocked()
            await source.session.rows.let_go()
        await step_all([source, copy, other])
        assert [len(each.session.recoveries) for each in (source, copy, other)] == [0, 0, 1]
        await source.session.rows.let_go()
        await step_all([source, copy])
        assert [len(each.session.recoveries) for each in (source, copy)] == [1, 1], "it is in use no more"


@simulated
async def test_a_session_that_was_let_go_and_may_lose_no_hop_finds_no_route() -> None:
    policy = replace(PATIENT, recovery=RecoveryPolicy(replacements=0))
    async with scarce() as swarm, AsyncExitStack() as stack:
        await swarm.start("0", ALL_BLOCKS)
        client = await stack.enter_async_context(swarm.client(policy))
        (dialogue,) = await stack.enter_async_context(opened(client.router, 1))
        await dialogue.step(PIECE)
        await dialogue.session.rows.let_go()
        with pytest.raises(NoRoute, match="its KV was freed"):
            await dialogue.session.step(bytes(ROW))


@simulated
async def test_rows_that_do_not_begin_alike_free_their_kv_for_each_other() -> None:
    """Each opens where there is space. When one of them has grown there is none for the other, until it is let go."""
    async with scarce() as swarm, AsyncExitStack() as stack:
        await swarm.start("0", ALL_BLOCKS)
        client, rows, length = await stack.enter_async_context(swarm.client(PATIENT)), Rows(), KV_TOKENS // 2
        opening = [client.router.open_session(length, Codec.RAW, rows=rows) for _ in range(2)]
        dialogues = [Dialogue(await stack.enter_async_context(each), random.Random(1)) for each in opening]
        with pytest.raises(PeerRefused, match="all, and this server has"):
            await stack.enter_async_context(client.router.open_session(length, Codec.RAW, rows=rows))
        await step_all(dialogues, PIECE)
        stranger = await stack.enter_async_context(swarm.client(PATIENT, name="stranger"))
        (other,) = await stack.enter_async_context(opened(stranger.router, 1, max_length=length))
        await other.step(150)
        for each in dialogues:
            with trio.fail_after(30):
                await each.step(length - PIECE - 1)
        await other.step(1)
        assert any(each.session.recoveries for each in dialogues)
        assert not other.session.recoveries, "it is within its share"
