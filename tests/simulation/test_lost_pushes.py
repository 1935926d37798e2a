"""Pushes that are lost, forged or refused, and hops that are lost: what the client and the hop before make good."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import trio

from llmnode.core.policy import ClientPolicy, PushPolicy, StandingPolicy
from llmnode.testing.link import MemoryLink
from llmnode.wire.frame import Frame, FrameType
from simulation.world import FORWARD_S, ROW, SPANS, Dialogue, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.ids import PeerId
    from llmnode.wire.frame import Buffer

HOPS = len(SPANS)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    began = trio.current_time()
    await work()
    return trio.current_time() - began


@simulated
async def test_a_push_that_gets_lost_is_made_good_by_the_client() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        first, second, _ = (hop.peer for hop in session.route)
        swarm.internet.cut(first, second)
        assert await timed(lambda: dialogue.step(1)) < PushPolicy().patience_s + 1
        assert await timed(lambda: dialogue.step(1)) < 1, "this hop is not waited for again"
        assert [timing.direct for timing in session.timings] == [False, False, True]
        await dialogue.go_back(3)
        await dialogue.step(2)
        assert not session.recoveries


@simulated
async def test_a_hop_that_gets_a_step_twice_answers_twice_and_is_blamed_for_nothing() -> None:
    """The push comes after the client has made it good. The next one gets lost, and the client asks the hop for it."""
    async with pairs_of_servers() as swarm, swarm.session() as (session, _), trio.open_nursery() as nursery:
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        first, second, third = (hop.peer for hop in session.route)
        (served,) = swarm.node(first).server.sessions.values()
        push = served._push

        async def push_later(*pushed: Any) -> None:
            await trio.sleep(1.5 * PushPolicy().patience_s)
            await push(*pushed)

        async def push_late(*pushed: Any) -> bool:
            nursery.start_soon(push_later, *pushed)
            return True

        served._push = push_late  # type: ignore[method-assign]
        swarm.internet.cut(second, third)
        await dialogue.step(1)
        assert not session.recoveries
        assert [timing.direct for timing in session.timings] == [False, False, False]
        await dialogue.step(1)
        assert not session.recoveries


@simulated
async def test_a_hop_that_finishes_a_long_forward_is_not_taken_for_dead_when_another_is_lost() -> None:
    stays = StandingPolicy(slow_total_s=60.0)  # with a slow hop
    policy = ClientPolicy(chunk_tokens=4, standing=stays, replaced_patience_s=60.0)
    async with pairs_of_servers() as swarm, swarm.session(policy) as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(4)
        slow, lost = swarm.node(session.route[0].peer), session.route[1].peer
        slow.worker.forward_s = 1.2 * policy.open_timeout_s
        async with trio.open_nursery() as nursery:
            nursery.start_soon(dialogue.step, 8)
            await trio.sleep(1.5 * policy.open_timeout_s)  # it computes the second chunk
            slow.worker.forward_s = FORWARD_S
            swarm.kill(str(lost).removeprefix("peer-"))
        assert [each.lost for each in session.recoveries] == [lost]


@simulated
async def test_a_server_that_pushes_something_else_than_it_answers_is_noticed_before_the_step_is_over() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        liar = session.route[1].peer
        (served,) = swarm.node(liar).server.sessions.values()
        push = served._push

        async def lie(frame: Frame, payload: Buffer, meta: bytes) -> bool:
            return await push(frame, bytes(len(payload)), meta)

        served._push = lie  # type: ignore[method-assign]
        for _ in range(4):
            await dialogue.step(2)
        assert not session.recoveries, "nobody can tell who lied, and nobody is replaced"
        assert [timing.direct for timing in session.timings] == [False, True, False], "we stand between the two now"


@simulated
async def test_a_server_that_pushes_what_does_not_fit_ends_no_session() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        (served,) = swarm.node(session.route[1].peer).server.sessions.values()
        push = served._push

        async def misplace(frame: Frame, payload: Buffer, meta: bytes) -> bool:
            return await push(replace(frame, start=frame.start + 1), payload, meta)

        served._push = misplace  # type: ignore[method-assign]
        await dialogue.step(2)
        assert not session.recoveries


@pytest.fixture
def traffic(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[PeerId, PeerId]]:
    """Bytes of hidden states, by sender and receiver."""
    sent: Counter[tuple[PeerId, PeerId]] = Counter()
    send = MemoryLink.send

    async def count(link: MemoryLink, frame: Frame) -> None:
        if frame.type in (FrameType.STEP, FrameType.RESULT, FrameType.REPLAYED):
            sent[link.own.peer, link.peer] += len(frame.payload)
        await send(link, frame)

    monkeypatch.setattr(MemoryLink, "send", count)
    return sent


@simulated
async def test_a_client_sends_and_gets_each_position_once(traffic: Counter[tuple[PeerId, PeerId]]) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, client):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        await dialogue.step(1)
        first, second, third = (hop.peer for hop in session.route)
    way = [(client, first), (first, second), (second, third), (third, client)]
    assert traffic == Counter(dict.fromkeys(way, 21 * ROW))


@pytest.mark.parametrize("index", range(HOPS))
@simulated
async def test_a_lost_hop_is_made_good_by_the_one_before(index: int, traffic: Counter[tuple[PeerId, PeerId]]) -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, client):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        traffic.clear()
        swarm.kill(str(session.route[index].peer).removeprefix("peer-"))
        await dialogue.step(1)
        assert len(session.recoveries) == 1
        peers = [client, *(hop.peer for hop in session.route), client]
    replayed = peers[index], peers[index + 1]
    assert {pair for pair, size in traffic.items() if size > 3 * ROW} == {replayed}, "the step is given thrice at most"
    assert traffic[replayed] == 21 * ROW


@simulated
async def test_a_log_goes_by_way_of_the_client_where_servers_cannot_reach_each_other() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        first, lost, _ = (hop.peer for hop in session.route)
        name = str(lost).removeprefix("peer-")
        swarm.internet.cut(first, swarm.nodes[name.translate(str.maketrans("ab", "ba"))].network.peer)
        await trio.sleep(30)
        swarm.kill(name)
        await dialogue.step(1)
        assert [timing.direct for timing in session.timings] == [False, False, True]


@simulated
async def test_hops_that_are_lost_together_are_made_good_one_after_the_other() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(20)
        for hop in session.route:
            swarm.kill(str(hop.peer).removeprefix("peer-"))
        await dialogue.step(1)
        assert {each.span for each in session.recoveries} == set(SPANS)


@simulated
async def test_steps_of_a_session_are_taken_from_its_client_and_the_hop_before_alone() -> None:
    async with pairs_of_servers() as swarm, swarm.session() as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        await dialogue.step(5)
        victim = swarm.node(session.route[1].peer)
        (served,) = victim.server.sessions.values()
        stranger = swarm.internet.network("stranger")
        link = await stranger.dial(victim.network.addresses[0])
        position = served.stage.position
        forged = Frame(
            FrameType.STEP, served.stage.session, served.stage.epoch, served.stage._due, position, 1, b"", bytes(ROW)
        )
        await link.send(forged)
        assert (await link.receive()).type is FrameType.REFUSAL
        assert served.stage.position == position
        await dialogue.step(1)
