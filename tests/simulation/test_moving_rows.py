"""Rows that wait for each other go over to a better route together, or none of them does. Closed ones leave nothing."""

from __future__ import annotations

import random
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import MovePolicy, RoutePolicy, ServePolicy, StandingPolicy
from llmnode.core.texts.beams import sessions_of_rows
from llmnode.errors import SessionClosed
from llmnode.testing import Conditions, exact_input, open_world, peer_named, seeds
from llmnode.testing import world as testing_world
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.beams import opened, step_all
from simulation.test_moving import FAST_S, MOST_STALL_S, MOVES, SLOW_S, Fault, start, three_hops
from simulation.test_moving import opened as has_opened
from simulation.world import ALL_BLOCKS, DELAY_S, KV_TOKENS, SPANS, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from llmnode.core.ids import PeerId

ROWS, LENGTH, STEPS = 3, 120, 100
STAYS = replace(MOVES, moves=MovePolicy(enabled=False))


@asynccontextmanager
async def slow_world(
    joins: Callable[[World], Awaitable[None]] | None = None, seed: int = 0, said_share: float = 1.0
) -> AsyncIterator[tuple[World, trio.Nursery]]:
    """A slow server alone. After 20 s a fast one joins it, or what `joins` says."""
    async with world(seed) as swarm, trio.open_nursery() as nursery:
        swarm.said_prefill_share, swarm.said_share = 1 / MOVES.chunk_tokens, said_share
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)

        async def join() -> None:
            await trio.sleep(20)
            await (start(swarm, "fast", ALL_BLOCKS, FAST_S) if joins is None else joins(swarm))

        nursery.start_soon(join)
        yield swarm, nursery
        nursery.cancel_scope.cancel()


def routes(rows: list[Dialogue]) -> set[tuple[PeerId, ...]]:
    return {tuple(hop.peer for hop in row.session.route) for row in rows}


def moves(rows: list[Dialogue]) -> list[int]:
    return [len(row.session.moves) for row in rows]


@pytest.mark.parametrize("rows", [2, ROWS])
@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_all_rows_of_a_batch_move_at_once_and_it_ends_sooner(seed: int, rows: int) -> None:
    took_s = []
    for policy in (MOVES, STAYS):
        async with slow_world(seed=seed) as (swarm, _), swarm.client(policy) as (router, _):
            began_s = trio.current_time()
            async with opened(router, rows, beside=True, max_length=LENGTH) as batch:
                for _ in range(STEPS):
                    await step_all(batch)
                    assert len(routes(batch)) == 1, "no row is at other servers"
                assert moves(batch) == [1 if policy is MOVES else 0] * rows
                assert not any(row.session.recoveries for row in batch)
            took_s.append(trio.current_time() - began_s)
            assert not router.finder.banned
            await kv_is_free(swarm)
    assert took_s[0] < 0.8 * took_s[1]


@simulated
async def test_rows_of_unequal_lengths_move_together_and_one_that_has_not_begun_comes_along() -> None:
    async with slow_world() as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            await batch[0].step(15)
            for _ in range(80):
                await step_all(batch[:2])
            assert moves(batch) == [1] * ROWS
            await step_all(batch)
        await kv_is_free(swarm)


@pytest.mark.parametrize(("rows", "moved"), [(1, True), (ROWS, False)])
@simulated
async def test_no_row_goes_to_a_server_that_is_too_small_for_all(
    rows: int, moved: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def join(swarm: World) -> None:
        monkeypatch.setattr(testing_world, "KV_TOKENS", ROWS * LENGTH - 1)
        await start(swarm, "fast", ALL_BLOCKS, FAST_S)

    async with slow_world(join) as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, rows, beside=True, max_length=LENGTH) as batch:
            for _ in range(STEPS):
                await step_all(batch)
            assert moves(batch) == [moved] * rows
            assert not router.finder.better_routes.failed.banned(0.0), "nobody was asked in vain"
        await kv_is_free(swarm)


