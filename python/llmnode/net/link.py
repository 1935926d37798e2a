"""A link: frames over one libp2p stream, kept alive and kept safe from cancellation.

py-libp2p loses the whole connection when a write, or a read while data arrives, is cancelled, and reports nothing when
a peer falls silent. So one task reads for as long as the link lives, one task writes and is shielded, and who waits
for a frame waits on a queue, which may be cancelled at will. Heartbeats go out when nothing else does; silence ends
the link.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING

import trio
from libp2p.network.stream.exceptions import StreamError

from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.wire.frame import Frame, FrameDecoder, FrameType, encode

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from libp2p.abc import INetStream

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import LinkPolicy

log = logging.getLogger(__name__)

HEARTBEAT = Frame(FrameType.HEARTBEAT)
READ_BYTES = 1 << 20
"""One read takes what yamux has buffered, up to this."""


class Libp2pLink:
    """The `Link` port over a stream. `run` must be running for as long as the link is used."""

    def __init__(
        self,
        stream: INetStream,
        peer: PeerId,
        policy: LinkPolicy,
        drop: Callable[[], Awaitable[None]],
    ) -> None:
        self.peer = peer
        self._stream = stream
        self._policy = policy
        self._drop = drop
        self._outgoing, self._to_write = trio.open_memory_channel[Frame](policy.queue_frames)
        self._received, self._incoming = trio.open_memory_channel[Frame](policy.queue_frames)
        self._received_bytes = 0
        self._unwritten_bytes = 0
        self._room = trio.lowlevel.ParkingLot()  # to be written
        self._ended = trio.Event()
        self._closed = trio.Event()
        self._end_error: PeerError | None = None
        self._silence = trio.CancelScope()  # expires when the peer has been silent for too long
        self._wrote_since_heartbeat = False
        self._write_scope = trio.CancelScope(shield=True)

    async def send(self, frame: Frame) -> None:
        while self._unwritten_bytes > self._policy.queue_bytes:
            await self._room.park()
        self._unwritten_bytes += frame.size_bytes
        try:
            await self._outgoing.send(frame)
        except (trio.ClosedResourceError, trio.BrokenResourceError):
            raise self._end_reason() from None
        except trio.Cancelled:
            self._written(frame)
            raise

    async def receive(self) -> Frame:
        try:
            frame = await self._incoming.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise self._end_reason() from None
        self._received_bytes -= frame.size_bytes
        return frame

    async def end(self, reason: str) -> None:
        self._fail(PeerUnreachable(f"link closed: {reason}"))
        await trio.lowlevel.checkpoint()

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    async def wait_closed(self) -> None:
        """Until the connection is gone too, if `run` has begun."""
        await self._closed.wait()

    async def run(self) -> None:
        """Move frames until the link ends, from whatever side or cause; then close the stream and its connection."""
        self._hear()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                nursery.start_soon(self._write)
                nursery.start_soon(self._keep_alive)
                nursery.start_soon(self._notice_silence)
                await self._ended.wait()
                self._write_scope.deadline = min(
                    self._write_scope.deadline, trio.current_time() + self._policy.farewell_s
                )
                nursery.cancel_scope.cancel()
        finally:
            self._fail(PeerUnreachable("link closed"))
            try:
                await self._drop()
            finally:
                self._closed.set()

    def _fail(self, error: PeerError) -> None:
        """The first cause wins: what follows from it would only hide it."""
        if self._end_error is not None:
            return
        self._end_error = error.blame(self.peer)
        self._ended.set()
        self._outgoing.close()
        self._received.close()
        self._unwritten_bytes = 0
        self._room.unpark_all()
        log.debug("link to %s ends: %s", self.peer, error.message)

    def _end_reason(self) -> PeerError:
        """A fresh copy: one error object must not collect the tracebacks of every waiter."""
        error = self._end_error
        if error is None:  # closed from outside, before `run` began
            return PeerUnreachable("link closed", peer=self.peer)
        return type(error)(error.message, peer=error.peer, span=error.span)

    def _hear(self) -> None:
        self._silence.deadline = trio.current_time() + self._policy.silence_s

    async def _read(self) -> None:
        decoder = FrameDecoder(self._policy)
        try:
            while chunk := await self._stream.read(READ_BYTES):
                self._hear()
                for frame in decoder.feed(chunk):
                    if frame.type is not FrameType.HEARTBEAT:
                        self._deliver(frame)
            self._fail(PeerUnreachable("closed the stream"))
        except RemoteProtocolError as error:
            self._fail(error)
        except trio.WouldBlock:
            self._fail(RemoteProtocolError("sent more than a link may hold ahead of our reading"))
        except (StreamError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(PeerUnreachable(f"connection lost ({type(error).__name__})"))

    def _deliver(self, frame: Frame) -> None:
        if self._received_bytes + frame.size_bytes > self._policy.queue_bytes:
            raise trio.WouldBlock
        self._received.send_nowait(frame)
        self._received_bytes += frame.size_bytes

    async def _write(self) -> None:
        async for frame in self._to_write:
            if not await self._write_one(frame):
                return
            self._written(frame)

    def _written(self, frame: Frame) -> None:
        self._unwritten_bytes -= frame.size_bytes
        if self._unwritten_bytes <= self._policy.queue_bytes:
            self._room.unpark_all()

    async def _write_one(self, frame: Frame) -> bool:
        self._wrote_since_heartbeat = True
        timeout_s = self._policy.farewell_s if self.has_ended else self._policy.write_timeout_s
        self._write_scope = trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_s)
        try:
            with self._write_scope:
                await self._stream.write(encode(frame, self._policy))
        except (StreamError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(PeerUnreachable(f"connection lost ({type(error).__name__})"))
            return False
        if self._write_scope.cancelled_caught:
            self._fail(PeerUnreachable(f"took no data for {self._policy.write_timeout_s:g} s"))
            return False
        return True

    async def _keep_alive(self) -> None:
        while True:
            self._wrote_since_heartbeat = False
            await trio.sleep(self._policy.heartbeat_s)
            if not self._wrote_since_heartbeat:
                # A full queue says that we live as well; a closed one, that nobody asks.
                with contextlib.suppress(trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
                    self._outgoing.send_nowait(HEARTBEAT)
                    self._unwritten_bytes += HEARTBEAT.size_bytes

    async def _notice_silence(self) -> None:
        with self._silence:
            await trio.sleep_forever()
        self._fail(PeerUnreachable(f"silent for {self._policy.silence_s:g} s"))
