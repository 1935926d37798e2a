"""A link: frames over one libp2p stream, kept alive and kept safe from cancellation.

One task reads for as long as the link lives. A task that waits for a frame waits on a queue, and may be cancelled at
will. A task that sends a frame gives it to the stream at once, without a switch of tasks, if nothing waits before it.
The rest goes to a task that writes and is shielded. Heartbeats go out when nothing else does; silence, which libp2p
does not report, ends the link.

It reads and writes our muxer's stream (`negotiated.py`), not py-libp2p's around it, which switches tasks for a lock in
every call.

Hidden states are packed where that pays (`packer.py`). The receiver of a link tells the sender how fast it is (`start`
of heartbeats, in kB/s).
"""

from __future__ import annotations

import logging
import math
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError

from llmnode.core.budget import Kind, Worth
from llmnode.core.ids import NO_SESSION
from llmnode.core.links.heartbeats import Heartbeats
from llmnode.core.links.pace import LinkPaces
from llmnode.core.links.packing import ArrivalRate
from llmnode.core.links.write_size import part_bytes
from llmnode.core.peers.whereabouts import RELAYED
from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.net.outbox import Outbox
from llmnode.net.packer import Packer
from llmnode.net.yamux_stream import ProtocolRefused
from llmnode.wire.frame import Frame, FrameDecoder, FrameType
from llmnode.wire.refusal import farewell_of_full

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from llmnode.core.account import Account
    from llmnode.core.budget import Scope
    from llmnode.core.ids import PeerId
    from llmnode.core.links.send_rates import SendRates
    from llmnode.core.policy import LinkPolicy
    from llmnode.core.traffic import TrafficMeter
    from llmnode.net.negotiated import NegotiatedStream
    from llmnode.wire.frame import Buffer

log = logging.getLogger(__name__)

SILENCE_PARTS = 8
"""The parts of the allowed silence, which are counted one by one. There is one more, in which something was heard at
last."""
READ_BYTES = 1 << 20
"""One read takes what yamux has buffered, up to this."""
CHARGE_BYTES = 1 << 18
"""Memory is reserved in steps of this size. A link that holds no more than a quarter of it has that free."""
LOOK_EVERY_S = 0.05
"""How often a link that waits for memory looks whether there is some."""
FRAMES_AT_ONCE = 64
"""Others run after this many frames: a read may bring 20,000 of the smallest."""
AT_ONCE_BYTES = 1 << 15
"""A larger frame is left to the writing task: others run before it is encrypted."""


@dataclass(frozen=True, slots=True)
class LinkOwner:
    """The part of a link's host that the link calls."""

    drop: Callable[[], Awaitable[None]]
    """The link is over: the stream goes, and its connection if nothing else uses it."""
    traffic: TrafficMeter
    send_rates: SendRates
    wait_direct: Callable[[], Awaitable[None]]


