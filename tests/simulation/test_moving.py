"""A session goes over to a better route between two steps, if that repays the replay, and loses nothing if it fails."""

from __future__ import annotations

import logging
import random
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from enum import Enum, auto
from itertools import pairwise
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import ClientPolicy, MovePolicy, RoutePolicy, SwarmPolicy
from llmnode.core.span import Span
from llmnode.node.serve.network_speed import keep_measuring
from llmnode.session.better_routes import FAILED_S
from llmnode.testing import Conditions, exact_input, open_world, peer_named, seeds
from llmnode.testing import world as testing_world
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.payload import Codec
from llmnode.wire.refusal import refusal_of
from simulation.world import ALL_BLOCKS, DELAY_S, KV_TOKENS, SPANS, Dialogue, World, kv_is_free, simulated, world

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.session.better_routes import Moved
    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession
    from llmnode.testing.world import ServingNode

SLOW_S, FAST_S = 1.0, 0.1
MOST_STALL_S = MovePolicy().repays_times * MovePolicy().longest_s + MovePolicy().patience_s
LENGTH = 200
MOVES = ClientPolicy(chunk_tokens=8)
STAYS = replace(MOVES, moves=MovePolicy(enabled=False))


async def start(swarm: World, name: str, span: Span, forward_s: float) -> ServingNode:
    """A server whose forwards take as long as it says."""
    node = await swarm.start(name, span, said_us=round(1e6 * forward_s / len(span)))
    node.worker.forward_s = forward_s
    return node


@dataclass(frozen=True, slots=True)
class Text:
    """A text that was decoded."""

    took_s: float
    moves: tuple[Moved, ...]
    recoveries: int
    route: tuple[str, ...]


async def decode(swarm: World, policy: ClientPolicy, steps: int, length: int = LENGTH) -> Text:
    """Each answer is checked to the bit."""
    async with swarm.client(policy) as (router, _), router.open_session(length, Codec.RAW) as session:
        dialogue, began_s = Dialogue(session, random.Random(1)), trio.current_time()
        await dialogue.step(10)
        for _ in range(steps):
            await dialogue.step(1)
        names = tuple(str(hop.peer).removeprefix("peer-") for hop in session.route)
        took_s = trio.current_time() - began_s
        assert not router.finder.banned
        return Text(took_s, tuple(session.moves), len(session.recoveries), names)


@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_a_faster_server_that_joins_gets_the_session_once_and_the_text_ends_sooner(seed: int) -> None:
    texts = []
    for policy in (MOVES, STAYS):
        async with world(seed) as swarm, trio.open_nursery() as nursery:
            await start(swarm, "slow", ALL_BLOCKS, SLOW_S)

            async def join() -> None:
                await trio.sleep(20)
                await start(swarm, "fast", ALL_BLOCKS, FAST_S)

            nursery.start_soon(join)
            texts.append(await decode(swarm, policy, 180))
    moved, stayed = texts
    (move,) = moved.moves
    assert (move.left, move.taken_over_by) == ((peer_named("slow"),), (peer_named("fast"),))
    assert not moved.recoveries and not stayed.moves
    assert moved.took_s < 0.8 * stayed.took_s
    assert move.stall_s < 2 * move.price_s


async def three_hops(swarm: World, slow: int) -> None:
    """Three servers, of which number `slow` is that."""
    for index, span in enumerate(SPANS):
        await start(swarm, f"{index}", span, SLOW_S if index == slow else FAST_S)


@pytest.mark.parametrize("place", range(3))
@simulated
async def test_one_hop_of_a_route_is_replaced_and_the_others_stay(place: int) -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        await three_hops(swarm, place)

        async def join() -> None:
            await trio.sleep(20)
            await start(swarm, "fast", SPANS[place], FAST_S)

        nursery.start_soon(join)
        text = await decode(swarm, MOVES, 120)
        (move,) = text.moves
        assert move.left == (peer_named(str(place)),)
        assert text.route == tuple("fast" if each == place else str(each) for each in range(3))
        await kv_is_free(swarm)


class Fault(Enum):
    """A newcomer has opened the session, and then this happens to it."""

    DIES = auto()
    HANGS = auto()
    IS_CUT_OFF = auto()


