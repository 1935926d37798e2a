"""Both ends of a yamux connection over a real socket, or one end that obeys nothing."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio
import trio.testing

from llmnode.net.secure import NoiseConnection
from llmnode.net.yamux import YamuxConnection
from llmnode.net.yamux_stream import YamuxStream
from unit.hosts import new_transport, secured, tcp_pair

DATA, WINDOW_UPDATE, PING = 0, 1, 2
SYN, ACK, FIN, RST = 1, 2, 4, 8


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


def frame(kind: int, flags: int, stream: int, length: int) -> bytes:
    return struct.pack("!BBHII", 0, kind, flags, stream, length)


@asynccontextmanager
async def attacked(
    note_untaken: Callable[[YamuxConnection], None] = lambda _: None,
) -> AsyncIterator[tuple[YamuxConnection, NoiseConnection]]:
    """A connection of ours, and the other end of its session in the hands of someone who obeys nothing above it."""
    (dialler, dialler_id), (listener, listener_id) = new_transport(), new_transport()
    async with tcp_pair() as raw, trio.open_nursery() as nursery:
        attacker, accepted = await secured(raw, dialler, listener, listener_id)
        ours = YamuxConnection(accepted, dialler_id, note_untaken=note_untaken)
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


async def next_data(attacker: NoiseConnection) -> tuple[int, int]:
    """The stream of the next frame with data, and how many bytes that is."""
    while True:
        _, kind, _, number, length = struct.unpack("!BBHII", await attacker.read(12))
        if kind == DATA:
            await attacker.read(length)
            return int(number), int(length)
