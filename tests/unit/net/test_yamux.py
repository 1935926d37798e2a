"""A yamux connection over a real socket: how streams and connections end, and calls that are cancelled."""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)

from llmnode.net.yamux import UNACKNOWLEDGED_S, YamuxConnection
from llmnode.net.yamux_stream import YamuxStream
from llmnode.testing import seeds
from unit.hosts import MIB, echo, new_transport, read_exactly, secured, tcp_pair
from unit.in_trio import in_trio
from unit.yamux_ends import WINDOW_UPDATE, connections, frame, opened

CANCELLED = len(seeds(3_000, long_run=10_000))


@in_trio
async def test_a_stream_ends_in_one_direction_at_a_time() -> None:
    async with connections() as (ours, theirs):
        stream, far = await opened(ours, theirs)
        await stream.write(b"last words")
        await stream.close()
        assert await far.read() == b"last words"
        with pytest.raises(MuxedStreamEOF):
            await far.read()
        with pytest.raises(MuxedStreamClosed):
            await stream.write(b"more")
        await far.write(b"an answer")
        await far.close()
        assert await stream.read(2) + await stream.read() == b"an answer"
        with pytest.raises(MuxedStreamEOF):
            await stream.read()
        assert not ours._streams
        assert not theirs._streams


@in_trio
async def test_a_reset_reaches_who_reads_and_who_writes() -> None:
    async with connections() as (ours, theirs), trio.open_nursery() as nursery:
        stream, far = await opened(ours, theirs)

        async def expect_reset(call: Callable[[], Awaitable[Any]]) -> None:
            with pytest.raises(MuxedStreamReset):
                await call()

        nursery.start_soon(expect_reset, stream.read)
        nursery.start_soon(expect_reset, lambda: stream.write(bytes(MIB)))  # more than the window
        await trio.testing.wait_all_tasks_blocked(0.01)
        await far.reset()
        await expect_reset(far.read)


@in_trio
async def test_what_arrived_before_the_end_of_a_connection_can_still_be_read() -> None:
    async with connections() as (ours, theirs):
        stream, far = await opened(ours, theirs)
        await stream.write(b"last words")
        await ours.close()
        with pytest.raises(MuxedConnUnavailable):
            await theirs.accept_stream()
        assert theirs.is_closed
        assert await far.read() == b"last words"
        with pytest.raises(MuxedStreamReset):
            await far.read()
        with pytest.raises(MuxedStreamReset):
            await far.write(b"too late")
        with pytest.raises(MuxedConnUnavailable):
            await theirs.open_stream()


@in_trio
async def test_a_slow_reader_stops_its_writer_and_is_not_reset() -> None:
    async with connections() as (ours, theirs), trio.open_nursery() as nursery:
        stream, far = await opened(ours, theirs)
        sent = os.urandom(3 * MIB)
        written = trio.Event()

        async def write() -> None:
            await stream.write(sent)
            written.set()

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert not written.is_set()
        other, far_other = await opened(ours, theirs)  # and nobody else has to wait for it
        await other.write(b"meanwhile")
        assert await far_other.read() == b"meanwhile"
        assert await read_exactly(far, len(sent)) == sent
        await written.wait()


@in_trio
async def test_a_connection_whose_peer_reads_nothing_is_closed_without_waiting_for_it() -> None:
    transport, peer = new_transport()
    async with tcp_pair() as raw, trio.open_nursery() as nursery:
        dialled, accepted = await secured(raw, transport, transport, peer)
        ours = YamuxConnection(dialled, peer)
        nursery.start_soon(ours.start)
        credit = b"".join(frame(WINDOW_UPDATE, 0, 1, 64 * MIB) for _ in range(2))
        stream = await ours.open_stream()
        await accepted.write(credit)

        async def write() -> None:
            with pytest.raises(MuxedStreamReset):
                await stream.write(bytes(100 * MIB))

        nursery.start_soon(write)
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert ours.sender.is_congested
        await ours.close()


