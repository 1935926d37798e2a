"""Clients that do not know each other ask servers how busy they are before they open sessions, and spread."""

from __future__ import annotations

import random
from collections import Counter
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.peers.asked_loads import LoadNow
from llmnode.core.policy import ClientPolicy, RoutePolicy, StandingPolicy
from llmnode.node.serve.server import Server
from llmnode.node.serve.server_link import ServerLink
from llmnode.testing import peer_named, seeds
from llmnode.wire.frame import FrameType
from llmnode.wire.load_now import load_extension
from llmnode.wire.payload import Codec
from simulation.world import ALL_BLOCKS, DELAY_S, FORWARD_S, Dialogue, World, simulated, world

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from llmnode.ports import Link
    from llmnode.session.router import Router
    from llmnode.session.session import InferenceSession
    from llmnode.wire.frame import Frame
    from llmnode.wire.messages import Description

CLIENTS, LENGTH = 12, 20
FASTER = 1.3
ONE_FASTER = {"a": FORWARD_S, "b": FASTER * FORWARD_S, "c": FASTER * FORWARD_S}
EQUAL = dict.fromkeys("abc", FORWARD_S)
MARGIN = CLIENTS // 4
"""A server may have this number of sessions more than its share by speed: clients that open at the same moment know
little of each other."""
ANNOUNCED_S = 20.0
ROUND_TRIP_S = 2 * DELAY_S
PLAIN = ClientPolicy(chunk_tokens=8, standing=StandingPolicy(explored_share=0.0))


@asynccontextmanager
async def servers(forwards_s: Mapping[str, float], seed: int = 0) -> AsyncIterator[World]:
    """Servers of all blocks that say, and have, these times of a forward. All that they announce has been heard."""
    async with world(seed) as swarm:
        for name, forward_s in forwards_s.items():
            node = await swarm.start(name, ALL_BLOCKS, said_us=round(1e6 * forward_s / len(ALL_BLOCKS)))
            node.worker.slower_by_s = forward_s - FORWARD_S
        await trio.sleep(ANNOUNCED_S)
        yield swarm


def open_session(router: Router) -> AbstractAsyncContextManager[InferenceSession]:
    return router.open_session(LENGTH, Codec.RAW)


@asynccontextmanager
async def decoding(swarm: World, server: str, sessions: int) -> AsyncIterator[None]:
    """Meanwhile clients of their own decode at this server alone."""
    only = ClientPolicy(chunk_tokens=8, route=RoutePolicy(allowed=frozenset([peer_named(server)])))

    async def decode(number: int, task_status: trio.TaskStatus[None]) -> None:
        async with swarm.client(only, name=f"other {number}") as (router, _), open_session(router) as session:
            dialogue = Dialogue(session, random.Random(number))
            await dialogue.step(LENGTH - 1)
            task_status.started()
            while True:
                await dialogue.go_back(1)
                await dialogue.step(1)

    async with trio.open_nursery() as nursery:
        for number in range(sessions):
            await nursery.start(decode, number)
        yield
        nursery.cancel_scope.cancel()


async def opened_at(router: Router) -> tuple[str, float]:
    """The server that a new session opens at, and how long that takes."""
    began_s = trio.current_time()
    async with open_session(router) as session:
        return str(session.route[0].peer).removeprefix("peer-"), trio.current_time() - began_s


