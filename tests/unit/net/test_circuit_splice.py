"""A relay joins two streams: each direction ends on its own, and each address group has the same turns to write."""

from __future__ import annotations

from typing import Any

import pytest
import trio
import trio.testing
from libp2p.custom_types import TProtocol
from libp2p.network.stream.net_stream import NetStream
from libp2p.stream_muxer.exceptions import MuxedStreamEOF

from llmnode.core.policy import RelayPolicy
from llmnode.net.circuit_splice import Splices
from llmnode.testing import simulated
from unit.circuits import MEGABYTE, Intruder, dialling, relaying
from unit.in_trio import in_trio

PIECE = 10_000


class Sink:
    """Takes what is written to it over a line of its own, or one that it shares with others."""

    def __init__(self, line: trio.Lock) -> None:
        self.moved_bytes = 0
        self.line = line

    async def read(self, _most: int) -> bytes:
        await trio.sleep_forever()
        return b""

    async def write(self, data: bytes) -> None:
        async with self.line:
            await trio.sleep(0.001)
        self.moved_bytes += len(data)


@simulated
async def test_a_group_with_many_circuits_moves_no_more_than_one_with_a_single_circuit() -> None:
    line = trio.Lock()
    one, many = Sink(line), [Sink(line) for _ in range(20)]
    await move({("one", "peer"): [one], ("many", "peer"): many}, 4)
    assert one.moved_bytes == pytest.approx(sum(each.moved_bytes for each in many), rel=0.15)
    assert min(each.moved_bytes for each in many) > 0


@simulated
async def test_a_peer_with_many_circuits_moves_no_more_than_another_one_of_its_group() -> None:
    line = trio.Lock()
    one, many = Sink(line), [Sink(line) for _ in range(20)]
    await move({("group", "one"): [one], ("group", "many"): many}, 4)
    assert one.moved_bytes == pytest.approx(sum(each.moved_bytes for each in many), rel=0.15)


@simulated
async def test_circuits_whose_far_side_takes_nothing_keep_nobody_waiting() -> None:
    one, stuck = Sink(trio.Lock()), [Sink(trio.Lock()) for _ in range(20)]
    for each in stuck:
        await each.line.acquire()
    await move({("one", "peer"): [one], ("stuck", "peer"): stuck}, 1)
    assert one.moved_bytes > 800 * PIECE
    assert not any(each.moved_bytes for each in stuck)


async def move(sinks: dict[tuple[str, str], list[Sink]], for_s: float) -> None:
    """Through one relay, to each sink of a peer in an address group, as much as it takes."""
    splices = Splices(RelayPolicy())
    async with trio.open_nursery() as nursery:
        for path, members in sinks.items():
            for sink in members:
                nursery.start_soon(splices.splice, Flood(), sink, path, PIECE)
        await trio.sleep(for_s)
        nursery.cancel_scope.cancel()


class Flood:
    """Sends for ever."""

    async def read(self, _most: int) -> bytes:
        await trio.lowlevel.checkpoint()
        return bytes(PIECE)


@in_trio
async def test_a_splice_ends_each_direction_on_its_own() -> None:
    async with relaying() as near, dialling() as far:
        opened: list[NetStream] = []
        both = trio.Event()

        async def take(stream: Any) -> None:
            opened.append(stream)
            if len(opened) == 2:
                both.set()
            await trio.sleep_forever()

        near.host.set_stream_handler(TProtocol("/half"), take)
        intruder = Intruder(far)
        one, other = [await intruder.open(near, TProtocol("/half")) for _ in range(2)]
        await both.wait()
        in_order: list[bool] = []
        splices = Splices(RelayPolicy(circuit_bytes=MEGABYTE))

        async def run() -> None:
            in_order.append(
                await splices.splice(opened[0].muxed_stream, opened[1].muxed_stream, ("group", "peer"), MEGABYTE)
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            await one.write(b"question")
            await one.close_write()
            assert await other.read(100) == b"question"
            with pytest.raises(MuxedStreamEOF):
                await other.muxed_stream.read(100)
            await other.write(b"answer")
            assert await one.read(100) == b"answer"
            await other.close_write()
            with pytest.raises(MuxedStreamEOF):
                await one.muxed_stream.read(100)
        assert in_order == [True]