@pytest.mark.parametrize(("rows", "moved"), [(1, True), (ROWS, False)])
@simulated
async def test_rows_do_not_go_to_a_server_that_is_faster_for_one_of_them_alone(rows: int, moved: bool) -> None:
    """Each further decode of a forward takes it as long as the first one, and the old server no time."""

    async def join(swarm: World) -> None:
        swarm.said_share = 1.0
        fast = await start(swarm, "fast", ALL_BLOCKS, SLOW_S / 2)
        fast.worker.further_s = SLOW_S / 2

    async with slow_world(join, said_share=0.0) as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, rows, beside=True, max_length=LENGTH) as batch:
            for _ in range(STEPS):
                await step_all(batch)
            assert moves(batch) == [moved] * rows
        await kv_is_free(swarm)


@simulated
async def test_rows_wait_until_a_server_has_kv_for_all_of_them_and_move_then() -> None:
    """Another client has a part of it for a while."""

    async def join(swarm: World) -> None:
        fast = await start(swarm, "fast", ALL_BLOCKS, FAST_S)
        only = replace(STAYS, route=RoutePolicy(allowed=frozenset({fast.peer})))
        async with swarm.client(only, name="other") as (router, _), router.open_session(LENGTH, Codec.RAW) as session:
            await Dialogue(session, random.Random(2)).step(LENGTH - 1)
            await trio.sleep(50)
            assert fast.worker.reserved < LENGTH + KV_TOKENS / 4, "nobody else came"

    often = replace(MOVES, moves=MovePolicy(look_s=5.0))
    async with slow_world(join) as (swarm, _), swarm.client(often) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            for _ in range(LENGTH):
                await step_all(batch)
            assert moves(batch) == [1] * ROWS
            assert not router.finder.better_routes.failed.banned(0.0)
        await kv_is_free(swarm)


@simulated
async def test_rows_move_only_to_a_server_that_takes_all_of_them_over_one_link() -> None:
    """Two other sessions of the client are there at first."""
    most, refused = ROWS + 1, 0

    def watch(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal refused
        refused += frame.type is FrameType.REFUSAL
        return [frame]

    serves, brief = ServePolicy(sessions_per_link=most), MovePolicy(look_s=5.0)
    knows = replace(MOVES, moves=brief, route=RoutePolicy(sessions_per_link=most))
    async with open_world(conditions=Conditions(delay_s=DELAY_S), serve_policy=serves) as swarm:
        swarm.said_prefill_share = 1 / MOVES.chunk_tokens
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)
        async with swarm.client(knows) as (router, _):
            async with opened(router, ROWS, beside=True, max_length=80) as batch:
                await step_all(batch)
                (await start(swarm, "fast", ALL_BLOCKS, FAST_S)).network.tamper = watch
                await trio.sleep(20)
                async with opened(router, 2, max_length=20) as others:
                    for _ in range(StandingPolicy().proven_positions):
                        await step_all(others)
                    assert routes(others) == {(peer_named("fast"),)}
                    for _ in range(40):
                        await step_all(batch)
                    assert not any(moves(batch)) and not refused, "nobody was asked in vain"
                for _ in range(30):
                    await step_all(batch)
                assert moves(batch) == [1] * ROWS and not refused
            await kv_is_free(swarm)