@pytest.mark.parametrize("apart_s", [0.0, 0.2])
@pytest.mark.parametrize("forwards_s", [ONE_FASTER, EQUAL], ids=["one is faster", "all are equal"])
@pytest.mark.parametrize("seed", seeds(2))
@simulated
async def test_independent_clients_spread_over_servers_by_their_speed(
    seed: int, forwards_s: Mapping[str, float], apart_s: float
) -> None:
    taken: Counter[str] = Counter()
    async with servers(forwards_s, seed) as swarm, trio.open_nursery() as nursery:
        all_are_there = trio.Event()

        async def decode(number: int, task_status: trio.TaskStatus[None]) -> None:
            async with swarm.client(name=f"client {number}") as (router, _):
                task_status.started()
                await all_are_there.wait()
                await trio.sleep(apart_s * number)
                async with open_session(router) as session:
                    taken[str(session.route[0].peer).removeprefix("peer-")] += 1
                    dialogue = Dialogue(session, random.Random(number))
                    for _ in range(LENGTH - 1):
                        await dialogue.step(1)
                    await trio.sleep_forever()

        for number in range(CLIENTS):
            await nursery.start(decode, number)
        all_are_there.set()
        await trio.sleep(apart_s * CLIENTS + 2)
        nursery.cancel_scope.cancel()
    speeds = {name: 1 / forward_s for name, forward_s in forwards_s.items()}
    assert taken.total() == CLIENTS
    for name, speed in speeds.items():
        assert taken[name] <= CLIENTS * speed / sum(speeds.values()) + MARGIN, dict(taken)


@simulated
async def test_a_server_whose_load_rose_since_its_announcement_is_not_opened() -> None:
    async with servers({"a": FORWARD_S, "b": FASTER * FORWARD_S}) as swarm, swarm.client(PLAIN) as (router, _):
        assert (await opened_at(router))[0] == "a"
        await trio.sleep(ANNOUNCED_S)
        async with decoding(swarm, "a", 4):
            announced = {each.peer: each.offer.load for each in router.finder.swarm.view.announcements()}
            assert announced[peer_named("a")] < 0.05, "the view does not know"
            assert (await opened_at(router))[0] == "b"


@simulated
async def test_a_server_whose_memory_has_gone_since_its_announcement_is_not_opened() -> None:
    async with servers({"a": FORWARD_S, "b": FASTER * FORWARD_S}) as swarm, swarm.client(PLAIN) as (router, _):
        assert (await opened_at(router))[0] == "a"
        await trio.sleep(2 * RoutePolicy().asked_again_s)
        full = swarm.nodes["a"].worker
        full.executor.occupy(full.kv_tokens_free)
        announced = {each.peer: each.offer.kv_tokens_free for each in router.finder.swarm.view.announcements()}
        assert announced[peer_named("a")] >= LENGTH, "the view does not know"
        name, took_s = await opened_at(router)
        assert name == "b" and took_s < 2.5 * ROUND_TRIP_S, "it does not wait for memory there"


def answer_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers know nothing but DESCRIBE: they describe themselves as they always did."""

    def describe(_server: Server, described: Description, _link: Link, **_asked: bool) -> Description:
        return described

    monkeypatch.setattr(Server, "with_load", describe)


@pytest.mark.parametrize("speaks", ["this protocol", "protocol 1"])
@simulated
async def test_an_old_server_is_opened_as_before_and_asked_once_a_minute(
    speaks: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer_as_before(monkeypatch)
    async with servers({"a": FORWARD_S, "b": FASTER * FORWARD_S}) as swarm:
        if speaks == "protocol 1":
            swarm.internet.old |= {peer_named("a"), peer_named("b")}
        async with swarm.client(PLAIN) as (router, _), decoding(swarm, "a", 2):
            name, took_s = await opened_at(router)
            assert name == "a" and took_s < 2.5 * ROUND_TRIP_S
            name, took_s = await opened_at(router)
            assert name == "a" and took_s < 1.5 * ROUND_TRIP_S
            assert not router.finder.failures


@simulated
async def test_a_server_that_does_not_answer_costs_a_moment_and_is_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    describe = ServerLink._describe

    async def say_nothing(link: ServerLink, frame: Frame) -> None:
        if not frame.start:
            await describe(link, frame)

    monkeypatch.setattr(ServerLink, "_describe", say_nothing)
    async with servers({"a": FORWARD_S, "b": FASTER * FORWARD_S}) as swarm, swarm.client(PLAIN) as (router, _):
        name, took_s = await opened_at(router)
        assert name == "a" and took_s < RoutePolicy().ask_s + 1.5 * ROUND_TRIP_S
        name, took_s = await opened_at(router)
        assert name == "a" and took_s < 1.5 * ROUND_TRIP_S, "nobody waits for it again"
        assert not router.finder.failures


@simulated
async def test_a_server_seems_no_better_for_its_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that it is idle, and has memory without end."""

    def flatter(_server: Server, described: Description, _link: Link, **_asked: bool) -> Description:
        return replace(described, extensions=load_extension(LoadNow(0.0, 0.0, 0, 2**32 - 1)))

    async with servers({"a": FORWARD_S, "b": FASTER * FORWARD_S}) as swarm, swarm.client(PLAIN) as (router, _):
        monkeypatch.setattr(Server, "with_load", flatter)
        assert (await opened_at(router))[0] == "a"
        async with decoding(swarm, "a", 4):
            await trio.sleep(2 * ANNOUNCED_S)
            assert (await opened_at(router))[0] == "b"


