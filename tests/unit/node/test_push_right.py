"""The right to push to a session of another server: it is waited for, and not longer than is of use."""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing

from llmnode.core.ids import Epoch, SessionId
from llmnode.core.policy import ServePolicy
from llmnode.node.serve.next_hops import NextHops
from llmnode.node.serve.push_right import PushRight
from llmnode.swarm.peer_connection import open_connection
from llmnode.testing import Conditions, open_internet, peer_named, simulated
from llmnode.testing.link import MemoryLink
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode, pack, unpack
from llmnode.wire.push_messages import PushLimit
from llmnode.wire.refusal import refusal_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

SESSION = SessionId(b"s" * 16)
DELAY_S = 0.05
PATIENCE_S = 100.0
PAUSE_S = 2.0
EPOCH = Epoch(3)


@asynccontextmanager
async def a_right(
    may_ask: Callable[[int], bool] = lambda _questions: True,
) -> AsyncIterator[tuple[PushRight, MemoryLink]]:
    """The right, and the link of the next hop, which the test answers for."""
    async with open_internet(Conditions(delay_s=DELAY_S)) as internet:
        near, far = internet.network("near"), internet.network("far")
        link = await near.dial(far.addresses[0])
        async with far.accept() as hop, open_connection(link) as connection:
            yield PushRight(connection, SESSION, count(1), PATIENCE_S, PAUSE_S, may_ask), hop


def grant(want: Frame, limit_bytes: int) -> Frame:
    return Frame(FrameType.GRANT, want.session, want.epoch, want.step, meta=pack(PushLimit(limit_bytes)))


def busy(want: Frame) -> Frame:
    return refusal_of(want, RefusalCode.BUSY, "no memory is left meanwhile")


class Getting:
    """Has asked for a push of 500 bytes; then it knows whether it may make it, and since when."""

    is_allowed: bool | None = None
    took_s = 0.0

    async def run(self, right: PushRight) -> None:
        began_s = trio.current_time()
        self.is_allowed = await right.get(EPOCH, 500)
        self.took_s = trio.current_time() - began_s


@simulated
async def test_a_push_waits_until_it_is_granted_and_for_all_of_its_bytes() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        nursery.start_soon((getting := Getting()).run, right)
        want = await hop.receive()
        assert (want.type, want.session, want.epoch) == (FrameType.WANT, SESSION, EPOCH)
        assert unpack(PushLimit, want.meta).limit_bytes == 500
        for limit_bytes in (499, 500):
            assert getting.is_allowed is None
            await hop.send(grant(want, limit_bytes))
            await trio.sleep(1)
        assert getting.is_allowed
        assert right._allows(EPOCH, 1) is None, "what is granted is used up"


@simulated
async def test_a_push_that_is_not_granted_gives_up_after_its_patience() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        nursery.start_soon((getting := Getting()).run, right)
        want = await hop.receive()
        await trio.sleep(PATIENCE_S + 1)
        assert getting.is_allowed is False and getting.took_s >= PATIENCE_S
        assert unpack(PushLimit, (await hop.receive()).meta).limit_bytes == 0, "it takes back what it has asked for"
        await hop.send(grant(want, 500))
        await trio.sleep(1)
        assert await right.get(EPOCH, 500), "a grant that comes late is of use to the next one"


@simulated
async def test_a_push_wakes_when_its_right_is_taken_away() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        nursery.start_soon((getting := Getting()).run, right)
        await hop.send(grant(await hop.receive(), 0))
        await trio.sleep(1)
        assert getting.is_allowed is False and getting.took_s < 1


@simulated
async def test_a_push_wakes_when_its_connection_ends() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        nursery.start_soon((getting := Getting()).run, right)
        await hop.receive()
        await hop.end("gone")
        await trio.sleep(1)
        assert getting.is_allowed is False and getting.took_s < 1, "it does not wait for what cannot come"


