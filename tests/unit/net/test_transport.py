"""Our Noise and yamux over real sockets: against py-libp2p's own, under cancellation, and against peers that misbehave.

The protocol machines without sockets are tested in Rust (`transport_rs/tests/`).
"""

from __future__ import annotations

import os
import random
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
import trio
import trio.testing
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.network.exceptions import SwarmException
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo, info_from_p2p_addr
from libp2p.security.noise.exceptions import InvalidSignature, NoiseFailure, PeerIDMismatchesPubkey
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamError,
    MuxedStreamReset,
)
from libp2p.stream_muxer.yamux.yamux import YamuxStream as StockStream

from llmnode._native import NoiseHandshake, NoiseSession
from llmnode.core.links.write_size import OPENING_WRITES
from llmnode.net.secure import NoiseConnection, NoiseTransport
from llmnode.net.sockets import socket_of
from llmnode.net.yamux import UNACKNOWLEDGED_S, YamuxConnection
from llmnode.net.yamux_sender import UNSENT_BYTES
from llmnode.net.yamux_stream import YamuxStream
from unit.hosts import ECHO, LOOPBACK, MIB, echo, host, hosts, new_transport, read_exactly, secured, tcp_pair
from unit.in_trio import in_trio

CANCELLED = 10_000
DATA, WINDOW_UPDATE, PING = 0, 1, 2
SYN, ACK, FIN, RST = 1, 2, 4, 8


PAIRS = [("ours", "ours"), ("ours", "stock"), ("stock", "ours"), ("ours", "stock with RSA"), ("stock with RSA", "ours")]


@pytest.mark.parametrize(("dialler", "listener"), PAIRS)
@in_trio
async def test_ten_megabytes_go_both_ways_at_once(dialler: str, listener: str) -> None:
    async with hosts(dialler, listener) as (ours, theirs), trio.open_nursery() as nursery:
        stream = await ours.new_stream(theirs.get_id(), [ECHO])
        assert stream.muxed_conn.peer_id == theirs.get_id()
        assert isinstance(stream.muxed_stream, YamuxStream if dialler == "ours" else StockStream)
        sent = os.urandom(10_000_000)
        nursery.start_soon(stream.write, sent)
        assert await read_exactly(stream, len(sent)) == sent
        assert [each.to_base58() for each in theirs.get_connected_peers()] == [ours.get_id().to_base58()]


@pytest.mark.parametrize(("dialler", "listener"), PAIRS[:3])
@in_trio
async def test_many_streams_at_once_keep_their_bytes_apart(dialler: str, listener: str) -> None:
    async with hosts(dialler, listener) as (ours, theirs), trio.open_nursery() as nursery:

        async def use(number: int) -> None:
            stream = await ours.new_stream(theirs.get_id(), [ECHO])
            sent = random.Random(number).randbytes(3000 * number)
            await stream.write(sent)
            assert await read_exactly(stream, len(sent)) == sent
            await stream.close()

        for number in range(60):
            nursery.start_soon(use, number)


@pytest.mark.parametrize("dialler", ["ours", "stock"])
@in_trio
async def test_who_answers_under_another_name_is_refused(dialler: str) -> None:
    ours, theirs = host(dialler), host("ours")
    another = ID.from_pubkey(create_new_key_pair().public_key)
    async with ours.run(listen_addrs=[]), theirs.run(listen_addrs=[LOOPBACK]):
        with pytest.raises(SwarmException):
            await ours.connect(PeerInfo(another, [info_from_p2p_addr(theirs.get_addrs()[0]).addrs[0]]))
        assert not ours.get_connected_peers()


# Connections alone


@asynccontextmanager
async def connections() -> AsyncIterator[tuple[YamuxConnection, YamuxConnection]]:
    (dialler, dialler_id), (listener, listener_id) = new_transport(), new_transport()
    async with tcp_pair() as raw, trio.open_nursery() as nursery:
        dialled, accepted = await secured(raw, dialler, listener, listener_id)
        assert accepted.get_remote_peer() == dialler_id
        ours, theirs = YamuxConnection(dialled, listener_id), YamuxConnection(accepted, dialler_id)
        nursery.start_soon(ours.start)
        nursery.start_soon(theirs.start)
        yield ours, theirs
        await ours.close()
        await theirs.close()