@pytest.mark.parametrize("fault", Fault)
@pytest.mark.parametrize("place", range(3))
@simulated
async def test_a_session_stays_as_it_was_if_the_newcomer_fails_in_the_replay(place: int, fault: Fault) -> None:
    """Its old hops lose nothing and are not left, and their KV is not replayed."""
    async with world() as swarm, trio.open_nursery() as nursery:
        await three_hops(swarm, place)
        failed = trio.Event()
        failed_s = 0.0

        async def join() -> None:
            nonlocal failed_s
            await trio.sleep(20)
            fast = await start(swarm, "fast", SPANS[place], FAST_S)
            await opened(fast, 1)
            await trio.sleep(1)  # it has computed its position
            fast.worker.gate = trio.Event()
            await opened(fast, 2)
            await trio.sleep(0.5)
            if fault is Fault.DIES:
                swarm.kill("fast")
            elif fault is Fault.IS_CUT_OFF:
                swarm.internet.freeze(fast.peer)
            failed_s = trio.current_time()
            failed.set()

        nursery.start_soon(join)
        async with swarm.client(MOVES) as (router, _), router.open_session(LENGTH, Codec.RAW) as session:
            dialogue, before = Dialogue(session, random.Random(1)), session.route
            longest_s = 0.0
            for number in range(110):
                began_s = trio.current_time()
                await dialogue.step(10 if not number else 1)
                if number:
                    longest_s = max(longest_s, trio.current_time() - began_s)
            assert failed.is_set()
            assert session.route == before
            assert not session.moves and not session.recoveries
            assert {error.peer for _, error in router.finder.banned} <= {peer_named("fast")}
            assert longest_s < SLOW_S + MOST_STALL_S
            unfit = router.finder.better_routes.failed
            assert unfit.is_banned(peer_named("fast"), failed_s + FAILED_S), "no other session goes there, either"
            swarm.mend_all()
        nursery.cancel_scope.cancel()


async def opened(node: ServingNode, sessions: int) -> None:
    """Wait until the server has been given this number of sessions."""
    for _ in range(2000):
        if len(node.worker.priorities) >= sessions:
            return
        await trio.sleep(0.05)
    raise AssertionError("nobody has opened a session there")


@simulated
async def test_a_newcomer_that_has_no_kv_when_it_is_asked_is_not_banned(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with world() as swarm, trio.open_nursery() as nursery:
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)

        async def join() -> None:
            await trio.sleep(20)
            fast = await start(swarm, "fast", ALL_BLOCKS, FAST_S)
            await opened(fast, 1)
            await trio.sleep(1)
            only = ClientPolicy(route=RoutePolicy(allowed=frozenset({fast.peer})))
            async with (
                swarm.client(only, name="other") as (router, _),
                router.open_session(LENGTH, Codec.RAW) as one,
                router.open_session(LENGTH, Codec.RAW) as other,
            ):
                for each in (one, other):
                    await Dialogue(each, random.Random(2)).step(KV_TOKENS // 2 - 1)
                await trio.sleep_forever()

        nursery.start_soon(join)
        text = await decode(swarm, MOVES, 80)
        assert not text.moves and not text.recoveries and text.route == ("slow",)
        assert "a session stays where it was" in caplog.text
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("said_s", [SLOW_S, 0.9 * SLOW_S])
@simulated
async def test_a_session_does_not_move_between_servers_that_are_equal_or_nearly_so(said_s: float) -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        await start(swarm, "first", ALL_BLOCKS, SLOW_S)

        async def join() -> None:
            await trio.sleep(20)
            await start(swarm, "twin", ALL_BLOCKS, said_s)

        nursery.start_soon(join)
        assert not (await decode(swarm, MOVES, 180)).moves


@simulated
async def test_a_text_that_will_soon_have_its_greatest_length_stays() -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)

        async def join() -> None:
            await trio.sleep(100)
            await start(swarm, "fast", ALL_BLOCKS, FAST_S)

        nursery.start_soon(join)
        assert not (await decode(swarm, MOVES, 115, length=125)).moves


@simulated
async def test_a_server_that_only_says_that_it_is_faster_does_not_get_the_session() -> None:
    """Its trial shows how long it takes."""
    async with world() as swarm, trio.open_nursery() as nursery:
        await start(swarm, "honest", ALL_BLOCKS, 0.2)

        async def join() -> None:
            await trio.sleep(10)
            liar = await start(swarm, "liar", ALL_BLOCKS, 0.01)
            liar.worker.forward_s = 0.2
            await opened(liar, 1)

        nursery.start_soon(join)
        assert not (await decode(swarm, MOVES, 180)).moves


@simulated
async def test_a_hop_that_is_busy_when_it_is_asked_for_its_log_is_not_left_and_the_newcomer_not_blamed() -> None:
    refused = 0

    def refuse(_peer: PeerId, frame: Frame) -> list[Frame]:
        nonlocal refused
        is_log = frame.type is FrameType.REPLAYED
        refused += is_log
        return [refusal_of(frame, RefusalCode.BUSY, "no memory is left now", 1.0) if is_log else frame]

    async with world() as swarm, trio.open_nursery() as nursery:
        await three_hops(swarm, 1)

        async def join() -> None:
            await trio.sleep(20)
            swarm.nodes["0"].network.tamper = refuse
            await start(swarm, "fast", SPANS[1], FAST_S)

        nursery.start_soon(join)
        async with swarm.client(MOVES) as (router, _), router.open_session(LENGTH, Codec.RAW) as session:
            dialogue, before = Dialogue(session, random.Random(1)), session.route
            for number in range(110):
                await dialogue.step(10 if not number else 1)
            assert session.route == before
            assert not session.moves and not session.recoveries
            assert not router.finder.banned
            assert refused, "it has tried"
            assert not router.finder.better_routes.failed.banned(0.0), "other sessions may go there"