@in_trio
async def test_a_connection_that_breaks_under_its_sending_task_ends_and_harms_nothing_else() -> None:
    async with connections() as (ours, _theirs):
        assert ours._socket is not None
        ours._socket.shutdown(socket.SHUT_WR)  # writing fails before reading has noticed anything
        await ours.open_stream()  # leaves the bytes to the sending task
        await ours.event_ended.wait()
        with pytest.raises(MuxedConnUnavailable):
            await ours.open_stream()


@in_trio
async def test_a_connection_whose_socket_was_closed_before_it_began_has_ended() -> None:
    transport, peer = new_transport()
    async with tcp_pair() as raw:
        dialled, _accepted = await secured(raw, transport, transport, peer)
        ours = YamuxConnection(dialled, peer)
        await raw[0].close()
        await ours.start()
        assert ours.is_closed


@in_trio
async def test_a_socket_that_is_said_to_have_something_and_has_not_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def readv(fd: int, buffers: list[memoryview], really: Callable[..., int] = os.readv) -> int:
        asked.append(fd)
        if len(asked) == 1:
            raise BlockingIOError
        return really(fd, buffers)

    async with connections() as (ours, theirs):
        monkeypatch.setattr(os, "readv", readv)
        stream, accepted = await opened(ours, theirs)
        await stream.write(b"there")
        assert await read_exactly(accepted, 5) == b"there"
        assert len(asked) >= 2


@in_trio
async def test_thousands_of_cancelled_calls_lose_no_byte_of_any_other_stream() -> None:
    chance = random.Random(0)  # seeded: the same moments in every run, as far as the machine allows
    async with connections() as (ours, theirs), trio.open_nursery() as nursery:
        steady = [await opened(ours, theirs) for _ in range(8)]
        read_from, far_read_from = await opened(ours, theirs)
        written_to, far_written_to = await opened(ours, theirs)
        done = trio.Event()
        cancelled = dict.fromkeys(("read", "write", "open"), 0)
        flow = random.Random(1).randbytes(2 * MIB)

        async def within_a_moment(name: str, call: Callable[[], Awaitable[Any]]) -> Any:
            with trio.move_on_after(chance.choice((0, 1e-5, 1e-4, 3e-4))) as moment:
                return await call()
            cancelled[name] += moment.cancelled_caught
            return None

        async def be_steady(stream: YamuxStream) -> None:
            while not done.is_set():
                sent = chance.randbytes(chance.choice((1, 2000, 100_000)))
                await stream.write(sent)
                assert await read_exactly(stream, len(sent)) == sent

        async def read() -> None:
            got = bytearray()
            while len(got) < len(flow):
                got += await within_a_moment("read", lambda: read_from.read(5000)) or b""
            assert got == flow

        async def write() -> None:
            while cancelled["write"] < CANCELLED // 3:
                await within_a_moment("write", lambda: written_to.write(bytes(300_000)))

        async def open_some() -> None:
            while cancelled["open"] < CANCELLED // 3:
                if stream := await within_a_moment("open", ours.open_stream):
                    await stream.reset()

        async def swallow(stream: YamuxStream) -> None:
            with suppress(MuxedStreamError):
                while True:
                    await stream.read()

        for _, far in steady:
            nursery.start_soon(echo, far)
        nursery.start_soon(swallow, far_written_to)
        nursery.start_soon(far_read_from.write, flow)
        async with trio.open_nursery() as beside:
            for near, _ in steady:
                beside.start_soon(be_steady, near)
            async with trio.open_nursery() as cancelling:
                for task in (read, write, open_some):
                    cancelling.start_soon(task)
            while sum(cancelled.values()) < CANCELLED:
                await within_a_moment("read", read_from.read)
            done.set()
        assert ours.is_established
        assert theirs.is_established
        for near, _ in steady:
            await near.reset()
        await written_to.reset()


@in_trio
async def test_a_host_that_vanishes_breaks_its_connection_at_last() -> None:
    async with connections() as (ours, _):
        await trio.testing.wait_all_tasks_blocked()
        assert ours._socket is not None
        assert ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == UNACKNOWLEDGED_S * 1000