async def opened(ours: YamuxConnection, theirs: YamuxConnection) -> tuple[YamuxStream, YamuxStream]:
    return await ours.open_stream(), await theirs.accept_stream()


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


# Cancellation


@in_trio
async def test_ten_thousand_cancelled_calls_lose_no_byte_of_any_other_stream() -> None:
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


# Peers that misbehave


def frame(kind: int, flags: int, stream: int, length: int) -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream, length)


@asynccontextmanager
async def attacked() -> AsyncIterator[tuple[YamuxConnection, NoiseConnection]]:
    """A connection of ours, and the other end of its session in the hands of someone who obeys nothing above it."""
    (dialler, dialler_id), (listener, listener_id) = new_transport(), new_transport()
    async with tcp_pair() as raw, trio.open_nursery() as nursery:
        attacker, accepted = await secured(raw, dialler, listener, listener_id)
        ours = YamuxConnection(accepted, dialler_id)
        nursery.start_soon(ours.start)
        yield ours, attacker
        await ours.close()


async def answers(attacker: NoiseConnection, count: int) -> bytes:
    """Reads `count` frames from our side, pings aside."""
    frames = b""
    while len(frames) < 12 * count:
        answer = await attacker.read(12)
        if answer[:4] != frame(PING, SYN, 0, 0)[:4]:
            frames += answer
    return frames


@in_trio
async def test_a_flood_of_streams_is_reset_at_the_limit() -> None:
    async with attacked() as (ours, attacker):
        await attacker.write(b"".join(frame(WINDOW_UPDATE, SYN, 2 * index + 1, 0) for index in range(2000)))
        told = await answers(attacker, 2000)
        flags = [struct.unpack("!H", told[at + 2 : at + 4])[0] for at in range(0, len(told), 12)]
        assert flags == [ACK] * 256 + [RST] * 1744
        assert len(ours._streams) == len(ours._opened) == 256


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
        far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
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


async def next_data(attacker: NoiseConnection) -> tuple[int, int]:
    """The stream of the next frame with data, and how many bytes that is."""
    while True:
        _, kind, _, number, length = struct.unpack("!BBHII", await attacker.read(12))
        if kind == DATA:
            await attacker.read(length)
            return int(number), int(length)


@in_trio
async def test_streams_that_are_reset_before_anyone_takes_them_leave_nothing() -> None:
    async with attacked() as (ours, attacker):
        for index in range(1000):
            await attacker.write(frame(DATA, SYN, 2 * index + 1, 4) + b"data" + frame(DATA, RST, 2 * index + 1, 0))
        await attacker.write(frame(PING, SYN, 0, 5))
        assert (await answers(attacker, 1001))[-12:] == frame(PING, ACK, 0, 5)
        assert not ours._streams
        assert not ours._opened


MISDEEDS = {
    "no frame": b"x" * 12,
    "more than the window": frame(DATA, SYN, 1, 1 << 19),
    "a stream of ours": frame(DATA, SYN, 2, 0),
    "data after the end": frame(DATA, SYN | FIN, 1, 0) + frame(DATA, 0, 1, 1) + b"x",
}


@pytest.mark.parametrize("misdeed", MISDEEDS.values(), ids=MISDEEDS.keys())
@in_trio
async def test_what_is_against_the_protocol_ends_the_connection_and_wakes_everyone(misdeed: bytes) -> None:
    async with attacked() as (ours, attacker):
        stream = await ours.open_stream()
        await attacker.write(misdeed)
        with pytest.raises(MuxedStreamReset):
            await stream.read()
        assert ours.is_closed
        with suppress(Exception):
            await attacker.read()


