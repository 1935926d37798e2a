"""Windows of streams: their largest possible size is reserved before they can have it."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from libp2p.stream_muxer.exceptions import MuxedStreamError

from llmnode.core.budget import Budget, Kind, Resource, Scope
from llmnode.core.ids import PeerId
from llmnode.core.policy import BudgetPolicy
from llmnode.net.window import FIRST_BYTES, KIB, Window
from unit.in_trio import in_trio
from unit.yamux_ends import connections, opened

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.net.yamux_stream import YamuxStream

MIB = 1 << 20
PLENTY = BudgetPolicy(memory_bytes=512 * MIB)


@asynccontextmanager
async def flooded(policy: BudgetPolicy) -> AsyncIterator[tuple[YamuxStream, Scope]]:
    """A stream whose other side sends all that it may, and the scope of our connection."""
    scope = Budget(policy).connection("8.8.8.8", PeerId("flood"))
    async with connections() as (ours, theirs), trio.open_nursery() as nursery:
        theirs.scope = scope
        stream, far = await opened(ours, theirs)

        async def flood() -> None:
            with suppress(MuxedStreamError):
                while True:
                    await stream.write(bytes(MIB))

        nursery.start_soon(flood)
        yield far, scope
        nursery.cancel_scope.cancel()


def unread_bytes(stream: YamuxStream) -> int:
    """All that waits in the protocol machine, which is taken out."""
    return len(stream._machine.read(stream.number, 1 << 30, 0.0, 0) or b"")


@pytest.mark.parametrize("read_bytes", [0, 100 * KIB, 200 * KIB, 700 * KIB, 3 * MIB, 8 * MIB])
@pytest.mark.parametrize("memory_bytes", [8 * MIB, 40 * MIB, 512 * MIB])
@in_trio
async def test_no_more_arrives_ahead_of_our_reading_than_is_reserved(memory_bytes: int, read_bytes: int) -> None:
    async with flooded(BudgetPolicy(memory_bytes=memory_bytes)) as (stream, scope):
        left = read_bytes
        while left:
            left -= len(await stream.read(left))
        await trio.testing.wait_all_tasks_blocked(0.02)
        reserved = scope.held[Resource.WINDOWS]
        assert unread_bytes(stream) <= FIRST_BYTES + reserved
        assert scope.held[Resource.MEMORY] == reserved


@in_trio
async def test_a_fast_stream_has_a_large_window_and_gives_its_memory_back() -> None:
    async with flooded(PLENTY) as (stream, scope):
        left = 16 * MIB
        while left:
            left -= len(await stream.read(left))
        assert scope.held[Resource.WINDOWS] == 16 * MIB - FIRST_BYTES
        await stream.reset()
        assert not scope.held[Resource.WINDOWS] and not scope.held[Resource.MEMORY]


@in_trio
async def test_without_memory_for_the_first_growth_the_stream_goes_on_with_its_first_window() -> None:
    async with flooded(BudgetPolicy(memory_bytes=8 * MIB)) as (stream, scope):  # a peer may have 512 KiB of windows
        left = 4 * MIB
        while left:
            left -= len(await stream.read(left))
        assert not scope.held[Resource.WINDOWS]
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert unread_bytes(stream) <= FIRST_BYTES


@in_trio
async def test_a_window_grows_when_there_is_memory_again() -> None:
    async with flooded(BudgetPolicy(memory_bytes=8 * MIB)) as (stream, scope):
        peer = scope.of_kind(Kind.PEER)
        assert peer is not None
        for resource in (Resource.WINDOWS, Resource.MEMORY):
            peer.set_limit(resource, 20 * MIB)
        taken = {Resource.WINDOWS: 2 * MIB}
        process = next(each for each in scope.around if each.kind is Kind.PROCESS)
        assert process.reserve_all(taken)
        for freed in (False, True):
            if freed:
                process.release(Resource.WINDOWS, 2 * MIB)
            left = 9 * MIB
            while left:
                left -= len(await stream.read(left))
            assert (scope.held[Resource.WINDOWS] > 0) is freed


@in_trio
async def test_without_memory_for_more_the_stream_goes_on_with_the_window_that_it_has() -> None:
    async with flooded(BudgetPolicy(memory_bytes=20 * MIB)) as (stream, scope):
        left = 16 * MIB
        while left:
            left -= len(await stream.read(left))
        assert scope.held[Resource.WINDOWS] == MIB - FIRST_BYTES
        await trio.testing.wait_all_tasks_blocked(0.02)
        assert unread_bytes(stream) <= MIB


@pytest.mark.parametrize("memory_bytes", [8 * MIB, 40 * MIB, 512 * MIB])
def test_a_window_goes_on_for_ever_whatever_its_size(memory_bytes: int) -> None:
    window = Window(Budget(BudgetPolicy(memory_bytes=memory_bytes)).connection("8.8.8.8", PeerId("far")))
    read_bytes = 0
    while read_bytes < 2048 * MIB:
        size = window.may_read
        assert size > 0
        window.note_read(size)
        read_bytes += size
    window.close()
    assert window.may_read
