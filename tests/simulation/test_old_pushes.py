"""Pushes between servers of which some know no grants: they push and are pushed to, and cost nobody a link.

Such a server speaks protocol 2. It refuses WANT as unknown, never sends it, and pushes on after a refusal.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.node.serve.push_right import PushRight
from llmnode.node.serve.server_link import ServerLink
from llmnode.testing import peer_named
from llmnode.testing.link import MemoryLink
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import Replay, pack
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
    handle, prepare, get, send = ServerLink._handle, PushRight.prepare, PushRight.get, MemoryLink.send
    told: Counter[tuple[FrameType, PeerId, PeerId]] = Counter()

    def is_old(right: PushRight) -> bool:
        link = right.connection._link
        assert isinstance(link, MemoryLink)
        return link.own.peer in peers

    async def handle_as_old(self: ServerLink, frame: Frame) -> None:
        if frame.type is FrameType.WANT and self._server.network.peer in peers:
            frame = replace(frame, type=FrameType(99))
        await handle(self, frame)

    async def prepare_as_old(self: PushRight, epoch: Epoch, size_bytes: int) -> None:
        if is_old(self):
            await trio.lowlevel.checkpoint()
        else:
            await prepare(self, epoch, size_bytes)

    async def get_as_old(self: PushRight, epoch: Epoch, size_bytes: int) -> bool:
        return is_old(self) or await get(self, epoch, size_bytes)

    async def count(self: MemoryLink, frame: Frame) -> None:
        assert self.version == 2
        told[frame.type, self.own.peer, self.peer] += 1
        await send(self, frame)

    monkeypatch.setattr(ServerLink, "_handle", handle_as_old)
    monkeypatch.setattr(PushRight, "prepare", prepare_as_old)
    monkeypatch.setattr(PushRight, "get", get_as_old)
    monkeypatch.setattr(MemoryLink, "send", count)
    return told


@pytest.mark.parametrize("old", ["0a 0b", "1a 1b", "0a 0b 2a 2b"])
@simulated
async def test_peers_that_know_no_grants_push_and_are_pushed_to(old: str, monkeypatch: pytest.MonkeyPatch) -> None:
    peers = {peer_named(name) for name in old.split()}
    told = know_no_grants(peers, monkeypatch)
    async with pairs_of_servers() as swarm, swarm.session(max_length=60) as (session, _):
        first, second, third = (swarm.node(hop.peer) for hop in session.route)
        dialogue = Dialogue(session, random.Random(1))
        for _ in range(5):
            await dialogue.step(2)
            assert [each.direct for each in session.timings] == [False, True, True]
        await dialogue.go_back(4)
        await dialogue.step(1)
        assert [each.direct for each in session.timings] == [False, True, True]
        assert not session.recoveries
        for near, far in ((first, second), (second, third)):
            assert not link_between(near, far)._error
            assert told[FrameType.STEP, near.peer, far.peer] >= 6
            asked = told[FrameType.WANT, near.peer, far.peer]
            granted, refused = told[FrameType.GRANT, far.peer, near.peer], told[FrameType.REFUSAL, far.peer, near.peer]
            assert (asked > 0) == (near.peer not in peers), "an old server asks for nothing"
            assert (granted > 0) == (not peers & {near.peer, far.peer})
            assert refused == (asked if far.peer in peers else 0)


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
            await lured.send(replace(open_frame(name, 0), epoch=Epoch(epoch)))
            await lured.send(replace(neighbours(name, 1, receiver=victim.name, session=target), epoch=Epoch(epoch)))
            await lured.send(Frame(FrameType.STEP, name, Epoch(epoch), length=1, payload=bytes(ROW)))
            await answers(lured, 3)
            if number < AT_ONCE + 9:
                await lured.send(Frame(FrameType.CLOSE, name))
        for number in range(1, AT_ONCE + 10):  # in the last session, of which a push was refused before
            at = Epoch(epoch), Step(number), number, 1
            await lured.send(Frame(FrameType.STEP, name, *at, payload=bytes(ROW)))
            await answers(lured, 1)
        await trio.sleep(1)
        assert told[FrameType.STEP, first.peer, victim.peer] - before > 2 * AT_ONCE, "it does as it is told"
        assert not told[FrameType.WANT, first.peer, victim.peer]
        if not epoch:
            assert told[FrameType.REFUSAL, victim.peer, first.peer] > 2 * AT_ONCE, "each is refused"
        assert not link._error
        await dialogue.step(1)
        assert [each.direct for each in session.timings] == [False, True, True]
        assert not session.recoveries


@pytest.mark.parametrize("version", [1, 2])
@simulated
async def test_a_next_hop_without_grants_that_refuses_a_push_gets_no_further_one(
    version: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, unknown = SessionId(b"a" * 16), SessionId(b"u" * 16)
    if version == 2:
        know_no_grants([peer_named("1a")], monkeypatch)
    async with pairs_of_servers() as swarm:
        if version == 1:
            swarm.internet.old = {peer_named("1a")}
        near, far = swarm.nodes["0a"], swarm.nodes["1a"]
        await trio.sleep(30)
        link = await swarm.internet.network("hostile").dial(near.network.addresses[0])
        await link.send(open_frame(name, 0))
        await link.send(neighbours(name, 1, receiver="1a", session=unknown))
        await link.send(Frame(FrameType.STEP, name, length=50, payload=bytes(50 * ROW)))
        await answers(link, 3)
        for number in range(1, 50):
            await link.send(Frame(FrameType.REPLAY, name, Epoch(0), Step(number), 0, 50, pack(Replay(push=True))))
            await answers(link, 1)
        assert far.network.traffic.received_bytes == 50 * ROW, "the first push alone"