@in_trio
async def test_a_forged_message_ends_the_connection() -> None:
    async with attacked() as (ours, attacker):
        stream = await ours.open_stream()
        message = bytearray(attacker.session.seal(frame(PING, SYN, 0, 0)))
        message[-1] ^= 1
        await attacker.raw.write(bytes(message))
        with pytest.raises(MuxedStreamReset):
            await stream.read()


@in_trio
async def test_a_stream_that_the_other_side_never_closes_is_given_up_some_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("yamux", "yamux_stream"):
        monkeypatch.setattr(f"llmnode.net.{module}.LINGER_S", 0.0)
    async with attacked() as (ours, attacker):
        await attacker.write(frame(WINDOW_UPDATE, SYN, 1, 0))
        await (await ours.accept_stream()).close()
        await attacker.write(frame(PING, SYN, 0, 0))
        closed = frame(WINDOW_UPDATE, ACK, 1, 0) + frame(WINDOW_UPDATE, FIN, 1, 0)
        given_up = frame(WINDOW_UPDATE, RST, 1, 0) + frame(PING, ACK, 0, 0)
        assert await answers(attacker, 4) == closed + given_up
        assert not ours._streams


# Noise


@in_trio
async def test_a_dialler_refuses_another_identity() -> None:
    (transport, _), (_, another) = new_transport(), new_transport()
    async with tcp_pair() as raw:
        with pytest.RaisesGroup(PeerIDMismatchesPubkey, flatten_subgroups=True):
            await secured(raw, transport, transport, another)


@pytest.mark.parametrize("impostor_dials", [True, False])
@in_trio
async def test_a_proof_for_another_noise_key_is_refused(impostor_dials: bool) -> None:
    """A peer that has seen a proof cannot use it: the proof names its owner's Noise key."""
    (honest, honest_id), (victim, victim_id) = new_transport(), new_transport()
    noise_key = create_noise_key_pair().private_key.to_bytes()
    impostor = NoiseTransport(create_new_key_pair(), noise_key, victim._proof, None)
    sides = (impostor, honest, honest_id) if impostor_dials else (honest, impostor, victim_id)
    async with tcp_pair() as raw:
        with pytest.RaisesGroup(InvalidSignature, flatten_subgroups=True):
            await secured(raw, *sides)


@pytest.mark.parametrize("garbage", [b"", b"\x00\x00", b"\x00\x05hello", b"GET / HTTP/1.1\r\n\r\n" * 5000])
@in_trio
async def test_what_is_no_handshake_is_a_typed_failure(garbage: bytes) -> None:
    transport, _ = new_transport()
    async with tcp_pair() as (raw, accepted), trio.open_nursery() as nursery:

        async def attack() -> None:
            with suppress(Exception):
                await raw.write(garbage)
            await raw.close()

        nursery.start_soon(attack)
        with pytest.raises(NoiseFailure):
            await transport.secure_inbound(accepted)


def test_a_session_is_handed_over_once() -> None:
    initiator, responder = (NoiseHandshake(bytes([1]) * 32, initiator=initiator) for initiator in (True, False))
    assert responder.receive(initiator.send(b"")) == b""
    assert initiator.receive(responder.send(b"proof")) == b"proof"
    assert responder.receive(initiator.send(b"mine")) == b"mine"
    (ours, rest), (theirs, _) = initiator.finish(), responder.finish()
    assert isinstance(ours, NoiseSession)
    assert rest == b""
    assert theirs.open(ours.seal(bytes(200_000))) == bytes(200_000)
    with pytest.raises(RuntimeError, match="handed over"):
        initiator.finish()
    with pytest.raises(ValueError, match="authentication"):
        theirs.open(theirs.seal(b"mine"))


@in_trio
async def test_a_host_that_vanishes_breaks_its_connection_at_last() -> None:
    async with connections() as (ours, _):
        await trio.testing.wait_all_tasks_blocked()
        assert ours._socket is not None
        assert ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            timeout_ms = ours._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            assert timeout_ms == UNACKNOWLEDGED_S * 1000
