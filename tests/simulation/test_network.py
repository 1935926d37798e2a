"""The internet in memory: what it does to links is what real ones suffer, and no more."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.ids import Step
from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerUnreachable
from llmnode.testing import Conditions, open_internet, peer_named, seeds, simulated
from llmnode.wire.frame import HEADER_BYTES, Frame, FrameType

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.testing import MemoryInternet, MemoryNetwork
    from llmnode.testing.link import MemoryLink

POLICY = LinkPolicy()
DELAY_S = 0.05
A, B = peer_named("a"), peer_named("b")
SILENT = "silent for 6 s"
CLOSED = "closed the stream"


class Pair:
    """Two peers, and a link that the first has opened."""

    def __init__(self, internet: MemoryInternet) -> None:
        self.internet = internet
        self.a, self.b = internet.network("a"), internet.network("b")

    async def link(self) -> tuple[MemoryLink, MemoryLink]:
        return await linked(self.a, self.b)


async def linked(one: MemoryNetwork, other: MemoryNetwork) -> tuple[MemoryLink, MemoryLink]:
    near = await one.dial(other.addresses[0])
    assert near.far is await other._accepted.receive()
    return near, near.far


@asynccontextmanager
async def pair(conditions: Conditions | None = None, seed: int = 0) -> AsyncIterator[Pair]:
    async with open_internet(conditions or Conditions(delay_s=DELAY_S), seed=seed) as internet:
        yield Pair(internet)


def step(number: int, payload: bytes = b"") -> Frame:
    return Frame(FrameType.STEP, step=Step(number), payload=payload)


async def take(link: MemoryLink, frames: int) -> list[tuple[float, int]]:
    """When each arrived, and which."""
    arrived = []
    for _ in range(frames):
        frame = await link.receive()
        arrived.append((trio.current_time(), frame.step))
    return arrived


async def end_of(link: MemoryLink) -> tuple[float, str]:
    """When, and why; what is still to be read is skipped."""
    try:
        while True:
            await link.receive()
    except PeerUnreachable as error:
        return trio.current_time(), error.message


# Conditions


@pytest.mark.parametrize("seed", seeds(20))
@simulated
async def test_frames_of_one_link_arrive_in_order_whatever_the_conditions(seed: int) -> None:
    conditions = Conditions(delay_s=DELAY_S, jitter_s=1.0, bytes_per_s=10_000, loss=0.2)
    async with pair(conditions, seed) as both:
        near, far = await both.link()
        for number in range(50):
            await near.send(step(number, bytes(number)))
        arrived = []
        with suppress(PeerUnreachable):  # it may lose too much
            while len(arrived) < 50:
                arrived += await take(far, 1)
        steps = [number for _, number in arrived]
        assert steps == list(range(len(steps)))
        assert len(steps) > 5


@simulated
async def test_frames_of_two_links_may_overtake_each_other() -> None:
    async with pair(Conditions(delay_s=DELAY_S, jitter_s=1.0)) as both:
        links = [await both.link() for _ in range(2)]
        arrived: list[int] = []

        async def note(far: MemoryLink) -> None:
            while True:
                arrived.extend(number for _, number in await take(far, 1))

        async with trio.open_nursery() as nursery:
            for _, far in links:
                nursery.start_soon(note, far)
            for number in range(20):
                await links[number % 2][0].send(step(number))
            await trio.sleep(10)
            nursery.cancel_scope.cancel()
    assert sorted(arrived) == list(range(20)) != arrived


@simulated
async def test_a_frame_takes_its_size_over_the_bandwidth_and_waits_for_those_before_it() -> None:
    size, bytes_per_s = 5000, 10_000.0
    async with pair(Conditions(delay_s=DELAY_S, bytes_per_s=bytes_per_s)) as both:
        near, far = await both.link()
        began_s = trio.current_time()
        for number in range(3):
            await near.send(step(number, bytes(size - HEADER_BYTES)))
        arrived = await take(far, 3)
    for number, (at_s, _) in enumerate(arrived, start=1):
        assert at_s - began_s == pytest.approx(DELAY_S + number * size / bytes_per_s)


@simulated
async def test_a_frame_is_written_when_the_line_has_carried_it() -> None:
    async with pair(Conditions(delay_s=DELAY_S, bytes_per_s=1000)) as both:
        near, _ = await both.link()
        began_s = trio.current_time()
        await near.send(step(0, bytes(1000 - HEADER_BYTES)))
        await near.wait_written()
        assert trio.current_time() - began_s == pytest.approx(1)
        await near.send(step(1, bytes(1000 - HEADER_BYTES)))
        both.internet.kill(near.own.peer)
        with pytest.raises(PeerUnreachable):
            await near.wait_written()
        assert trio.current_time() - began_s == pytest.approx(1)


@simulated
async def test_links_share_an_uplink_evenly() -> None:
    """A small frame of another step passes a large one, and one of the same step does not."""
    async with open_internet(Conditions(delay_s=DELAY_S)) as internet:
        client, servers = internet.network("client"), [internet.network(name) for name in "ab"]
        internet.set_uplink(client.peer, 10_000)
        one, other = [await client.dial(each.addresses[0]) for each in servers]
        began_s = trio.current_time()
        for link, size_bytes in ((one, 20_000), (other, 40_000), (one, 20_000)):
            await link.send(step(0, bytes(size_bytes - HEADER_BYTES)))
        await one.send(step(0))
        await one.send(Frame(FrameType.NEWS, step=Step(1)))
        async with servers[0].accept() as far:
            times_s = [(await far.receive(), trio.current_time() - began_s - DELAY_S)[1] for _ in range(4)]
        assert times_s == pytest.approx([0, 4, 8, 8], abs=0.1)
        await other.wait_written()
        assert trio.current_time() - began_s == pytest.approx(8, abs=0.1)


@simulated
async def test_a_frame_that_a_link_cannot_carry_in_time_ends_it() -> None:
    async with pair(Conditions(delay_s=DELAY_S, bytes_per_s=1000)) as both:
        near, _ = await both.link()
        began_s = trio.current_time()
        await near.send(step(0, bytes(int(1000 * POLICY.write_timeout_s))))
        ended_s, why = await end_of(near)
    assert (ended_s - began_s, why) == (pytest.approx(POLICY.write_timeout_s), "took no data for 10 s")


@simulated
async def test_what_is_lost_is_late_and_so_is_what_comes_after_it() -> None:
    async with pair(Conditions(delay_s=DELAY_S, loss=0.2), seed=3) as both:
        near, far = await both.link()
        late = 0
        for number in range(100):
            began_s = trio.current_time()
            await near.send(step(number))
            ((at_s, _),) = await take(far, 1)
            late += at_s - began_s > 2 * DELAY_S
    assert 10 < late < 30


@simulated
async def test_a_link_that_loses_everything_dies_though_nobody_uses_it() -> None:
    async with pair() as both:
        near, _ = await both.link()
        both.internet.set_conditions(A, B, Conditions(loss=1.0))
        began_s = trio.current_time()
        ended_s, why = await end_of(near)
    assert ended_s - began_s < POLICY.silence_s + POLICY.heartbeat_s + 1
    assert why == CLOSED, "the other side heard nothing, and said so"


@simulated
async def test_an_idle_link_that_loses_some_lives() -> None:
    async with pair(Conditions(loss=0.05)) as both:
        near, far = await both.link()
        await trio.sleep(600)
        await near.send(step(1))
        assert [number for _, number in await take(far, 1)] == [1]


@simulated
async def test_what_may_be_repeated_arrives_twice_and_nothing_else_does() -> None:
    async with pair(Conditions(duplication=1.0)) as both:
        near, far = await both.link()
        for kind in (FrameType.OPEN, FrameType.STEP, FrameType.TRUNCATE, FrameType.NEWS):
            await near.send(Frame(kind))
        got = [(await far.receive()).type for _ in range(6)]
    assert [(kind, len(list(each))) for kind, each in itertools.groupby(got)] == [
        (FrameType.OPEN, 1),
        (FrameType.STEP, 2),
        (FrameType.TRUNCATE, 1),
        (FrameType.NEWS, 2),
    ]


@simulated
async def test_conditions_hold_for_their_direction_alone() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.set_conditions(A, B, Conditions(delay_s=1.0))
        began_s = trio.current_time()
        await near.send(step(0))
        await far.send(step(1))
        assert await take(near, 1) == [(pytest.approx(began_s + DELAY_S), 1)]
        assert await take(far, 1) == [(pytest.approx(began_s + 1.0), 0)]
        both.internet.mend_all()
        await near.send(step(2))
        assert await take(far, 1) == [(pytest.approx(began_s + 1.0 + DELAY_S), 2)]


# Cuts


@simulated
async def test_what_was_sent_through_a_cut_arrives_when_it_is_mended_in_time() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.cut(A, B)
        await near.send(step(0))
        await trio.sleep(POLICY.silence_s - 1)
        both.internet.mend(A, B)
        assert await take(far, 1) == [(trio.current_time(), 0)]
        await trio.sleep(60)
        await far.send(step(1))
        assert [number for _, number in await take(near, 1)] == [1]


@simulated
async def test_a_cut_that_lasts_ends_the_link_at_both_sides() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.cut(A, B)
        began_s = trio.current_time()
        for link in (near, far):
            assert await end_of(link) == (pytest.approx(began_s + POLICY.silence_s), SILENT)


@simulated
async def test_who_is_not_heard_still_hears() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.cut_one_way(A, B)
        began_s = trio.current_time()
        await near.send(step(0))
        await far.send(step(1))
        assert [number for _, number in await take(near, 1)] == [1]
        assert await end_of(far) == (pytest.approx(began_s + POLICY.silence_s), SILENT)
        assert await end_of(near) == (pytest.approx(began_s + POLICY.silence_s + DELAY_S), CLOSED)


@simulated
async def test_one_may_dial_the_other_and_not_the_reverse() -> None:
    async with pair() as both:
        both.internet.block_dials(B, A)
        near, far = await linked(both.a, both.b)
        await far.send(step(1))
        assert [number for _, number in await take(near, 1)] == [1]
        began_s = trio.current_time()
        with pytest.raises(PeerUnreachable):
            await both.b.dial(both.a.addresses[0])
        assert trio.current_time() - began_s == pytest.approx(POLICY.dial_timeout_s)
        both.internet.mend(A, B)
        await linked(both.b, both.a)


@simulated
async def test_a_partition_leaves_each_side_whole() -> None:
    async with open_internet() as internet:
        networks = {name: internet.network(name) for name in "abcd"}
        internet.partition([peer_named("a"), peer_named("b")], [peer_named("c"), peer_named("d")])
        await linked(networks["a"], networks["b"])
        await linked(networks["d"], networks["c"])
        for one, other in itertools.product("ab", "cd"):
            with pytest.raises(PeerUnreachable):
                await networks[one].dial(networks[other].addresses[0])


# Processes


@simulated
async def test_the_frozen_say_nothing_and_hear_all_of_it_afterwards() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.freeze(B)
        await near.send(step(0))
        await far.send(step(1))
        await trio.sleep(POLICY.silence_s - 1)
        both.internet.thaw(B)
        thawed_s = trio.current_time()
        assert await take(far, 1) == [(thawed_s, 0)]
        assert await take(near, 1) == [(pytest.approx(thawed_s + DELAY_S), 1)]
        await trio.sleep(60)
        await near.send(step(2))
        assert [number for _, number in await take(far, 1)] == [2]


@simulated
async def test_who_was_frozen_for_long_first_hears_what_was_said_and_then_that_nobody_waits() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.freeze(B)
        frozen_s = trio.current_time()
        await near.send(step(0))
        assert await end_of(near) == (pytest.approx(frozen_s + POLICY.silence_s), SILENT)
        await trio.sleep(30)
        both.internet.thaw(B)
        assert await take(far, 1) == [(trio.current_time(), 0)]
        assert await end_of(far) == (trio.current_time(), CLOSED)


@simulated
async def test_a_frozen_peer_that_is_killed_says_nothing_of_what_it_held() -> None:
    async with pair() as both:
        near, far = await both.link()
        both.internet.freeze(B)
        await far.send(step(1))
        await far.end("while frozen")
        killed_s = trio.current_time()
        both.internet.kill(B)
        with pytest.raises(PeerUnreachable, match=CLOSED):
            await near.receive()
        assert trio.current_time() - killed_s == pytest.approx(DELAY_S)


@simulated
async def test_nobody_is_reached_who_is_frozen_or_dead() -> None:
    async with pair() as both:
        both.internet.freeze(B)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(linked, both.a, both.b)
            await trio.sleep(5)
            both.internet.thaw(B)
        both.internet.kill(B)
        with pytest.raises(PeerUnreachable):
            await both.a.dial(both.b.addresses[0])
        await linked(both.a, both.internet.network("b"))


@simulated
async def test_who_sends_more_than_a_slow_link_takes_has_to_wait() -> None:
    frames = POLICY.queue_frames + 10
    async with pair(Conditions(delay_s=DELAY_S, bytes_per_s=100 * HEADER_BYTES)) as both:
        near, far = await both.link()
        began_s = trio.current_time()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(take, far, frames)
            for number in range(frames):
                await near.send(step(number))
            assert trio.current_time() - began_s == pytest.approx(0.1 + DELAY_S, abs=0.011)