@simulated
async def test_a_link_that_takes_nothing_holds_up_a_push_for_one_patience_and_its_computing_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def stall(_link: MemoryLink, _frame: Frame) -> None:
        await trio.sleep_forever()

    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        with monkeypatch.context() as patch:
            patch.setattr(MemoryLink, "send", stall)
            await (getting := Getting()).run(right)
            assert getting.is_allowed is False and getting.took_s == pytest.approx(PATIENCE_S)
            began_s = trio.current_time()
            await right.prepare(EPOCH, 500)
            assert trio.current_time() == began_s, "the next step is computed at once"
        nursery.start_soon((getting := Getting()).run, right)
        await hop.send(grant(await hop.receive(), 500))
        await trio.sleep(1)
        assert getting.is_allowed, "its push tries again"


@simulated
async def test_a_next_hop_that_is_too_busy_for_the_question_is_asked_again_later() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        await right.prepare(EPOCH, 500)
        await hop.send(busy(await hop.receive()))
        await trio.sleep(1)
        await (getting := Getting()).run(right)
        assert getting.is_allowed is False and getting.took_s == 0, "the push goes by way of the client"
        await trio.sleep(PAUSE_S)
        nursery.start_soon((getting := Getting()).run, right)
        want = await hop.receive()
        assert (want.type, unpack(PushLimit, want.meta).limit_bytes) == (FrameType.WANT, 500), "nothing else was asked"
        await hop.send(grant(want, 500))
        await trio.sleep(1)
        assert getting.is_allowed


@simulated
async def test_a_push_wakes_when_the_next_hop_is_too_busy_for_the_question() -> None:
    async with a_right() as (right, hop), trio.open_nursery() as nursery:
        nursery.start_soon((getting := Getting()).run, right)
        await hop.send(busy(await hop.receive()))
        await trio.sleep(1)
        assert getting.is_allowed is False and getting.took_s < 1


@simulated
async def test_what_was_granted_is_pushed_though_the_next_hop_is_too_busy_for_further_questions() -> None:
    async with a_right() as (right, hop):
        await right.prepare(EPOCH, 500)
        want = await hop.receive()
        await hop.send(grant(want, 600))
        await trio.sleep(1)
        await right.prepare(EPOCH, 700)
        await hop.send(busy(await hop.receive()))
        await trio.sleep(1)
        assert await right.get(EPOCH, 600)
        assert not await right.get(EPOCH, 600)
        await hop.send(grant(want, 1200))
        await trio.sleep(0.5)
        assert await right.get(EPOCH, 600), "it is told of more without a question"


@simulated
async def test_a_push_that_was_refused_ends_them() -> None:
    """No session takes it: the client says where the next ones go."""
    async with a_right() as (right, hop):
        await right.prepare(EPOCH, 500)
        await hop.send(grant(await hop.receive(), 1000))
        await trio.sleep(1)
        assert await right.get(EPOCH, 500)
        await hop.send(
            refusal_of(Frame(FrameType.STEP, SESSION, EPOCH), RefusalCode.UNKNOWN_SESSION, "no such session")
        )
        await trio.sleep(2 * PAUSE_S)
        assert not await right.get(EPOCH, 500)


@simulated
async def test_nothing_is_asked_that_the_client_may_not_have_asked_and_after_a_pause_it_is() -> None:
    allowed = iter([False, True])
    async with a_right(lambda _questions: next(allowed)) as (right, hop), trio.open_nursery() as nursery:
        began_s = trio.current_time()
        for _ in range(3):
            assert not await right.get(EPOCH, 500)
        assert trio.current_time() == began_s, "the result goes by way of the client at once"
        await trio.sleep(PAUSE_S)
        nursery.start_soon((getting := Getting()).run, right)
        want = await hop.receive()
        await hop.send(grant(want, 500))
        await trio.sleep(1)
        assert getting.is_allowed


@simulated
async def test_a_right_that_is_never_granted_sends_no_more_than_is_counted_with_its_withdrawals() -> None:
    burst, wants = 8, list[int]()
    hops = NextHops(None, lambda _peer: None, ServePolicy(rights_burst=burst, rights_per_s=1e-6))
    async with a_right(partial(hops.may_ask, "group", peer_named("far"))) as (right, hop):

        async def read() -> None:
            while True:
                wants.append(unpack(PushLimit, (await hop.receive()).meta).limit_bytes)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(read)
            for number in range(2 * burst):
                assert not await right.get(Epoch(number), 500)
                await trio.sleep(2 * PAUSE_S)
            nursery.cancel_scope.cancel()
        assert wants == [500, 0] * (burst // 2)