@simulated
async def test_rows_of_a_client_move_one_at_a_time() -> None:
    async with world() as swarm, trio.open_nursery() as nursery:
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)
        ended = 0

        async def join() -> None:
            await trio.sleep(20)
            await start(swarm, "fast", ALL_BLOCKS, FAST_S)

        async def row(router: Router, number: int, moves: list[tuple[float, Moved]]) -> None:
            nonlocal ended
            async with router.open_session(100, Codec.RAW) as session:
                dialogue, known = Dialogue(session, random.Random(number)), 0
                for _ in range(99):
                    await dialogue.step(1)
                    moves += [(trio.current_time(), each) for each in session.moves[known:]]
                    known = len(session.moves)
            ended += 1

        nursery.start_soon(join)
        moves: list[tuple[float, Moved]] = []
        async with swarm.client(MOVES) as (router, _), trio.open_nursery() as rows:
            for number in range(3):
                rows.start_soon(row, router, number, moves)
        assert ended == 3 and len(moves) > 1
        for (one_s, _), (other_s, other) in pairwise(sorted(moves, key=lambda each: each[0])):
            assert one_s <= other_s - other.stall_s


async def moves_of_rows(rows: int, moves: MovePolicy) -> list[Moved]:
    """The moves of sessions that wait for each other at each step. A faster server joins them after 20 s."""
    policy = replace(MOVES, moves=moves)
    async with world() as swarm, trio.open_nursery() as nursery, AsyncExitStack() as stack:
        await start(swarm, "slow", ALL_BLOCKS, SLOW_S)

        async def join() -> None:
            await trio.sleep(20)
            await start(swarm, "fast", ALL_BLOCKS, FAST_S)

        nursery.start_soon(join)
        router, _ = await stack.enter_async_context(swarm.client(policy))
        sessions: list[InferenceSession] = []
        for _ in range(rows):
            opening = router.open_session(100, Codec.RAW, beside=sessions[0] if sessions else None)
            sessions.append(await stack.enter_async_context(opening))
        for _ in range(99):
            async with trio.open_nursery() as step:
                for session in sessions:
                    step.start_soon(session.step, exact_input(random.Random(1), 1, swarm.model))
        return [move for session in sessions for move in session.moves]


@simulated
async def test_rows_that_wait_for_each_other_pay_the_price_of_a_move_for_each_of_them() -> None:
    """It is worth one and a half of the price of one row, and one row moves. Two stay."""
    (free,) = await moves_of_rows(1, MovePolicy())
    barely = MovePolicy(longest_s=1.5 * free.price_s)
    assert len(await moves_of_rows(1, barely)) == 1
    assert not await moves_of_rows(2, barely)
    assert await moves_of_rows(2, MovePolicy()), "it is for the price that they stay"


CROWD, FORWARD_S, SHARE = 50, 0.2, 0.25
"""Clients, the time of a forward with one decode, and the share of it that each further decode adds."""


@pytest.mark.slow
@simulated
async def test_no_more_clients_of_a_crowd_go_to_a_newcomer_than_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(testing_world, "KV_TOKENS", CROWD * LENGTH)
    seldom = SwarmPolicy(exchange_every_s=10)
    async with (
        open_world(0, conditions=Conditions(delay_s=DELAY_S), swarm_policy=seldom) as swarm,
        trio.open_nursery() as nursery,
    ):
        swarm.said_share, swarm.said_prefill_share = SHARE, 1 / MOVES.chunk_tokens
        sessions: list[InferenceSession] = []

        async def start_shared(name: str) -> ServingNode:
            node = await start(swarm, name, ALL_BLOCKS, FORWARD_S)
            node.worker.further_s = SHARE * FORWARD_S
            nursery.start_soon(keep_measuring, node.role, node.swarm, node.network)
            return node

        async def decode_on(number: int) -> None:
            await trio.sleep(0.2 * number)  # no server takes all links at once
            async with (
                swarm.client(MOVES, name=f"client {number}") as (router, _),
                router.open_session(LENGTH, Codec.RAW) as session,
            ):
                sessions.append(session)
                hidden = exact_input(random.Random(number), 1, swarm.model)
                while True:
                    await session.step(hidden)

        await start_shared("old")
        for number in range(CROWD):
            nursery.start_soon(decode_on, number)
        await trio.sleep(80)
        new = await start_shared("new")
        counts = []
        for _ in range(26):
            await trio.sleep(5)
            counts.append(sum(each.route[0].peer == new.peer for each in sessions))
        print(counts)
        assert max(counts) <= CROWD / 2
        assert counts[-1] >= CROWD / 4
        assert max(len(each.moves) for each in sessions) == 1
        nursery.cancel_scope.cancel()
