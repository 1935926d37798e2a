"""A server grants pushes to many sessions at once, each enough to begin with, and more when there is memory."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.policy import ServePolicy
from llmnode.node.serve.freed_memory import LEAST_S
from llmnode.node.serve.links import log_bug
from llmnode.node.serve.push_inlet import ASKED_BYTES, MOST_ASKED, TRIED_IN_VAIN, LinkGrants, PushDesk, PushInlet
from llmnode.testing import Conditions, open_internet, simulated
from llmnode.testing.hostile.clients import read_all
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import unpack
from llmnode.wire.push_messages import PUSHED_BYTES, PushLimit

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.core.budget import Scope
    from llmnode.testing.link import MemoryLink

DELAY_S = 0.01
WIDEST_ROW = 4 * 8192
"""A position of a model of 70 billion weights, in fp32."""


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


@dataclass
class Desk:
    """A server whose sessions one other server pushes to, over one link."""

    desk: PushDesk
    grants: LinkGrants
    sender: MemoryLink

    @property
    def process(self) -> Scope:
        return self.desk.budget.process

    def open(self, number: int, row_bytes: int, max_length: int = 2048) -> PushInlet:
        """A session of which the client has said that the other server may push to it, and that one that it would."""
        inlet = PushInlet(name(number), Epoch(0), max_length, row_bytes, self.desk)
        inlet.expect(self.grants.link.peer)
        self.grants.note(Frame(FrameType.WANT, name(number), step=Step(number)), 0)
        inlet.hear(self.grants)
        return inlet


@asynccontextmanager
async def a_desk() -> AsyncIterator[Desk]:
    async with open_internet(Conditions(delay_s=DELAY_S)) as internet:
        near, far = internet.network("near"), internet.network("far")
        link = await near.dial(far.addresses[0])
        async with far.accept() as hop, trio.open_nursery() as nursery:
            desk = PushDesk(far.budget, ServePolicy())
            yield Desk(desk, LinkGrants(hop, desk, nursery, log_bug), link)
            nursery.cancel_scope.cancel()


def looks_counted(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When sessions that are short of memory try to get more, from now on."""
    looks: list[float] = []
    extend = PushInlet.extend

    def counted(self: PushInlet) -> None:
        looks.append(trio.current_time())
        extend(self)

    monkeypatch.setattr(PushInlet, "extend", counted)
    return looks


@pytest.mark.parametrize(("row_bytes", "positions"), [(WIDEST_ROW, 7), (4 * 4096, 15), (4 * 576, 64)])
@simulated
async def test_two_servers_share_many_sessions_and_each_may_push_a_short_prefill_at_once(
    row_bytes: int, positions: int
) -> None:
    sessions = 150
    async with a_desk() as desk:
        inlets = [desk.open(number, row_bytes) for number in range(sessions)]
        granted = [unpack(PushLimit, (await desk.sender.receive()).meta).limit_bytes for _ in inlets]
        assert min(granted) >= positions * row_bytes + PUSHED_BYTES
        payload = bytes(row_bytes)
        for number, inlet in enumerate(inlets):
            assert inlet.take(Frame(FrameType.STEP, name(number), payload=payload), Epoch(0), desk.grants)
        for inlet in inlets:
            inlet.close()
        assert not desk.process.held[Resource.PUSHES]


@simulated
async def test_a_whole_chunk_may_be_pushed_at_once_while_there_is_plenty_of_memory() -> None:
    async with a_desk() as desk:
        desk.open(1, WIDEST_ROW)
        assert unpack(PushLimit, (await desk.sender.receive()).meta).limit_bytes == ServePolicy().push_first_bytes
        whole = desk.process.limit(Resource.PUSHES) or 0
        other = desk.process.open(Kind.SESSION, "another")
        assert other.take(Resource.PUSHES, int(ServePolicy().push_first_share * whole))
        desk.open(2, WIDEST_ROW)
        limit_bytes = unpack(PushLimit, (await desk.sender.receive()).meta).limit_bytes
        assert limit_bytes == ServePolicy().push_first_crowded_bytes


@simulated
async def test_a_session_that_is_short_of_memory_is_looked_after_when_some_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = looks_counted(monkeypatch)
    async with a_desk() as desk:
        other = desk.process.open(Kind.SESSION, "another")
        whole = desk.process.limit(Resource.PUSHES) or 0
        assert other.take(Resource.PUSHES, whole)
        desk.open(1, 4096)
        assert unpack(PushLimit, (await desk.sender.receive()).meta).limit_bytes == 0
        await trio.sleep(1)  # until the frames about it are done with
        looks.clear()
        await trio.sleep(100)
        assert not looks, "there is nothing new to see"
        other.release(Resource.PUSHES, whole)
        with trio.fail_after(LEAST_S + 2 * DELAY_S):
            assert unpack(PushLimit, (await desk.sender.receive()).meta).limit_bytes > 4096
        assert len(looks) == 1


@simulated
async def test_memory_that_is_given_back_all_the_time_is_not_looked_at_all_the_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks = looks_counted(monkeypatch)
    async with a_desk() as desk:
        other = desk.process.open(Kind.SESSION, "another")
        assert other.take(Resource.PUSHES, desk.process.limit(Resource.PUSHES) or 0)
        desk.open(1, 4096)
        for _ in range(1000):
            assert other.take(Resource.LOGS, 0)
            other.release(Resource.LOGS, 0)
            await trio.sleep(0.001)
        assert 2 <= len(looks) <= 1 / LEAST_S + 1


@simulated
async def test_thousands_of_sessions_that_are_short_of_memory_are_tried_in_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To try all of them, 20 times a second, took a server's whole event loop."""
    looks = looks_counted(monkeypatch)
    async with a_desk() as desk, trio.open_nursery() as nursery:
        nursery.start_soon(read_all, desk.sender)
        other = desk.process.open(Kind.SESSION, "another")
        whole = desk.process.limit(Resource.PUSHES) or 0
        assert other.take(Resource.PUSHES, whole)
        inlets = [desk.open(number, 4096, max_length=1) for number in range(2000)]
        await trio.sleep(1)
        looks.clear()
        for _ in range(10):
            other.release(Resource.PUSHES, 1)
            await trio.sleep(2 * LEAST_S)
        assert len(looks) <= 10 * (TRIED_IN_VAIN + 1)
        for _ in range(2000 // TRIED_IN_VAIN):
            other.release(Resource.PUSHES, 1)
            await trio.sleep(2 * LEAST_S)
        other.release(Resource.PUSHES, other.held[Resource.PUSHES])
        await trio.sleep(2 * LEAST_S)
        assert not any(inlet._grant.is_short for inlet in inlets), "none is forgotten, and plenty is given at once"
        nursery.cancel_scope.cancel()


@simulated
async def test_sessions_that_a_peer_asks_for_are_charged_and_the_oldest_are_forgotten() -> None:
    """Questions take no turns, and need name no session that is here."""
    async with a_desk() as desk:
        before, grants = desk.process.held[Resource.MEMORY], desk.grants
        for number in range(2 * MOST_ASKED):
            if number == MOST_ASKED // 2:
                assert desk.process.held[Resource.MEMORY] == before + number * ASKED_BYTES
                desk.process.set_limit(Resource.MEMORY, before + number * ASKED_BYTES)
            grants.note(Frame(FrameType.WANT, name(number), step=Step(number)), 0)
        assert list(grants.asked) == [name(3 * MOST_ASKED // 2 + number) for number in range(MOST_ASKED // 2)]