@simulated
async def test_all_rows_stay_if_the_better_server_refuses_one_of_them() -> None:
    given = 0

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal given
        given += frame.type is FrameType.OPENED
        is_refused = frame.type is FrameType.OPENED and given == ROWS + 1  # one was the trial
        return [refusal_of(frame, RefusalCode.NO_ROOM, "no KV is left now", 1.0) if is_refused else frame]

    async def join(swarm: World) -> None:
        fast = await start(swarm, "fast", ALL_BLOCKS, FAST_S)
        fast.network.tamper = refuse

    async with slow_world(join) as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            for _ in range(70):
                await step_all(batch)
            assert given > ROWS, "all have tried"
            assert not any(moves(batch)) and routes(batch) == {(peer_named("slow"),)}
            assert not any(row.session.recoveries for row in batch)
            assert not router.finder.banned, "it has not promised anything"
            assert router.finder.better_routes.failed.banned(0.0) == {peer_named("fast")}
            fast = swarm.nodes["fast"]
            assert not fast.server.sessions and not fast.worker.reserved
        await kv_is_free(swarm)


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("place", range(3))
@simulated
async def test_all_rows_stay_as_they_were_if_the_newcomer_fails_in_the_replay(place: int, fault: Fault) -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        swarm.said_prefill_share = 1 / MOVES.chunk_tokens
        await three_hops(swarm, place)
        has_failed = False

        async def join() -> None:
            nonlocal has_failed
            await trio.sleep(20)
            fast = await start(swarm, "fast", SPANS[place], FAST_S)
            await has_opened(fast, 1)
            await trio.sleep(1)
            fast.worker.gate = trio.Event()
            await has_opened(fast, 1 + ROWS)
            await trio.sleep(0.5)
            if fault is Fault.DIES:
                swarm.kill("fast")
            elif fault is Fault.IS_CUT_OFF:
                swarm.internet.freeze(fast.peer)
            has_failed = True

        nursery.start_soon(join)
        async with swarm.client(MOVES) as (router, _):
            async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
                before, longest_s = routes(batch), 0.0
                for _ in range(80):
                    began_s = trio.current_time()
                    await step_all(batch)
                    longest_s = max(longest_s, trio.current_time() - began_s)
                assert has_failed and routes(batch) == before
                assert not any(moves(batch)) and not any(row.session.recoveries for row in batch)
                assert longest_s < ROWS * SLOW_S + MOST_STALL_S
            swarm.mend_all()
            await kv_is_free(swarm)
        nursery.cancel_scope.cancel()


# Copies


@simulated
async def test_beams_that_are_copies_of_each_other_move_together() -> None:
    """Each of them becomes a copy of another one every few steps."""
    rng = random.Random(4)
    async with slow_world() as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as beams:
            for _ in range(STEPS):
                sources = [rng.randrange(ROWS) for _ in beams]
                own = sessions_of_rows(sources)
                for row, source in zip(own, sources, strict=True):
                    if row != source:
                        await beams[source].fork(beams[row])
                beams = [beams[row] for row in own]
                await step_all(beams)
                assert len(routes(beams)) == 1
            assert moves(beams) == [1] * ROWS
            assert not any(row.session.recoveries for row in beams)
        await kv_is_free(swarm)


@simulated
async def test_nobody_waits_for_a_move_in_a_fork_and_the_copy_moves_with_its_next_step() -> None:
    async with slow_world() as (swarm, _), swarm.client(MOVES) as (router, _):
        async with (
            router.open_session(LENGTH, Codec.RAW, policy=STAYS) as one,
            router.open_session(LENGTH, Codec.RAW) as other,
        ):
            source, copy = Dialogue(one, random.Random(1)), Dialogue(other, random.Random(2))
            for _ in range(32):
                await step_all([source, copy])
            for _ in range(60):
                await step_all([source, copy])
                before = len(other.moves)
                await source.fork(copy)
                assert len(other.moves) == before
            assert other.moves
        await kv_is_free(swarm)


# While a row is moved along


async def until(is_so: Callable[[], bool]) -> None:
    """Wait for it, and notice it soon."""
    for _ in range(20_000):
        if is_so():
            return
        await trio.sleep(0.005)
    raise AssertionError("it never was")


def is_moving(swarm: World) -> bool:
    """Whether all rows have been opened at a server that has computed its position in a trial."""
    return "fast" in swarm.nodes and len(swarm.nodes["fast"].worker.priorities) > ROWS


@pytest.mark.parametrize("asked", ["step", "truncate", "fork"])
@simulated
async def test_whatever_is_asked_of_a_row_while_another_one_moves_it_along_waits(asked: str) -> None:
    async with slow_world() as (swarm, nursery), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            is_done = trio.Event()

            async def ask() -> None:
                await until(lambda: is_moving(swarm))
                assert not any(moves(batch))
                if asked == "step":
                    await batch[1].step(2)
                elif asked == "truncate":
                    await batch[1].go_back(9)
                else:
                    await batch[1].fork(batch[2])
                assert moves(batch) == [1] * ROWS
                is_done.set()

            for _ in range(30):
                await step_all(batch)
            nursery.start_soon(ask)
            while not is_done.is_set():
                await batch[0].step(1)
            await step_all(batch)
            assert not any(row.session.recoveries for row in batch)
        await kv_is_free(swarm)


