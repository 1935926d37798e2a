"""The benchmarks' proxies: when bytes come out of them and in what order, on a mock clock; breaks over real sockets."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from trio.testing import MockClock, lockstep_stream_pair, memory_stream_pair, wait_all_tasks_blocked

from bench.kit.proxy import CHUNKS, Shape, ShapingProxy, join
from unit.in_trio import in_trio

Stream = trio.StapledStream[Any, Any]  # Any: a memory stream's halves are private types


def on_mock_clock(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """Time passes when everybody waits for it."""

    @functools.wraps(test)
    def run() -> None:
        trio.run(test, clock=MockClock(autojump_threshold=0))

    return run


@asynccontextmanager
async def joined(shape: Shape) -> AsyncIterator[tuple[Stream, Stream]]:
    """Two peers with the proxy between them."""
    near, near_inside = memory_stream_pair()
    far_inside, far = memory_stream_pair()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(join, near_inside, far_inside, shape)
        yield near, far
        nursery.cancel_scope.cancel()


async def arrival(stream: Stream) -> tuple[float, bytes]:
    data = bytes(await stream.receive_some())
    return round(trio.current_time(), 6), data


@on_mock_clock
async def test_bytes_arrive_one_way_later_and_in_order() -> None:
    async with joined(Shape(one_way_s=2.0)) as (near, far):
        began = trio.current_time()
        for number in range(4):
            await near.send_all(bytes([number]))
            await trio.sleep(0.5)
        arrived = [await arrival(far) for _ in range(4)]
        assert arrived == [(began + 2.0 + number / 2, bytes([number])) for number in range(4)]


@on_mock_clock
async def test_a_round_trip_takes_two_one_way_delays() -> None:
    async with joined(Shape(one_way_s=0.05)) as (near, far):
        began = trio.current_time()
        await near.send_all(b"ping")
        assert (await arrival(far))[1] == b"ping"
        await far.send_all(b"pong")
        assert await arrival(near) == (pytest.approx(began + 0.1), b"pong")


@on_mock_clock
async def test_a_rate_delays_each_byte_behind_those_before_it() -> None:
    async with joined(Shape(one_way_s=1.0, bytes_per_s=100)) as (near, far):
        began = trio.current_time()
        await near.send_all(bytes(300))
        await wait_all_tasks_blocked()
        await near.send_all(bytes(100))
        assert [await arrival(far), await arrival(far)] == [(began + 4.0, bytes(300)), (began + 5.0, bytes(100))]


@on_mock_clock
async def test_each_direction_has_its_own_rate() -> None:
    async with joined(Shape(bytes_per_s=100, back_bytes_per_s=50)) as (near, far):
        began = trio.current_time()
        await near.send_all(bytes(100))
        assert await arrival(far) == (began + 1.0, bytes(100))
        await far.send_all(bytes(100))
        assert await arrival(near) == (began + 3.0, bytes(100))


@on_mock_clock
async def test_a_shorter_delay_overtakes_nothing() -> None:
    shape = Shape(one_way_s=10.0)
    async with joined(shape) as (near, far):
        began = trio.current_time()
        await near.send_all(b"slow")
        await wait_all_tasks_blocked()
        shape.one_way_s = 0.0
        await near.send_all(b"quick")
        assert [await arrival(far), await arrival(far)] == [(began + 10.0, b"slow"), (began + 10.0, b"quick")]


@on_mock_clock
async def test_what_is_sent_in_silence_arrives_when_it_heals() -> None:
    shape = Shape(one_way_s=1.0)
    async with joined(shape) as (near, far):
        began = trio.current_time()
        await near.send_all(b"before")
        await wait_all_tasks_blocked()
        shape.cut()
        await near.send_all(b"meanwhile")
        with trio.move_on_after(100) as silence:
            await arrival(far)
        assert silence.cancelled_caught
        shape.heal()
        heard = b""
        while len(heard) < len(b"beforemeanwhile"):
            at, data = await arrival(far)
            assert at == began + 100
            heard += data
        assert heard == b"beforemeanwhile"


@on_mock_clock
async def test_the_end_of_one_direction_arrives_as_late_as_bytes_and_leaves_the_other_open() -> None:
    async with joined(Shape(one_way_s=3.0)) as (near, far):
        began = trio.current_time()
        await near.send_all(b"last")
        await wait_all_tasks_blocked()
        await near.send_eof()
        assert [await arrival(far), await arrival(far)] == [(began + 3.0, b"last"), (began + 3.0, b"")]
        await far.send_all(b"still here")
        assert await arrival(near) == (began + 6.0, b"still here")


def test_a_sender_is_held_up_when_so_much_is_under_way() -> None:
    async def send_without_end() -> None:
        near, near_inside = lockstep_stream_pair()
        far_inside, _far = memory_stream_pair()
        sent = 0

        async def send() -> None:
            nonlocal sent
            while True:
                await near.send_all(b"x")
                sent += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(join, near_inside, far_inside, Shape(one_way_s=1000.0))
            nursery.start_soon(send)
            await wait_all_tasks_blocked()
            assert CHUNKS <= sent <= CHUNKS + 2  # and one at either end of the queue
            nursery.cancel_scope.cancel()

    trio.run(send_without_end, clock=MockClock())


# Over sockets


@asynccontextmanager
async def proxied() -> AsyncIterator[tuple[ShapingProxy, trio.SocketStream, trio.SocketStream]]:
    """A proxy, and the two ends of a connection through it."""
    proxy = ShapingProxy()
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    proxy.aim(listener.socket.getsockname())
    async with listener, trio.open_nursery() as nursery:
        port = await nursery.start(proxy.run)
        near = await trio.open_tcp_stream("127.0.0.1", port)
        far = await listener.accept()
        async with near, far:
            yield proxy, near, far
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_megabyte_passes_both_ways_and_ends_in_order() -> None:
    async with proxied() as (_, near, far), trio.open_nursery() as nursery:
        sent = {near: b"n" * 2**20, far: b"f" * 2**20}

        async def send(stream: trio.SocketStream) -> None:
            await stream.send_all(sent[stream])
            await stream.send_eof()

        async def check(stream: trio.SocketStream, expected: bytes) -> None:
            assert b"".join([bytes(data) async for data in stream]) == expected

        for stream in (near, far):
            nursery.start_soon(send, stream)
        nursery.start_soon(check, near, sent[far])
        nursery.start_soon(check, far, sent[near])


@in_trio
async def test_connections_of_a_host_may_have_a_shape_of_their_own() -> None:
    async with proxied() as (proxy, near, far):
        proxy.shape_of("127.0.1.1").cut()
        port = near.socket.getpeername()[1]
        async with await trio.open_tcp_stream("127.0.0.1", port, local_address="127.0.1.1") as cut_off:
            await cut_off.send_all(b"silence")
            await near.send_all(b"heard")
            assert await far.receive_some() == b"heard"
            with trio.move_on_after(0.05) as silence:
                await cut_off.receive_some()
            assert silence.cancelled_caught
        proxy.shape_of("127.0.1.1").heal()


@in_trio
async def test_a_host_that_is_connected_gets_no_shape_of_its_own_any_more() -> None:
    async with proxied() as (proxy, _, _):
        with pytest.raises(AssertionError, match="before there are any"):
            proxy.shape_of("127.0.0.1")


@in_trio
async def test_a_reset_is_seen_at_both_ends() -> None:
    async with proxied() as (proxy, near, far):
        await near.send_all(b"hello")
        assert await far.receive_some() == b"hello"
        assert proxy.reset() == 1
        for stream in (near, far):
            with pytest.raises(trio.BrokenResourceError):
                await stream.receive_some()
        assert proxy.reset() == 0


@in_trio
async def test_a_peer_that_breaks_off_is_seen_as_such_at_the_other_end() -> None:
    async with proxied() as (proxy, near, far):
        await near.send_all(b"hello")
        assert await far.receive_some() == b"hello"
        await far.send_all(b"unread")  # closing with unread bytes breaks a connection
        await near.socket.recv(1, trio.socket.MSG_PEEK)
        near.socket.close()
        with pytest.raises(trio.BrokenResourceError):
            await far.receive_some()
        assert proxy.reset() == 0


@in_trio
async def test_nobody_behind_the_proxy_is_a_broken_connection() -> None:
    async with proxied() as (proxy, near, _far):
        proxy.aim(("127.0.0.1", 1))
        async with await trio.open_tcp_stream(*near.socket.getpeername()) as refused:
            with pytest.raises(trio.BrokenResourceError):
                await refused.receive_some()
