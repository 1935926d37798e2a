"""A yamux connection gives its socket little ahead of time, so that a small message has little before it."""

from __future__ import annotations

import socket
import struct
from collections import Counter

import pytest
import trio
import trio.testing

from llmnode.core.links.write_size import OPENING_WRITES
from llmnode.net.sockets import socket_of
from llmnode.net.yamux_sender import UNSENT_BYTES
from llmnode.net.yamux_stream import YamuxStream
from unit.hosts import MIB, hosts
from unit.in_trio import in_trio
from unit.yamux_ends import ACK, DATA, PING, SYN, WINDOW_UPDATE, attacked, frame, next_data


@pytest.mark.skipif(not hasattr(socket, "TCP_NOTSENT_LOWAT"), reason="this system has no TCP_NOTSENT_LOWAT")
@in_trio
async def test_the_kernel_is_given_little_ahead_of_what_is_on_the_wire() -> None:
    async with hosts("ours", "ours") as (ours, theirs):
        for one, other in ((ours, theirs), (theirs, ours)):
            (connection,) = one.get_network().get_connections(other.get_id())
            assert (
                connection.muxed_conn._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT) == UNSENT_BYTES
            )


@in_trio
async def test_a_small_message_goes_out_before_all_that_waits_for_the_socket() -> None:
    window, streams = bytes(1 << 18), 100
    async with attacked() as (ours, attacker), trio.open_nursery() as nursery:
        begun: list[int] = []

        async def write(stream: YamuxStream) -> None:
            await stream.write(window)
            begun.append(stream.number)

        for _ in range(streams):
            nursery.start_soon(write, await ours.open_stream())
        small = await ours.open_stream()
        await trio.testing.wait_all_tasks_blocked()
        assert ours.sender.is_congested
        sent = len(begun)
        assert sent < streams / 2
        nursery.start_soon(small.write, b"small")
        before = set()
        while (number := (await next_data(attacker))[0]) != small.number:
            before.add(number)
        assert len(before) <= sent + 2, "one was half sent, and one half taken"
        nursery.cancel_scope.cancel()


@in_trio
async def test_a_small_message_has_little_ahead_of_it_on_a_slow_line() -> None:
    ahead = {bytes_per_s: await bytes_ahead_of_a_small_message(bytes_per_s) for bytes_per_s in (1e9, 1e6)}
    assert ahead[1e6] < ahead[1e9] / 4


async def bytes_ahead_of_a_small_message(bytes_per_s: float) -> int:
    """Over a socket that has been as fast as that, and takes nothing more for now."""
    async with attacked() as (ours, attacker), trio.open_nursery() as nursery:
        far = socket_of(attacker.raw)
        assert far is not None
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8192)
        for size_bytes, seconds in ((1, 0.0), (10 * bytes_per_s, 10.0)):
            ours.sender._drain.note(int(size_bytes), trio.current_time() - 10 + seconds, is_full=True)
        bulk, small = await ours.open_stream(), await ours.open_stream()
        await attacker.write(frame(WINDOW_UPDATE, 0, bulk.number, 16 * MIB))
        nursery.start_soon(bulk.write, bytes(16 * MIB))
        await trio.testing.wait_all_tasks_blocked(0.05)
        assert ours.sender.is_congested
        nursery.start_soon(small.write, b"small")
        ahead = 0
        while (data := await next_data(attacker))[0] != small.number:
            ahead += data[1]
        nursery.cancel_scope.cancel()
    return ahead


@in_trio
async def test_a_bulk_amid_which_something_small_was_sent_waits_until_it_is_taken_in() -> None:
    async with attacked() as (ours, attacker), trio.open_nursery() as nursery:
        bulk, small = await ours.open_stream(), await ours.open_stream()
        taken, marks = Counter[int](), list[int]()

        async def take() -> None:
            while True:
                _, kind, flags, number, length = struct.unpack("!BBHII", await attacker.read(12))
                if kind == DATA:
                    taken[number] += len(await attacker.read(length))
                elif kind == PING and flags == SYN and length >= 1 << 31:
                    marks.append(length)
                elif kind == PING and flags == SYN:
                    await attacker.write(frame(PING, ACK, 0, length))

        async def taken_of(written: int) -> int:
            before = taken[bulk.number]
            nursery.start_soon(bulk.write, bytes(written))
            while not (marks or taken[bulk.number] == before + written):
                await trio.testing.wait_all_tasks_blocked(0.01)
            await trio.testing.wait_all_tasks_blocked(0.05)
            return taken[bulk.number] - before

        nursery.start_soon(take)
        await attacker.write(frame(WINDOW_UPDATE, 0, bulk.number, 32 * MIB))
        assert await taken_of(4 * MIB) == 4 * MIB, "nothing small is about"
        for _ in range(OPENING_WRITES):
            await small.write(b"small")
        assert await taken_of(4 * MIB) == 4 * MIB, "that opened a stream"
        await small.write(b"small")
        held = await taken_of(4 * MIB)
        assert held <= MIB / 4, "nobody has answered a mark"
        while taken[bulk.number] < 12 * MIB:
            for mark in marks[:]:
                marks.remove(mark)
                await attacker.write(frame(PING, ACK, 0, mark))
            await trio.testing.wait_all_tasks_blocked(0.01)
        nursery.cancel_scope.cancel()
