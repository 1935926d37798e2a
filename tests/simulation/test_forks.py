"""Sessions that become copies while servers die, are full or cannot copy, or while the client gives up.

The arithmetic is exact, as in test_chaos.py. An answer is right to the bit only if every copy is right.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.span import Span
from llmnode.errors import NoRoute, SessionClosed
from simulation.beams import opened, step_all
from simulation.world import (
    ROW,
    SPANS,
    Dialogue,
    World,
    kv_is_free,
    pairs_of_servers,
    simulated,
    world,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable


@pytest.mark.parametrize("index", range(3))
@simulated
async def test_a_server_killed_after_a_fork_is_replaced_for_source_and_copy(index: int) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await beams[0].step(20)
        await beams[0].fork(beams[1])
        await step_all(beams)
        lost = beams[0].session.route[index].peer
        swarm.kill(str(lost).removeprefix("peer-"))
        await step_all(beams)
        for beam in beams:
            (recovery,) = beam.session.recoveries
            assert (recovery.lost, recovery.positions) == (lost, 21)
        await beams[1].go_back(8)
        await beams[1].fork(beams[0])
        await step_all(beams, 2)


@pytest.mark.parametrize("index", range(3))
@simulated
async def test_a_server_that_died_unnoticed_before_a_fork_is_replaced(index: int) -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await step_all(beams, 20)
        swarm.kill(str(beams[0].session.route[index].peer).removeprefix("peer-"))
        await beams[0].fork(beams[1])
        assert len(beams[1].session.recoveries) == 1
        await step_all(beams)
        assert len(beams[0].session.recoveries) == 1


@pytest.mark.parametrize("after_s", [0.005 * n for n in range(10)])
@pytest.mark.parametrize("beside", [True, False], ids=["beside", "elsewhere"])
@simulated
async def test_a_server_killed_during_a_fork_is_replaced(beside: bool, after_s: float) -> None:
    for index in range(3):
        async with pairs_of_servers() as swarm, swarm.client() as (router, _):
            async with opened(router, 2, beside=beside) as beams:
                await step_all(beams, 20)
                victim = str(beams[0].session.route[index].peer).removeprefix("peer-")
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(beams[0].fork, beams[1])
                    await trio.sleep(after_s)
                    swarm.kill(victim)
                await step_all(beams)
                await beams[1].go_back(3)
                await beams[1].fork(beams[0])
                await step_all(beams)
            await kv_is_free(swarm)


@simulated
async def test_a_source_that_waits_for_a_server_for_some_blocks_can_be_copied() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await step_all(beams, 20)
        for twin in "ab":
            swarm.kill(f"1{twin}")
        with pytest.raises(NoRoute):
            await beams[0].session.step(bytes(ROW))
        with pytest.raises(NoRoute):
            await beams[0].session.fork([beams[1].session])
        await swarm.start("late", SPANS[1])
        await trio.sleep(10)
        await beams[0].fork(beams[1])
        await step_all(beams)


@simulated
async def test_a_copy_whose_blocks_nobody_holds_is_finished_once_somebody_does() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await beams[0].step(20)
        await beams[1].step(30)
        for hop in (1, 2):  # two hops are lost, and no peer has the blocks of the first
            for twin in "ab":
                swarm.kill(f"{hop}{twin}")
        await swarm.start("late2", SPANS[2])
        with pytest.raises(NoRoute):
            await beams[0].session.fork([beams[1].session])
        beams[1].now_as(beams[0])
        await swarm.start("late1", SPANS[1])
        await trio.sleep(10)
        await step_all(beams)


@simulated
async def test_a_peer_that_cannot_copy_is_passed_over() -> None:
    """The peer is alive, and still holds positions of the session's former text."""
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
        await beams[0].step(20)
        await beams[1].step(30)
        swarm.node(beams[0].session.route[1].peer).worker.executor.fails = 1
        await beams[0].fork(beams[1])
        assert beams[0].session.route[1].peer != beams[1].session.route[1].peer
        await step_all(beams, 2)
        assert not beams[0].session.recoveries


@simulated
async def test_a_copy_goes_elsewhere_if_there_is_no_kv_beside_its_source() -> None:
    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 1) as (source,):
        await source.step(20)
        full = swarm.node(source.session.route[1].peer).worker
        full.executor.occupy(full.kv_tokens_free - 10)
        async with opened(router, 1) as (copy,):
            await copy.step(30)
            await source.fork(copy)
            assert source.session.route[1].peer != copy.session.route[1].peer
            await step_all([source, copy], 2)


DURING_FORK_S = [0.01 * n for n in range(1, 25)]


@asynccontextmanager
async def about_to_fork() -> AsyncIterator[tuple[World, list[Dialogue]]]:
    """A source and its copy beside each other. Their second hop is dead, and two peers will replace it."""
    async with world() as swarm:
        for number, span in enumerate([Span(0, 2), Span(2, 6)]):
            await swarm.start(f"part{number}", span)
        for half in (Span(2, 4), Span(4, 6)):
            await swarm.start(f"from{half.start}", half)
        await trio.sleep(10)
        async with swarm.client() as (router, _), opened(router, 2, beside=True) as beams:
            await step_all(beams, 20)
            swarm.kill("part1")
            yield swarm, beams
        await kv_is_free(swarm)


@pytest.mark.parametrize("after_s", DURING_FORK_S)
@simulated
async def test_a_fork_that_is_cancelled_ends_the_copy_alone(after_s: float) -> None:
    async with about_to_fork() as (_, beams):
        with trio.move_on_after(after_s) as patience:
            await beams[0].fork(beams[1])
        if patience.cancelled_caught:
            with pytest.raises(SessionClosed):
                await beams[1].session.step(bytes(ROW))
        await beams[0].step(1)


async def close_meanwhile(copy: Dialogue, source: Dialogue, moment: Callable[[], Awaitable[None]]) -> None:
    async def fork() -> None:
        with suppress(SessionClosed):
            await source.session.fork([copy.session])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(fork)
        await moment()
        await copy.session.close()


@pytest.mark.parametrize("after_s", DURING_FORK_S)
@simulated
async def test_a_copy_that_is_closed_while_it_is_made_leaves_no_kv(after_s: float) -> None:
    async with about_to_fork() as (swarm, beams):
        await close_meanwhile(beams[1], beams[0], partial(trio.sleep, after_s))
        await beams[0].step(1)
        await beams[0].session.close()
        await kv_is_free(swarm)


@pytest.mark.parametrize("turns", range(20))
@simulated
async def test_a_copy_that_is_closed_while_it_moves_leaves_no_kv(turns: int) -> None:
    async def moment() -> None:
        for _ in range(turns):
            await trio.lowlevel.checkpoint()

    async with pairs_of_servers() as swarm, swarm.client() as (router, _), opened(router, 4) as beams:
        await step_all(beams, 20)
        for copy in beams[1:]:
            await close_meanwhile(copy, beams[0], moment)
        await beams[0].session.close()
        await kv_is_free(swarm)