@pytest.mark.parametrize("seed", seeds(3))
@simulated
async def test_a_row_that_is_on_its_way_is_not_moved_along_before_it_is_at_rest(seed: int) -> None:
    """These do not wait for each other at each step, and one of them pauses now and then."""
    async with slow_world(seed=seed) as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, 2, beside=True, max_length=LENGTH) as batch, trio.open_nursery() as nursery:

            async def decode(row: Dialogue, pause_s: float) -> None:
                while row.session.position < LENGTH - 1:
                    await row.step(1)
                    await trio.sleep(pause_s if row.session.position % 8 == 0 else 0)

            nursery.start_soon(decode, batch[0], 0.0)
            nursery.start_soon(decode, batch[1], 1.2 * SLOW_S)
        assert moves(batch) == [1, 1] and not any(row.session.recoveries for row in batch)
        await kv_is_free(swarm)


@simulated
async def test_rows_go_on_when_the_step_that_moved_them_along_is_cancelled() -> None:
    async with slow_world() as (swarm, nursery), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            for _ in range(30):
                await step_all(batch)
            with trio.CancelScope() as scope:

                async def cancel() -> None:
                    await until(lambda: is_moving(swarm))
                    await trio.sleep(0.3)
                    scope.cancel()

                nursery.start_soon(cancel)
                for _ in range(70):
                    await batch[0].step(1)
            assert scope.cancelled_caught and not any(moves(batch))
            await step_all(batch[1:])
            assert not any(row.session.recoveries for row in batch)
            with pytest.raises(SessionClosed):
                await batch[0].session.step(exact_input(random.Random(1), 1, swarm.model))
        await kv_is_free(swarm)


def never_truncates(frame: Frame) -> list[Frame]:
    """So no new hop takes the place of an old one: that begins with a TRUNCATE."""
    is_truncated = frame.type is FrameType.TRUNCATED
    return [refusal_of(frame, RefusalCode.COMPUTE_FAILED, "as told") if is_truncated else frame]


@simulated
async def test_all_rows_go_back_if_one_cannot_take_its_new_place() -> None:
    told = 0

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal told
        told += frame.type is FrameType.TRUNCATED
        return never_truncates(frame) if told == 2 else [frame]

    async def join(swarm: World) -> None:
        (await start(swarm, "fast", ALL_BLOCKS, FAST_S)).network.tamper = refuse

    async with slow_world(join) as (swarm, _), swarm.client(MOVES) as (router, _):
        async with opened(router, ROWS, beside=True, max_length=LENGTH) as batch:
            for _ in range(70):
                await step_all(batch)
            assert told >= 2
            assert not any(moves(batch)) and routes(batch) == {(peer_named("slow"),)}
            assert not any(row.session.recoveries for row in batch)
        await kv_is_free(swarm)


@simulated
async def test_a_row_that_was_to_be_moved_along_can_be_saved_with_its_kv_before_its_next_step(tmp_path: Path) -> None:
    told = 0

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal told
        told += frame.type is FrameType.TRUNCATED
        return never_truncates(frame)

    async def join(swarm: World) -> None:
        (await start(swarm, "fast", ALL_BLOCKS, FAST_S)).network.tamper = refuse

    async with (
        slow_world(join) as (swarm, _),
        swarm.client(MOVES) as (router, _),
        opened(router, 2, beside=True, max_length=LENGTH) as batch,
    ):
        mover, other = batch
        while not told:
            mover, other = other, mover
            await mover.step(1)
        assert not any(moves(batch))
        assert await other.session.export(tmp_path / "session") == ServePolicy().lease_s
        await step_all(batch)
        assert not any(row.session.recoveries for row in batch)
