"""Frames that come as fast as a link takes them let other tasks run; those that ask for nothing end it."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.stream.exceptions import StreamError

from llmnode.errors import RemoteProtocolError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.net.link import FRAMES_AT_ONCE
from llmnode.wire.frame import Frame, FrameDecoder, FrameType, encode
from unit.in_trio import in_trio
from unit.links import DESCRIBE, POLICY, raw_streams, session_id, step_frame

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from llmnode.net.host import Libp2pNetwork

FRAMES = 4000
"""They fit in the window of a stream, so that one read may bring them all."""
FLOODS = {
    "heartbeats": encode(Frame(FrameType.HEARTBEAT), POLICY) * FRAMES,
    "empty pieces": encode(Frame(FrameType.PIECE), POLICY) * FRAMES,
    "pieces of a byte": b"".join(
        encode(Frame(FrameType.PIECE, payload=bytes([each])), POLICY)
        for each in encode(step_frame(session_id(), 0, 0, FRAMES), POLICY)[:FRAMES]
    ),
    "questions": encode(DESCRIBE, POLICY) * FRAMES,
}
PIECES = ("empty pieces", "pieces of a byte")


class Steps(trio.abc.Instrument):
    """The most frames that one step of a task takes in."""

    def __init__(self) -> None:
        self.now = self.most = 0

    def before_task_step(self, _task: trio.lowlevel.Task) -> None:
        self.now = 0

    def note(self) -> None:
        self.now += 1
        self.most = max(self.most, self.now)


class Node:
    """A node that takes what strangers send, and nothing else."""

    def __init__(self) -> None:
        self.taken = 0
        self.ended: RemoteProtocolError | None = None
        self.is_ended = trio.Event()

    async def take_all(self, network: Libp2pNetwork) -> None:
        try:
            async with network.accept() as link:
                while True:
                    await link.receive()
                    self.taken += 1
        except RemoteProtocolError as error:
            self.ended = error
            self.is_ended.set()


@asynccontextmanager
async def flooded(flood: bytes) -> AsyncIterator[Node]:
    """A node to which a stranger sends these bytes."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as network,
        raw_streams(network.addresses[0]) as new_stream,
        trio.open_nursery() as nursery,
    ):
        node, stream = Node(), await new_stream()
        nursery.start_soon(node.take_all, network)
        nursery.start_soon(write_all, stream, flood)
        yield node
        nursery.cancel_scope.cancel()


async def write_all(stream: Any, flood: bytes) -> None:
    with suppress(BaseLibp2pError, StreamError):  # the link ends
        await stream.write(flood)


@pytest.mark.parametrize("kind", FLOODS)
@in_trio
async def test_one_step_of_the_event_loop_takes_few_frames(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, finish = Steps(), FrameDecoder._finish

    def noted(decoder: FrameDecoder) -> Frame:
        steps.note()
        return finish(decoder)

    monkeypatch.setattr(FrameDecoder, "_finish", noted)
    trio.lowlevel.add_instrument(steps)
    async with flooded(FLOODS[kind]) as node:
        with trio.fail_after(30):
            while node.taken < FRAMES and not node.is_ended.is_set():  # noqa: ASYNC110  a link has no event for it
                await trio.sleep(0.01)
    trio.lowlevel.remove_instrument(steps)
    assert 0 < steps.most <= FRAMES_AT_ONCE + 1


@pytest.mark.parametrize(("kind", "says"), [("heartbeats", "heartbeats"), *((kind, "a piece of") for kind in PIECES)])
@in_trio
async def test_frames_that_ask_for_nothing_end_the_link(kind: str, says: str) -> None:
    async with flooded(FLOODS[kind]) as node:
        with trio.fail_after(30):
            await node.is_ended.wait()
        assert node.ended is not None and says in node.ended.message


@in_trio
async def test_as_many_questions_are_all_taken() -> None:
    async with flooded(FLOODS["questions"]) as node:
        with trio.fail_after(30):
            while node.taken < FRAMES:  # noqa: ASYNC110  a link has no event for it
                await trio.sleep(0.01)
        assert node.ended is None
