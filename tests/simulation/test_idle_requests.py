"""Frames of a session that no worker computes take turns, as requests do, and malformed ones cost the link."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerUnreachable
from llmnode.swarm.peer_connection import open_connection
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Refusal, RefusalCode, Replay, pack, unpack
from llmnode.wire.push_messages import PushLimit
from simulation.pushes import answers, neighbours, open_frame, sessions_of
from simulation.world import ROW, pairs_of_servers, simulated

if TYPE_CHECKING:
    from llmnode.testing.link import MemoryLink
    from llmnode.testing.world import World

POLICY = ServePolicy()
NAME = SessionId(b"s" * 16)
NOT_FINITE = b"\x00\x00\xc0\x7f" * (ROW // 4)
FIRST = Frame(FrameType.STEP, NAME, length=1, payload=bytes(ROW))
AT_ONCE, ROUNDS = 16, 30
COMPUTED_NOT = {
    "a step that was answered": (FIRST, FrameType.RESULT),
    "a step with other content than before": (replace(FIRST, payload=b"\x01" * ROW), FrameType.REFUSAL),
    "a step elsewhere": (replace(FIRST, step=Step(1), start=7), FrameType.REFUSAL),
}
MALFORMED = {
    "numbers that are not finite": replace(FIRST, step=Step(1), start=1, payload=NOT_FINITE),
    "results that are not there": Frame(FrameType.REPLAY, NAME, Epoch(0), Step(9), 0, 50, pack(Replay(push=False))),
    "results of no positions": Frame(FrameType.REPLAY, NAME, Epoch(0), Step(9), meta=pack(Replay(push=False))),
}


async def opened(swarm: World, name: str = "rude", server: str = "0a") -> MemoryLink:
    """A link over which a session has computed its first step."""
    network = swarm.internet.network(name, "9.9.9.9")
    link = await network.dial(swarm.nodes[server].network.addresses[0])
    await link.send(open_frame(NAME, int(server[0])))
    await link.send(FIRST)
    assert [each.type for each in await answers(link, 2)] == [FrameType.OPENED, FrameType.RESULT]
    return link


@pytest.mark.parametrize("kind", COMPUTED_NOT)
@simulated
async def test_frames_of_a_session_that_no_worker_computes_are_answered_at_a_bounded_rate(kind: str) -> None:
    frame, answer = COMPUTED_NOT[kind]
    requests = POLICY.requests
    async with pairs_of_servers() as swarm:
        link = await opened(swarm)
        polite = await swarm.internet.network("polite", "8.8.8.8").dial(swarm.nodes["0a"].network.addresses[0])
        async with open_connection(polite) as connection:
            began_s = trio.current_time()
            for _ in range(ROUNDS):
                for _ in range(AT_ONCE):
                    await link.send(frame)
                assert {each.type for each in await answers(link, AT_ONCE)} == {answer}
                asked_s = trio.current_time()
                await connection.describe(5)
                assert trio.current_time() - asked_s < 1
            took_s = trio.current_time() - began_s
    at_once = requests.burst + POLICY.requests_per_step
    assert took_s > (AT_ONCE * ROUNDS - at_once) / (requests.per_s + requests.shared_per_s) - 0.5


@pytest.mark.parametrize("kind", MALFORMED)
@simulated
async def test_malformed_frames_of_a_session_cost_its_link(kind: str) -> None:
    async with pairs_of_servers() as swarm:
        link = await opened(swarm)
        for number in range(POLICY.malformed_burst):
            await link.send(MALFORMED[kind])
            (answer,) = await answers(link, 1)
            assert unpack(Refusal, answer.meta).code == RefusalCode.BAD_MESSAGE, number
        await link.send(MALFORMED[kind])
        with pytest.raises(PeerUnreachable), trio.fail_after(10):
            await answers(link, 2)
        await trio.sleep(1)
        assert NAME not in swarm.nodes["0a"].server.sessions


@simulated
async def test_malformed_steps_of_another_peer_do_not_cost_the_client_s_link() -> None:
    """Nor do they take the client's turns. It has named that peer, and need not know what it is."""
    async with pairs_of_servers() as swarm:
        node = swarm.nodes["1a"]
        link = await opened(swarm, "client", "1a")
        pushing = await swarm.internet.network("pusher", "7.7.7.7").dial(node.network.addresses[0])
        await pushing.send(Frame(FrameType.WANT, NAME, step=Step(5), meta=pack(PushLimit(0))))
        await link.send(neighbours(NAME, 2, sender="pusher"))
        await answers(link, 1)
        turns = node.server.conduct._requests._rate._own
        left = turns._tokens("9.9.9.0/24", trio.current_time())
        for _ in range(2 * POLICY.malformed_burst):
            await pushing.send(MALFORMED["numbers that are not finite"])
            (answer,) = await answers(link, 1)
            assert unpack(Refusal, answer.meta).code == RefusalCode.BAD_MESSAGE
        assert turns._tokens("9.9.9.0/24", trio.current_time()) >= left
        assert turns._tokens("7.7.7.0/24", trio.current_time()) < POLICY.requests.burst - POLICY.malformed_burst / 2
        await link.send(replace(FIRST, step=Step(1), start=1))
        (answer,) = await answers(link, 1)
        assert answer.type is FrameType.RESULT and not link._error


@simulated
async def test_pushed_steps_that_wait_for_their_turn_cost_their_peer_nothing() -> None:
    """They are computed later, and that gives turns back to the client alone."""
    async with pairs_of_servers() as swarm:
        node = swarm.nodes["1a"]
        link = await opened(swarm, "client", "1a")
        pushing = await swarm.internet.network("pusher", "7.7.7.7").dial(node.network.addresses[0])
        await pushing.send(Frame(FrameType.WANT, NAME, step=Step(5), meta=pack(PushLimit(0))))
        await link.send(neighbours(NAME, 2, sender="pusher"))
        await answers(link, 1)
        turns, (served,) = node.server.conduct._requests._rate._own, sessions_of(node)
        left = turns._tokens("7.7.7.0/24", trio.current_time())
        for number in (2, 3, 4):
            await pushing.send(replace(FIRST, step=Step(number), start=number))
        await trio.sleep(0.1)
        assert len(served.stage.held) == 3
        assert turns._tokens("7.7.7.0/24", trio.current_time()) >= left
        await link.send(replace(FIRST, step=Step(1), start=1))
        assert {each.type for each in await answers(link, 4)} == {FrameType.RESULT}
        assert turns._tokens("7.7.7.0/24", trio.current_time()) >= left


@simulated
async def test_a_step_is_refused_though_no_turn_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(*_: object) -> None:
        await trio.sleep_forever()

    async with pairs_of_servers() as swarm:
        link = await opened(swarm)
        monkeypatch.setattr(swarm.nodes["0a"].server.conduct, "wait_turn", never)
        asked_s = trio.current_time()
        await link.send(MALFORMED["numbers that are not finite"])
        with trio.fail_after(60):
            (answer,) = await answers(link, 1)
        assert answer.type is FrameType.REFUSAL
        assert trio.current_time() - asked_s < POLICY.refusal_patience_s + 1
