"""A frame is written by its sender at once, or by the writing task, and frames arrive in order."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio.testing

from llmnode.core.ids import SESSION_ID_BYTES, SessionId, Step
from llmnode.core.policy import LinkPolicy
from llmnode.errors import LocalProtocolError, PeerTimeout, PeerUnreachable
from llmnode.net.host import open_network
from llmnode.net.link import AT_ONCE_BYTES
from llmnode.swarm import peer_connection
from llmnode.wire.frame import Frame, FrameType
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LISTEN = "/ip4/127.0.0.1/tcp/0"
SESSION = SessionId(b"s" * SESSION_ID_BYTES)
SIZES = (0, 1, 100, AT_ONCE_BYTES // 2, 2000)
PATIENCE_S = 20


def frames(*sizes: int) -> list[Frame]:
    return [
        Frame(FrameType.STEP, SESSION, step=Step(number), length=1, payload=bytes([number]) * size)
        for number, size in enumerate(sizes)
    ]


async def sent(prepare: Callable[[Any], None], given: list[Frame]) -> list[Frame]:
    """The frames of `given` that arrive, sent over a link for which `prepare` was called when all was quiet."""
    async with open_network([LISTEN], LinkPolicy()) as far, open_network([], LinkPolicy()) as near:
        link = await near.dial(far.addresses[0])
        async with far.accept() as other:
            await trio.testing.wait_all_tasks_blocked(0.01)
            prepare(link)
            with trio.fail_after(PATIENCE_S):
                for frame in given:
                    await link.send(frame)
                return [await other.receive() for _ in given]


def without_writing_task(link: Any) -> None:
    async def write(_data: bytes) -> None:
        raise AssertionError("left to the writing task")

    link._stream.write = write


def taking(most: int) -> Callable[[Any], None]:
    """A stream that takes at most `most` bytes at once."""

    def prepare(link: Any) -> None:
        write_at_once = link._stream.write_at_once
        link._stream.write_at_once = lambda data: write_at_once(data[:most]) if most else 0

    return prepare


def same(arrived: list[Frame], given: list[Frame]) -> bool:
    contents = [[(each.step, bytes(each.payload)) for each in some] for some in (arrived, given)]
    return contents[0] == contents[1]


@in_trio
async def test_small_frames_are_written_by_who_sends_them() -> None:
    given = frames(*SIZES)
    assert same(await sent(without_writing_task, given), given)


@pytest.mark.parametrize("most", [0, 1, 50])
def test_what_the_stream_does_not_take_at_once_follows_in_order(most: int) -> None:
    given = frames(*SIZES, 2 * AT_ONCE_BYTES, 10)

    async def main() -> None:
        assert same(await sent(taking(most), given), given)

    trio.run(main)


@in_trio
async def test_a_frame_that_no_link_may_carry_fails_its_sender_alone() -> None:
    async with open_network([LISTEN], LinkPolicy()) as far, open_network([], LinkPolicy()) as near:
        link = await near.dial(far.addresses[0])
        async with far.accept() as other:
            await trio.testing.wait_all_tasks_blocked(0.01)
            with pytest.raises(LocalProtocolError):
                await link.send(Frame(FrameType.STEP, SessionId(b"short")))
            (given,) = frames(10)
            await link.send(given)
            with trio.fail_after(PATIENCE_S):
                assert same([await other.receive()], [given])


async def never(_data: object) -> None:
    await trio.sleep_forever()


async def slowly(_data: object) -> None:
    await trio.sleep(0.2)


@pytest.mark.parametrize("takes", [never, slowly])
@in_trio
async def test_a_node_ends_soon_whatever_the_other_side(takes: Callable[[object], Awaitable[None]]) -> None:
    policy = LinkPolicy()
    async with open_network([LISTEN], policy) as far, AsyncExitStack() as stack:
        near = await stack.enter_async_context(open_network([], policy))
        link = await near.dial(far.addresses[0])
        async with far.accept():
            await trio.testing.wait_all_tasks_blocked(0.01)
            link._stream.write = takes  # type: ignore[method-assign]
            link._stream.write_at_once = lambda _data: 0  # type: ignore[method-assign]
            await link.send(*frames(2 << 20))
            await trio.testing.wait_all_tasks_blocked(0.01)
            began_s = trio.current_time()
            await stack.aclose()
            assert trio.current_time() - began_s < policy.farewell_s + 0.5


@in_trio
async def test_a_link_whose_peer_takes_nothing_is_full_and_its_connection_gives_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(peer_connection, "TAKES_WITHIN_S", 0.1)
    async with open_network([LISTEN], LinkPolicy()) as far, open_network([], LinkPolicy(queue_bytes=1000)) as near:
        link = await near.dial(far.addresses[0])
        async with far.accept(), peer_connection.open_connection(link) as connection:
            await trio.testing.wait_all_tasks_blocked(0.01)
            taking(0)(link)
            link._stream.write = never  # type: ignore[attr-defined]
            *queued, late = frames(*[900] * 4)  # the writing task has the first one
            with trio.fail_after(PATIENCE_S):
                for frame in queued:
                    assert not link.is_full
                    await connection.tell(frame)
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert link.is_full
                with pytest.raises(PeerTimeout, match="takes nothing more"):
                    await connection.tell(late)


@in_trio
async def test_a_frame_counts_as_written_when_the_stream_has_taken_its_last_piece() -> None:
    """Frames that are added later do not count, and the end of the link ends the wait."""
    policy = LinkPolicy()
    async with open_network([LISTEN], policy) as far, open_network([], policy) as near:
        link = await near.dial(far.addresses[0])
        async with far.accept():
            await trio.testing.wait_all_tasks_blocked(0.01)
            taken: list[int] = []
            may_take = trio.Semaphore(0)

            async def take(data: Any) -> None:
                await may_take.acquire()
                taken.append(len(data))

            link._stream.write = take  # type: ignore[method-assign, assignment]
            size_bytes = 3 * policy.piece_bytes
            done: list[int] = []

            async def send_and_wait() -> None:
                await link.send(*frames(size_bytes))
                await link.wait_written()
                done.append(sum(taken))

            async def send_in_vain() -> None:
                with pytest.raises(PeerUnreachable):
                    await send_and_wait()

            async with trio.open_nursery() as nursery:
                nursery.start_soon(send_and_wait)
                await trio.testing.wait_all_tasks_blocked(0.01)
                nursery.start_soon(send_in_vain)
                while len(done) < 1:
                    may_take.release()
                    await trio.testing.wait_all_tasks_blocked(0.01)
                assert size_bytes < done[0] < size_bytes + 1000
                await link.end("test")
                with pytest.raises(PeerUnreachable):
                    await link.wait_written()
            assert len(done) == 1
