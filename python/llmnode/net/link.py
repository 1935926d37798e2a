"""A link: frames over one libp2p stream, kept alive and kept safe from cancellation.

py-libp2p loses the whole connection when a write, or a read while data arrives, is cancelled, and reports nothing when
a peer falls silent. So one task reads for as long as the link lives, one task writes and is shielded, and who waits
for a frame waits on a queue, which may be cancelled at will. Heartbeats go out when nothing else does; silence ends
the link.

Hidden states are packed where that pays (`core/packing.py`). How fast a link is its receiver tells its sender, in the
`start` of heartbeats, in kB/s: who does so can unpack.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import trio
from libp2p.network.stream.exceptions import StreamError

from llmnode import _native
from llmnode.core.flow import part_bytes
from llmnode.core.ids import NO_SESSION
from llmnode.core.packing import ArrivalRate, PackChoice
from llmnode.core.traffic import Traffic
from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.net.outbox import Outbox
from llmnode.wire.frame import Frame, FrameDecoder, FrameType

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from libp2p.abc import INetStream

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import LinkPolicy
    from llmnode.wire.frame import Buffer

log = logging.getLogger(__name__)

T = TypeVar("T")
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
        count: Callable[[Traffic], None],
        *,
        relayed: bool = False,
        relay_limit_bytes: int | None = None,
        wait_direct: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint,
    ) -> None:
        self.peer = peer
        self.relayed = relayed
        self.relay_limit_bytes = relay_limit_bytes
        self._wait_direct = wait_direct
        self._stream = stream
        self._policy = policy
        self._drop = drop
        self._count = count
        self._arrivals = ArrivalRate(policy.packing)
        self._packing = PackChoice(policy.packing)
        self._outbox = Outbox(policy)
        self._writer = trio.lowlevel.ParkingLot()
        self._received, self._incoming = trio.open_memory_channel[Frame](policy.queue_frames)
        self._received_bytes = 0
        self._room = trio.lowlevel.ParkingLot()  # in the outbox
        self._ended = trio.Event()
        self._closed = trio.Event()
        self._end_error: PeerError | None = None
        self._silence = trio.CancelScope()  # expires when the peer has been silent for too long
        self._wrote_since_heartbeat = False
        self._write_scope = trio.CancelScope(shield=True)

    async def wait_direct(self) -> None:
        await self._wait_direct()

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint()
        while not self.has_ended and self._is_full:
            await self._room.park()
        if self.has_ended:
            raise self._end_reason()
        self._put(frame)

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
        self._received.close()
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
                now_s = trio.current_time()
                for frame in decoder.feed(chunk):
                    if frame.type is FrameType.HEARTBEAT:
                        self._take_rate(1000.0 * frame.start)
                    else:
                        self._deliver(await self._unpacked(frame))
                self._arrivals.note(len(chunk), now_s, inside=not decoder.at_boundary())
                if self._arrivals.has_news:
                    self._beat()
            self._fail(PeerUnreachable("closed the stream"))
        except RemoteProtocolError as error:
            self._fail(error)
        except trio.WouldBlock:
            self._fail(RemoteProtocolError("sent more than a link may hold ahead of our reading"))
        except (StreamError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(PeerUnreachable(f"connection lost ({type(error).__name__})"))

    def _take_rate(self, bytes_per_s: float) -> None:
        if bytes_per_s:
            self._packing.bytes_per_s = bytes_per_s
            self._outbox.piece_bytes = part_bytes(bytes_per_s, self._policy.piece_bytes)

    def _deliver(self, frame: Frame) -> None:
        if self._received_bytes + frame.size_bytes > self._policy.queue_bytes:
            raise trio.WouldBlock
        self._received.send_nowait(frame)
        self._received_bytes += frame.size_bytes

    @property
    def _is_full(self) -> bool:
        return len(self._outbox) >= self._policy.queue_frames or self._outbox.size_bytes > self._policy.queue_bytes

    def _put(self, frame: Frame) -> None:
        self._outbox.add(frame)
        self._writer.unpark()

    async def _write(self) -> None:
        while not self.has_ended:
            while (frame := self._outbox.next_to_prepare) is not None:
                self._outbox.prepare(frame, await self._crossing(frame))
            data = self._outbox.take()
            if data is None:
                await self._writer.park()
            elif not await self._write_some(data):
                return
            elif not self._is_full:
                self._room.unpark_all()

    async def _write_some(self, data: bytes) -> bool:
        self._wrote_since_heartbeat = True
        timeout_s = self._policy.farewell_s if self.has_ended else self._policy.write_timeout_s
        self._write_scope = trio.CancelScope(shield=True, deadline=trio.current_time() + timeout_s)
        try:
            with self._write_scope:
                await self._stream.write(data)
        except (StreamError, trio.BrokenResourceError, trio.ClosedResourceError) as error:
            self._fail(PeerUnreachable(f"connection lost ({type(error).__name__})"))
            return False
        if self._write_scope.cancelled_caught:
            self._fail(PeerUnreachable(f"took no data for {self._policy.write_timeout_s:g} s"))
            return False
        return True

    async def _crossing(self, frame: Frame) -> Frame:
        """As it crosses the link."""
        crossing = await self._packed(frame)
        if frame.session != NO_SESSION:
            self._count(Traffic(sent_bytes=len(crossing.payload), sent_plain_bytes=len(frame.payload)))
        return crossing

    async def _packed(self, frame: Frame) -> Frame:
        choice, kind, size = self._packing, frame.value_bytes, len(frame.payload)
        if choice.wants_sample(kind, size):
            for _ in range(2):  # the first finds cold caches
                await self._pack(frame, memoryview(frame.payload)[: self._policy.packing.sample_bytes])
        if not choice.pays(kind, size):
            return frame
        packed = await self._pack(frame, frame.payload)
        return replace(frame, payload=packed, packed=True) if len(packed) < size else frame

    async def _pack(self, frame: Frame, part: Buffer) -> bytes:
        """Its time is the processor's: on a busy machine a thread that has to wait would make packing seem dear."""

        def pack() -> tuple[bytes, float]:
            began_s = time.thread_time()
            return _native.pack(part, frame.value_bytes), time.thread_time() - began_s

        packed, took_s = await self._in_thread_if_long(pack, len(part))
        self._packing.note(frame.value_bytes, len(frame.payload), len(part), len(packed), took_s)
        return packed

    async def _unpacked(self, frame: Frame) -> Frame:
        """As its sender gave it to the link. Raises RemoteProtocolError."""
        crossing_bytes = len(frame.payload)
        if frame.packed:

            def unpack() -> tuple[bytearray, float]:
                began_s = time.thread_time()
                return _native.unpack(frame.payload, self._policy.max_payload_bytes), time.thread_time() - began_s

            try:
                payload, took_s = await self._in_thread_if_long(unpack, crossing_bytes)
            except ValueError as error:
                raise RemoteProtocolError(f"{frame.type.name}: {error}") from error
            self._packing.note_unpacked(len(payload), took_s)
            frame = replace(frame, payload=memoryview(payload), packed=False)
        if frame.session != NO_SESSION:
            self._count(Traffic(received_bytes=crossing_bytes, received_plain_bytes=len(frame.payload)))
        return frame

    async def _in_thread_if_long(self, work: Callable[[], T], size_bytes: int) -> T:
        return await trio.to_thread.run_sync(work) if size_bytes >= self._policy.packing.in_thread_bytes else work()

    def _beat(self) -> None:
        """Say that we live, and how fast the link is."""
        self._put(Frame(FrameType.HEARTBEAT, start=self._arrivals.tell_kilobytes_per_s()))

    async def _keep_alive(self) -> None:
        while True:
            self._wrote_since_heartbeat = False
            await trio.sleep(self._policy.heartbeat_s)
            if not self._wrote_since_heartbeat:
                self._beat()

    async def _notice_silence(self) -> None:
        with self._silence:
            await trio.sleep_forever()
        self._fail(PeerUnreachable(f"silent for {self._policy.silence_s:g} s"))
