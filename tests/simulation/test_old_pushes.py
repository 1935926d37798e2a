"""Pushes between servers of which some know no grants: they push and are pushed to, and cost nobody a link."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.errors import PeerRefused
from llmnode.node.serve.server_link import ServerLink
from llmnode.testing import peer_named
from llmnode.testing.link import MemoryLink
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, Replay, pack
from simulation.pushes import a_session, answers, link_between, neighbours, open_frame
from simulation.world import ROW, Dialogue, pairs_of_servers, simulated

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmnode.core.ids import PeerId

AT_ONCE = ServePolicy().unasked_burst


def know_no_grants(
    peers: Collection[PeerId], monkeypatch: pytest.MonkeyPatch
) -> Counter[tuple[FrameType, PeerId, PeerId]]:
    """From now on these are as old. Counts the frames that are sent, with the senders and the receivers."""
    handle, send = ServerLink._handle, MemoryLink.send
    told: Counter[tuple[FrameType, PeerId, PeerId]] = Counter()

    async def handle_as_old(self: ServerLink, frame: Frame) -> None:
        if frame.type is FrameType.WANT and self._server.network.peer in peers:
            frame = replace(frame, type=FrameType(99))
        await handle(self, frame)

    async def send_as_old(self: MemoryLink, frame: Frame) -> None:
        told[frame.type, self.own.peer, self.peer] += 1
        if frame.type is FrameType.WANT and self.own.peer in peers:
            raise PeerRefused(RefusalCode.UNKNOWN_FRAME, "as a peer of protocol 1")
        await send(self, frame)

    monkeypatch.setattr(ServerLink, "_handle", handle_as_old)
    monkeypatch.setattr(MemoryLink, "send", send_as_old)
    return told


@pytest.mark.parametrize("old", ["0a 0b", "1a 1b", "0a 0b 2a 2b"])
@simulated
async def test_peers_that_know_no_grants_push_and_are_pushed_to(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They speak protocol 2, and refuse the frame as unknown."""
    peers = {peer_named(name) for name in old.split()}
    told = know_no_grants(peers, monkeypatch)
    async with pairs_of_servers() as swarm, swarm.session(max_length=60) as (session, _):
        dialogue = Dialogue(session, random.Random(1))
        for _ in range(5):
            await dialogue.step(2)
            assert [each.direct for each in session.timings] == [False, True, True]
        await dialogue.go_back(4)
        await dialogue.step(1)
        assert [each.direct for each in session.timings] == [False, True, True]
        assert not session.recoveries
    assert not any(sender in peers for kind, sender, _ in told if kind is FrameType.GRANT)


@pytest.mark.parametrize("epoch", [0, 7], ids=["an unknown session", "another epoch"])
@simulated
async def test_a_client_cannot_cost_an_old_server_its_link_to_the_next_hop(
    epoch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the old server push to a session that is not there, or that is in another epoch, again and again."""
    target = SessionId(b"t" * 16)
    told = know_no_grants([peer_named("0a"), peer_named("0b")], monkeypatch)
    async with a_session() as (swarm, session, dialogue):
        first, victim = (swarm.node(session.route[number].peer) for number in (0, 1))
        link, hostile = link_between(first, victim), swarm.internet.network("hostile")
        asked, lured = [await hostile.dial(each.network.addresses[0]) for each in (victim, first)]
        if epoch:
            await asked.send(open_frame(target, 1, 1))
            await asked.send(neighbours(target, 1, sender=first.name))
            await answers(asked, 2)
        before = told[FrameType.STEP, first.peer, victim.peer]
        for number in range(AT_ONCE + 10):
            name = SessionId(number.to_bytes(16, "big"))
            await lured.send(replace(open_frame(name, 0, 1), epoch=Epoch(epoch)))
            await lured.send(replace(neighbours(name, 1, receiver=victim.name, session=target), epoch=Epoch(epoch)))
            await lured.send(Frame(FrameType.STEP, name, Epoch(epoch), length=1, payload=bytes(ROW)))
            await answers(lured, 3)
            await lured.send(Frame(FrameType.CLOSE, name))
        assert told[FrameType.STEP, first.peer, victim.peer] - before > AT_ONCE, "it does as it is told"
        await trio.sleep(1)
        assert not link._error
        await dialogue.step(1)
        assert [each.direct for each in session.timings] == [False, True, True]
        assert not session.recoveries


@simulated
async def test_a_next_hop_without_grants_that_refuses_a_push_gets_no_further_one() -> None:
    name, unknown = SessionId(b"a" * 16), SessionId(b"u" * 16)
    async with pairs_of_servers() as swarm:
        swarm.internet.old = {peer_named("1a")}
        near, far = swarm.nodes["0a"], swarm.nodes["1a"]
        await trio.sleep(30)
        link = await swarm.internet.network("hostile").dial(near.network.addresses[0])
        await link.send(open_frame(name, 0))
        await link.send(neighbours(name, 1, receiver="1a", session=unknown))
        await link.send(Frame(FrameType.STEP, name, length=50, payload=bytes(50 * ROW)))
        await answers(link, 3)
        before = far.network.traffic.received_bytes
        for number in range(1, 50):
            await link.send(Frame(FrameType.REPLAY, name, Epoch(0), Step(number), 0, 50, pack(Replay(push=True))))
            await answers(link, 1)
        assert far.network.traffic.received_bytes <= before + 50 * ROW