class Libp2pLink:
    """The `Link` port over a stream. `run` must be running for as long as the link is used."""

    def __init__(
        self,
        stream: NegotiatedStream,
        peer: PeerId,
        policy: LinkPolicy,
        owner: LinkOwner,
        memory: Account,
        *,
        relayed: bool = False,
        relay_limit_bytes: int | None = None,
    ) -> None:
        self.peer = peer
        self.relayed = relayed
        self.relay_limit_bytes = relay_limit_bytes
        self._stream = stream
        self._policy = policy
        self._owner = owner
        self._memory = memory
        group = memory.scope.of_kind(Kind.GROUP)
        self.group = peer if group is None else group.name  # its scope is closed before the link is
        self._decoder = FrameDecoder(policy)
        self._paces = LinkPaces(policy.pace_grace_s, policy.pace_bytes_per_s, 2 * policy.heartbeat_s)
        self._written_bytes = self._times_written = 0  # the bytes since the outbox was empty, and how often it was
        self._sent_bytes = self._sent_before_rate = 0  # in all, and before the peer has told its latest rate
        self._heartbeats = Heartbeats(policy)
        self._arrivals = ArrivalRate(policy.packing)
        self._packer = Packer(policy)
        self._outbox = Outbox(policy)
        self._at_once_bytes = min(AT_ONCE_BYTES, policy.piece_bytes)
        self._unwritten = memoryview(b"")  # of what was taken from the outbox
        self._writer = trio.lowlevel.ParkingLot()  # the writing task, when all is written
        self._has_written = trio.lowlevel.ParkingLot()  # tasks that wait until something is
        self._written = self._outbox.taken  # the frames that were written to the end
        self._received, self._incoming = trio.open_memory_channel[Frame](policy.queue_frames)
        self._queue_bytes = policy.most_queued_bytes
        self._received_bytes = self._received_frames = 0
        self._arriving_bytes = 0
        self._waiting_bytes = 0  # of frames that do not fit the outbox yet
        self._space = trio.lowlevel.ParkingLot()  # in the outbox
        self._ended = trio.Event()
        self._closed = trio.Event()
        self._end_error: PeerError | None = None
        self._heard_s = self.asked_s = trio.current_time()
        """`asked_s` is when a frame has come that is no heartbeat."""
        self._wrote_since_heartbeat = False
        self._write_scope = trio.CancelScope(shield=True)
        self._write_until_s = math.inf  # the end of the farewell, once the link ends

    @property
    def scope(self) -> Scope:
        return self._memory.scope

    @property
    def version(self) -> int | None:
        return self._stream.version

    async def wait_version(self) -> int:
        await self._stream.settled.wait()
        if (version := self._stream.version) is None or self.has_ended:
            raise self._end_reason()
        return version

    async def wait_direct(self) -> None:
        await self._owner.wait_direct()

    @property
    def is_full(self) -> bool:
        waiting_bytes = self._outbox.size_bytes  # most often none
        return waiting_bytes > self._queue_bytes or (
            waiting_bytes > 0 and len(self._outbox) >= self._policy.queue_frames
        )

    async def send(self, frame: Frame) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        size_bytes = frame.size_bytes
        if not self.has_ended and not self._charge(size_bytes):
            await self._wait_for_memory(size_bytes)
        if self.is_full:
            await self._wait_for_space(size_bytes)
        if self.has_ended:
            raise self._end_reason()
        self._put(frame, size_bytes)
        await self._stream.let_others_run(size_bytes)

    async def wait_written(self) -> None:
        small, large = self._outbox.added
        while not (self.has_ended or self._writer or (self._written[0] >= small and self._written[1] >= large)):
            await self._has_written.park()
        await trio.lowlevel.checkpoint_if_cancelled()
        if self.has_ended:
            raise self._end_reason()

    async def receive(self) -> Frame:
        try:
            frame = await self._incoming.receive()
        except (trio.ClosedResourceError, trio.EndOfChannel):
            raise self._end_reason() from None
        self._received_bytes -= frame.size_bytes
        self._received_frames -= 1
        self._give_back()
        return frame

    async def end(self, reason: str) -> None:
        self._fail(PeerUnreachable(f"link closed: {reason}"))
        await trio.lowlevel.checkpoint()

    def say_full(self) -> None:
        """Tell the peer, if it has opened the link, that others need its place. It hears that now, or never."""
        connection = self.scope.of_kind(Kind.CONNECTION)
        is_theirs = connection is not None and connection.worth is not Worth.OURS
        if is_theirs and self._writer and not self._unwritten and not self.has_ended:
            self._write_at_once(farewell_of_full())

    @property
    def has_ended(self) -> bool:
        return self._end_error is not None

    async def wait_closed(self) -> None:
        """Until the connection is gone too, if `run` has begun."""
        await self._closed.wait()

    async def run(self) -> None:
        """Move frames until the link ends, from whatever side or cause; then close the stream and its connection."""
        self._heard_s = trio.current_time()
        if self.version is not None:  # the other side waits to hear that we speak it
            self._beat()
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._read)
                nursery.start_soon(self._write)
                nursery.start_soon(self._keep_alive)
                nursery.start_soon(self._notice_silence)
                try:
                    await self._ended.wait()
                finally:  # also if the whole node ends: the other side may read nothing
                    self._write_until_s = trio.current_time() + self._policy.farewell_s
                    self._write_scope.deadline = min(self._write_scope.deadline, self._write_until_s)
                nursery.cancel_scope.cancel()
        finally:
            self._fail(PeerUnreachable("link closed"))
            self._decoder, self._outbox = FrameDecoder(self._policy), Outbox(self._policy)  # their memory is others'
            try:
                await self._owner.drop()
            finally:
                self._closed.set()

    def _fail(self, error: PeerError) -> None:
        """The first cause wins: what follows from it would only hide it."""
        if self._end_error is not None:
            return
        self._end_error = error.blame(self.peer)
        self._ended.set()
        self._stream.settled.set()
        self._received.close()
        self._space.unpark_all()
        self._has_written.unpark_all()
        log.debug("link to %s ends: %s", self.peer, error.message)

    def _end_reason(self) -> PeerError:
        if self._end_error is None:  # closed from outside, before `run` began
            return PeerUnreachable("link closed", peer=self.peer)
        return self._end_error.again()

    async def _read(self) -> None:
        decoder, left = self._decoder, FRAMES_AT_ONCE
        try:
            while True:
                chunk = await self._stream.read(READ_BYTES)
                if not self._charge(len(chunk)):
                    await self._pause(self._wait_for_memory(len(chunk)))
                    if self.has_ended:
                        return
                self._heard_s = now_s = trio.current_time()
                for frame in decoder.feed(chunk):
                    if frame.type is FrameType.HEARTBEAT:
                        self._hear_beat(frame, now_s)
                    else:
                        self.asked_s = now_s
                        await self._deliver(await self._take(frame))
                    left -= 1
                    if not left:
                        await trio.lowlevel.checkpoint()
                        left = FRAMES_AT_ONCE
                self._give_back()
                self._arrivals.note(len(chunk), now_s, inside=not decoder.at_boundary())
                if self._arrivals.has_news:
                    self._beat()
        except RemoteProtocolError as error:
            self._fail(error)
        except trio.ClosedResourceError:
            assert self.has_ended, "only then nobody takes frames any more"
        except MuxedStreamEOF:
            self._fail(PeerUnreachable("closed the stream"))
        except MuxedStreamError as error:
            self._fail(_lost(error))

    def _hear_beat(self, beat: Frame, now_s: float) -> None:
        if not self._heartbeats.take(self._sent_bytes, now_s):
            raise RemoteProtocolError("sends heartbeats without end")
        if bytes_per_s := 1000.0 * beat.start:
            self._packer.take_rate(bytes_per_s)
            if self._sent_bytes - self._sent_before_rate >= self._policy.packing.rate_bytes:
                self._sent_before_rate = self._sent_bytes
                self._owner.send_rates.note(self.peer, RELAYED if self.relayed else self.group, bytes_per_s, now_s)
            self._outbox.piece_bytes = part_bytes(bytes_per_s, self._policy.piece_bytes)

    async def _take(self, frame: Frame) -> Frame:
        crossing_bytes = len(frame.payload)
        if frame.packed:
            frame = await self._unpack(frame)
        if frame.session != NO_SESSION:
            self._owner.traffic.note_received(crossing_bytes, len(frame.payload))
        return frame

    async def _unpack(self, frame: Frame) -> Frame:
        self._arriving_bytes = self._packer.most_unpacked_bytes(frame)
        try:
            if not self._charge(len(frame.payload)):
                await self._pause(self._wait_for_memory(len(frame.payload)))
            return await self._packer.unpack(frame)
        finally:
            self._arriving_bytes = 0

    async def _deliver(self, frame: Frame) -> None:
        if not self._takes_more():  # their reader may wait for memory
            self._arriving_bytes = frame.size_bytes
            why = "what came was not taken in time"
            await self._pause(self._wait(self._takes_more, self._policy.write_timeout_s, why))
            self._arriving_bytes = 0
        self._received.send_nowait(frame)
        self._received_bytes += frame.size_bytes
        self._received_frames += 1

    def _takes_more(self) -> bool:
        return self._received_bytes <= self._queue_bytes and self._received_frames < self._policy.queue_frames

    def _charge(self, more_bytes: int = 0, *, has_waited: bool = False) -> bool:
        """Reserve what the link holds, and `more_bytes`. False if there is no memory for that."""
        held_bytes = self._decoder.held_bytes + self._received_bytes + self._arriving_bytes
        held_bytes += self._outbox.size_bytes + self._waiting_bytes + self._stream.kept_bytes + more_bytes
        amount = self._memory.amount
        if held_bytes <= CHARGE_BYTES // 4:
            return not amount or self._memory.resize(0)
        if amount - 2 * CHARGE_BYTES < held_bytes <= amount:
            return True
        return self._memory.resize(-(-held_bytes // CHARGE_BYTES) * CHARGE_BYTES, has_waited=has_waited)

    def _give_back(self) -> None:
        """The link holds less than before: the memory for that is free."""
        if self._memory.amount:
            self._charge()

    async def _wait_for_space(self, more_bytes: int) -> None:
        """In the outbox. A frame that waits for it is in our memory already."""
        self._waiting_bytes += more_bytes
        try:
            while not self.has_ended and self.is_full:
                await self._space.park()
        finally:
            self._waiting_bytes -= more_bytes

    async def _wait_for_memory(self, more_bytes: int) -> None:
        """The link ends if others do not give memory back in time, of several that wait for it one after the other."""
        patience_s = self._policy.memory_patience_s * random.uniform(0.5, 1)
        why = "no memory is left for what goes over this link"

        def take_at_last() -> bool:
            if not (has_memory := self._charge(more_bytes, has_waited=True)):
                self.say_full()
            return has_memory

        await self._wait(lambda: self._charge(more_bytes), patience_s, why, take_at_last)

    async def _wait(
        self, is_ready: Callable[[], bool], patience_s: float, why: str, at_last: Callable[[], bool] = lambda: False
    ) -> None:
        """The link ends for want of patience, unless `at_last` helps."""
        with trio.move_on_after(patience_s):
            while not self.has_ended and not is_ready():
                await trio.sleep(LOOK_EVERY_S)
                self._heard_s = trio.current_time()  # meanwhile we may not read, and hear nothing
            return
        if not at_last():
            self._fail(PeerUnreachable(why))

    async def _pause(self, waiting: Awaitable[None]) -> None:
        """Read nothing until `waiting` is over."""
        self._paces.pause(trio.current_time())
        await waiting
        self._paces.resume(trio.current_time())

    def _note_pace(self, now_s: float) -> None:
        """Frames that have begun must go on: those that arrive, and those that the other side is to read."""
        leaving = (self._times_written if self._outbox else None), self._written_bytes
        if self._paces.are_too_slow(self._decoder.partial, leaving, now_s):
            self._fail(PeerUnreachable("takes too long over a frame: it must keep a pace, not hold memory"))

    def _put(self, frame: Frame, size_bytes: int) -> None:
        if self._writer and size_bytes <= self._at_once_bytes:
            self._write_at_once(frame)
            if not self._unwritten:
                return
        else:
            self._outbox.add(frame)
        self._writer.unpark()

    def _write_at_once(self, frame: Frame) -> None:
        """Nothing waits before it: give it to the stream, as far as that takes it."""
        data = self._outbox.encode_small(self._counted(frame, self._packer.pack_at_once(frame)))
        self._unwritten = memoryview(data)[self._stream.write_at_once(data) :]
        self._sent_bytes += len(data)
        self._wrote_since_heartbeat = True

    async def _write(self) -> None:
        while not self.has_ended:
            while not self._unwritten and (frame := self._outbox.next_to_prepare) is not None:
                self._outbox.prepare(frame, self._counted(frame, await self._packer.pack(frame)))
            data = self._unwritten or self._outbox.take()
            if data is None:
                self._written_bytes = 0
                self._times_written += 1
                self._has_written.unpark_all()
                await self._writer.park()
            elif not await self._write_some(data):
                return
            else:
                self._written_bytes += len(data)
                self._sent_bytes += len(data)
                if self._written != self._outbox.taken:
                    self._written = self._outbox.taken
                    self._has_written.unpark_all()
                self._give_back()
                if not self.is_full:
                    self._space.unpark_all()

    async def _write_some(self, data: Buffer) -> bool:
        self._wrote_since_heartbeat = True
        self._unwritten = memoryview(b"")
        until_s = min(self._write_until_s, trio.current_time() + self._policy.write_timeout_s)
        self._write_scope = trio.CancelScope(shield=True, deadline=until_s)
        try:
            with self._write_scope:
                await self._stream.write(data)
        except MuxedStreamError as error:
            self._fail(_lost(error))
            return False
        if self._write_scope.cancelled_caught:
            self._fail(PeerUnreachable(f"took no data for {self._policy.write_timeout_s:g} s"))
            return False
        return True

    def _counted(self, frame: Frame, crossing: Frame) -> Frame:
        """`crossing` is how `frame` crosses the link."""
        if frame.session != NO_SESSION:
            self._owner.traffic.note_sent(len(crossing.payload), len(frame.payload))
        return crossing

    def _beat(self) -> None:
        """Say that we live, and how fast the link is."""
        beat = Frame(FrameType.HEARTBEAT, start=self._arrivals.tell_kilobytes_per_s())
        self._put(beat, beat.size_bytes)

    async def _keep_alive(self) -> None:
        while True:
            self._wrote_since_heartbeat = False
            await trio.sleep(self._policy.heartbeat_s)
            self._note_pace(trio.current_time())
            if not self._wrote_since_heartbeat:
                self._beat()

    async def _notice_silence(self) -> None:
        """Only time in which we could have listened counts: however long this machine was busy or suspended, what
        arrived meanwhile is read before the next part of our patience ends.
        """
        parts = 0
        while parts < SILENCE_PARTS:
            heard_s = self._heard_s
            await trio.sleep(self._policy.silence_s / (SILENCE_PARTS + 1))
            parts = parts + 1 if heard_s == self._heard_s else 0
        self._fail(PeerUnreachable(f"silent for {self._policy.silence_s:g} s"))


def _lost(error: MuxedStreamError) -> PeerUnreachable:
    if isinstance(error, ProtocolRefused):
        return PeerUnreachable("refuses a link: it has too many, or is no node of llmnode, or of another version of it")
    return PeerUnreachable(f"connection lost ({type(error).__name__})")
