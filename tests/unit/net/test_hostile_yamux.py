"""Peers of a yamux connection that obey nothing, or never close a stream."""

from __future__ import annotations

import struct
from contextlib import suppress

import pytest
from libp2p.stream_muxer.exceptions import MuxedStreamReset

from llmnode.net.yamux import YamuxConnection
from llmnode.net.yamux_stream import YamuxStream
from unit.in_trio import in_trio
from unit.yamux_ends import ACK, DATA, FIN, PING, RST, SYN, WINDOW_UPDATE, answers, attacked, frame


@in_trio
async def test_a_flood_of_streams_is_reset_at_the_limit() -> None:
    async with attacked() as (ours, attacker):
        await attacker.write(b"".join(frame(WINDOW_UPDATE, SYN, 2 * index + 1, 0) for index in range(2000)))
        told = await answers(attacker, 2000)
        flags = [struct.unpack("!H", told[at + 2 : at + 4])[0] for at in range(0, len(told), 12)]
        assert flags == [ACK] * 256 + [RST] * 1744
        assert len(ours._streams) == len(ours._opened) == 256


@in_trio
async def test_streams_that_are_reset_before_anyone_takes_them_leave_nothing() -> None:
    async with attacked() as (ours, attacker):
        for index in range(1000):
            await attacker.write(frame(DATA, SYN, 2 * index + 1, 4) + b"data" + frame(DATA, RST, 2 * index + 1, 0))
        await attacker.write(frame(PING, SYN, 0, 5))
        assert (await answers(attacker, 1001))[-12:] == frame(PING, ACK, 0, 5)
        assert not ours._streams
        assert not ours._opened


@in_trio
async def test_streams_that_are_opened_and_reset_in_one_frame_are_counted_and_never_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []
    monkeypatch.setattr(YamuxConnection, "_new_stream", lambda _self, number: made.append(number))
    untaken: list[YamuxConnection] = []
    async with attacked(untaken.append) as (ours, attacker):
        frames = b"".join(frame(WINDOW_UPDATE, SYN | RST, 2 * index + 1, 0) for index in range(2000))
        await attacker.write(frames + frame(PING, SYN, 0, 5))
        await answers(attacker, 2001)
        assert not made
        assert untaken == [ours] * 2000


@pytest.mark.parametrize("ends", [SYN | RST, SYN])
@in_trio
async def test_a_number_that_is_used_again_in_one_read_leaves_no_stream_that_nobody_knows(ends: int) -> None:
    """Its window would be memory that no budget counts. With `SYN`, it is reset after it was accepted."""
    async with attacked() as (ours, attacker):
        accepted: list[YamuxStream] = []
        for number in range(1, 41, 2):
            again = frame(WINDOW_UPDATE, SYN, number, 0) + frame(DATA, 0, number, 4) + b"data"
            if ends == SYN:
                await attacker.write(frame(WINDOW_UPDATE, SYN, number, 0))
                accepted.append(await ours.accept_stream())
                await attacker.write(frame(WINDOW_UPDATE, RST, number, 0) + again)
            else:
                await attacker.write(frame(WINDOW_UPDATE, SYN | RST, number, 0) + again)
            stream = await ours.accept_stream()
            assert await stream.read() == b"data"
            assert ours._streams == {number: stream}
            for former in accepted:
                assert former.is_over
                await former.reset()
                with pytest.raises(MuxedStreamReset):
                    await former.write(b"for a stream that is gone")
            assert ours.machine.has_stream(number)
            await stream.reset()
            assert not ours.machine.has_stream(number)


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