@simulated
async def test_asking_takes_one_round_trip_where_there_is_a_choice_and_none_where_there_is_not() -> None:
    for names, round_trips in (("ab", 2), ("a", 1)):
        async with servers(dict.fromkeys(names, FORWARD_S)) as swarm, swarm.client(PLAIN) as (router, _):
            assert {each.peer for each in router.finder.pool.living()} >= {peer_named(name) for name in names}
            _, took_s = await opened_at(router)
            assert took_s == pytest.approx(round_trips * ROUND_TRIP_S, rel=0.05)
            _, took_s = await opened_at(router)
            assert took_s == pytest.approx(ROUND_TRIP_S, rel=0.05), "the answer is not old"


@simulated
async def test_a_route_without_a_session_is_found_without_a_question(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[FrameType] = []
    describe = ServerLink._describe

    async def count(link: ServerLink, frame: Frame) -> None:
        asked.extend([frame.type] if frame.start else [])
        await describe(link, frame)

    monkeypatch.setattr(ServerLink, "_describe", count)
    async with servers(EQUAL) as swarm, swarm.client(PLAIN) as (router, _):
        await router.find_any()
        assert not asked
        await opened_at(router)
        assert asked


# While a session recovers


async def recovered(swarm: World, policy: ClientPolicy, busy: int, since_s: float = 0.0) -> tuple[str, float]:
    """The server that takes the place of one that dies, and how long the session stands still.

    At the best other one this number of clients decode, that have come `since_s` before.
    """
    async with swarm.client(policy) as (router, _), open_session(router) as session:
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(2)
        assert session.route[0].peer == peer_named("a")
        await trio.sleep(ANNOUNCED_S)
        async with decoding(swarm, "b", busy):
            await trio.sleep(since_s)
            swarm.kill("a")
            await dialogue.step(1)
            (recovery,) = session.recoveries
            return str(session.route[0].peer).removeprefix("peer-"), recovery.stall_s


RECOVERS = {"a": FORWARD_S, "b": 2 * FORWARD_S, "c": 2.5 * FORWARD_S}
NEVER_ASKS = replace(PLAIN, route=RoutePolicy(asks=0))


@simulated
async def test_a_lost_hop_is_not_replaced_by_a_server_that_has_become_busy_since_its_announcement() -> None:
    found = []
    for policy in (PLAIN, NEVER_ASKS):
        async with servers(RECOVERS) as swarm:
            found.append(await recovered(swarm, policy, 4))
    assert [name for name, _ in found] == ["c", "b"]


@pytest.mark.parametrize("answers", ["nothing", "as before", "now"])
@simulated
async def test_asking_makes_no_recovery_longer(answers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    describe = ServerLink._describe

    async def say_nothing(link: ServerLink, frame: Frame) -> None:
        if not frame.start:
            await describe(link, frame)

    if answers == "nothing":
        monkeypatch.setattr(ServerLink, "_describe", say_nothing)
    elif answers == "as before":
        answer_as_before(monkeypatch)
    found = []
    for policy in (PLAIN, NEVER_ASKS):
        async with servers(RECOVERS) as swarm:
            found.append(await recovered(swarm, policy, 0))
    (name, stall_s), (other, not_asked_s) = found
    assert name == other and stall_s == pytest.approx(not_asked_s)
