"""Uploads of one client: each peer's go one after another, and a few peers' beside each other."""

from __future__ import annotations

from functools import partial

import pytest
import trio
import trio.testing

from llmnode.core.ids import PeerId
from llmnode.core.links.uplink import AT_FIRST, LEAST, SHARE_BYTES_PER_S
from llmnode.errors import PeerTimeout, PeerUnreachable
from llmnode.swarm.peer_connection import open_connection
from llmnode.swarm.uploads import GRACE_S, SLOWER, Lane, Uploads
from llmnode.testing import open_internet, simulated
from llmnode.wire.frame import FrameType

PEER = PeerId("peer")
SIZE_BYTES = 4 << 20


async def nothing() -> None:
    """All that was sent is written."""


def lane_of(uploads: Uploads) -> Lane:
    """That of a connection where nothing is given up."""
    return Lane(uploads, nothing, trio.lowlevel.spawn_system_task)


class Line:
    """An uplink with a rate, and links that take less."""

    def __init__(self, bytes_per_s: float, link_bytes_per_s: float, peers: int) -> None:
        self._bytes_per_s, self._link_bytes_per_s = bytes_per_s, link_bytes_per_s
        uploads = Uploads()
        self._lanes = [lane_of(uploads) for _ in range(peers)]
        self.under_way: set[int] = set()
        self.most = 0

    async def upload(self, number: int, size_bytes: int = SIZE_BYTES) -> None:
        async with self._lanes[number].turn(size_bytes):
            assert number not in self.under_way, "each peer's go one after another"
            self.under_way.add(number)
            self.most = max(self.most, len(self.under_way))
            left_bytes: float = size_bytes
            while left_bytes > 0:
                left_bytes -= 0.1 * min(self._link_bytes_per_s, self._bytes_per_s / len(self.under_way))
                await trio.sleep(0.1)
            self.under_way.remove(number)

    async def upload_to_all(self, size_bytes: int = SIZE_BYTES) -> int:
        """Returns the most peers that were sent something at a time."""
        self.most = 0
        async with trio.open_nursery() as nursery:
            for number in range(2 * len(self._lanes)):
                nursery.start_soon(self.upload, number // 2, size_bytes)
        return self.most


@simulated
async def test_a_slow_uplink_sends_to_few_peers_at_a_time() -> None:
    line = Line(2 * SHARE_BYTES_PER_S, 1e9, 12)
    assert await line.upload_to_all() == AT_FIRST
    assert await line.upload_to_all() == LEAST


@simulated
async def test_peers_that_take_their_bytes_slowly_hold_up_others_for_a_bounded_time() -> None:
    slow = Line(100 * SHARE_BYTES_PER_S, SHARE_BYTES_PER_S / 4, AT_FIRST + 1)
    async with trio.open_nursery() as nursery:
        began_s = trio.current_time()
        for number in range(AT_FIRST):
            nursery.start_soon(slow.upload, number)
        await trio.testing.wait_all_tasks_blocked()
        with trio.fail_after(GRACE_S + SLOWER * SIZE_BYTES / SHARE_BYTES_PER_S + 5):
            await slow.upload(AT_FIRST, 1000)
        assert trio.current_time() - began_s > GRACE_S + SIZE_BYTES / SHARE_BYTES_PER_S, "an honest one has more time"
        assert len(slow.under_way) == AT_FIRST, "they go on"


@simulated
async def test_a_fast_uplink_sends_to_all_peers_at_a_time_be_they_slow_or_fast() -> None:
    for link_bytes_per_s in (1e9, 3 * SHARE_BYTES_PER_S / 2):
        line = Line(100 * SHARE_BYTES_PER_S, link_bytes_per_s, 12)
        await line.upload_to_all()
        assert await line.upload_to_all() == 12


@simulated
async def test_small_uploads_tell_nothing_of_the_uplink() -> None:
    line = Line(100 * SHARE_BYTES_PER_S, 1e9, 12)
    for _ in range(3):
        assert await line.upload_to_all(1 << 16) == AT_FIRST


@simulated
async def test_our_own_time_is_none_of_a_peers() -> None:
    """One that does nothing is given up after its time, and after the time in which we write or wait."""
    uploads = Uploads()
    lanes = [lane_of(uploads) for _ in range(AT_FIRST + 1)]
    own_s = lanes[0].stopwatch()

    async def occupy(lane: Lane) -> None:
        async with lane.turn(SIZE_BYTES):
            await trio.sleep(50)

    async with trio.open_nursery() as nursery:
        for lane in lanes[1:]:
            nursery.start_soon(occupy, lane)
        await trio.testing.wait_all_tasks_blocked()

        async def wait_for_answer() -> None:
            with lanes[0].patience(10, PEER, "answer"):
                await trio.sleep(5)
                async with lanes[0].turn(100):
                    assert trio.current_time() == 50, "it waited for a place"
                    assert lanes[0].begun_s == 50
                    await trio.sleep(30)
                await trio.sleep_forever()

        with pytest.raises(PeerTimeout, match="did not answer in 10 s") as late:
            await wait_for_answer()
        assert late.value.waited_s == 10
        assert trio.current_time() == 85
        assert own_s() == 75


class Given:
    """Uploads to several peers that were given up, and whose bytes still go out."""

    def __init__(self, nursery: trio.Nursery, peers: int) -> None:
        self.uploads = Uploads()
        self.written = [trio.Event() for _ in range(peers)]
        self.has_ended = False
        """The links have ended."""
        self.lanes = [Lane(self.uploads, partial(self._wait, number), nursery.start_soon) for number in range(peers)]

    async def _wait(self, number: int) -> None:
        await self.written[number].wait()
        if self.has_ended:
            raise PeerUnreachable("link closed", peer=PEER)

    async def give_up(self, number: int) -> None:
        with trio.move_on_after(1):
            async with self.lanes[number].turn(100):
                await trio.sleep_forever()

    async def has_place(self, number: int, within_s: float = 1.0) -> bool:
        with trio.move_on_after(within_s):
            async with self.lanes[number].turn(100):
                return True
        return False


@simulated
async def test_an_upload_that_is_given_up_keeps_its_place_until_its_bytes_are_written() -> None:
    async with trio.open_nursery() as nursery:
        given = Given(nursery, AT_FIRST + 1)
        for number in range(AT_FIRST):
            await given.give_up(number)
        assert not await given.has_place(AT_FIRST), "the uplink has as much to send as before"
        assert not any(lane.waits for lane in given.lanes)
        given.written[0].set()
        assert await given.has_place(AT_FIRST)
        assert await given.has_place(0)
        given.has_ended = True
        given.written[1].set()
        assert await given.has_place(AT_FIRST) and await given.has_place(0), "a link that has ended sends nothing"
        for written in given.written:
            written.set()


@simulated
async def test_the_next_upload_to_a_peer_takes_no_place_before_the_one_that_was_given_up_is_written() -> None:
    async with trio.open_nursery() as nursery:
        given = Given(nursery, 2)
        own_s = given.lanes[0].stopwatch()
        await given.give_up(0)
        nursery.start_soon(given.has_place, 0, 100)
        await trio.sleep(50)
        assert given.lanes[0].waits and own_s() == pytest.approx(51), "the peer has no fault in that"
        assert len(given.uploads._held) == 1
        given.written[0].set()
        await trio.testing.wait_all_tasks_blocked()
        assert not given.lanes[0].waits and not given.uploads._held


@simulated
async def test_uploads_that_are_given_up_hold_up_others_for_a_bounded_time() -> None:
    async with trio.open_nursery() as nursery:
        given = Given(nursery, AT_FIRST + 1)
        for number in range(AT_FIRST):
            await given.give_up(number)
        assert await given.has_place(AT_FIRST, GRACE_S + 1)
        nursery.cancel_scope.cancel()


@simulated
async def test_an_upload_that_is_given_up_after_its_connection_has_no_place_any_more() -> None:
    async with trio.open_nursery() as nursery:
        given = Given(nursery, AT_FIRST)
    for number in range(AT_FIRST):
        await given.give_up(number)
    assert not given.uploads._held
    assert await given.has_place(0)


@simulated
async def test_a_large_question_that_is_given_up_keeps_its_place_until_the_link_has_sent_it() -> None:
    async with open_internet() as internet:
        client, server = internet.network("client"), internet.network("server")
        internet.set_uplink(client.peer, SIZE_BYTES / 20)
        link = await client.dial(server.addresses[0])
        uploads = Uploads()
        async with open_connection(link, uploads) as connection, server.accept():
            with trio.move_on_after(1):
                await connection.ask_large(FrameType.PART, FrameType.HELD, 60.0, payload=bytes(SIZE_BYTES))
            await trio.sleep(10)
            assert len(uploads._held) == 1
            await trio.sleep(10)
            assert not uploads._held
