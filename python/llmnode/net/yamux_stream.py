"""A stream of our yamux, as py-libp2p asks for it. Its connection is in `yamux.py`, its protocol in Rust.

A task that reads or writes moves bytes out of or into the protocol machine and waits, if at all, for a queue.
Cancelling that wait, at any moment, leaves the connection and its other streams whole.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.stream_muxer.exceptions import MuxedStreamClosed, MuxedStreamEOF, MuxedStreamError, MuxedStreamReset

from llmnode.core.links.write_size import SMALL_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.core.budget import Scope
    from llmnode.net.window import Window
    from llmnode.net.yamux_sender import Sender
    from llmnode.wire.frame import Buffer

UNREAD_BYTES_MAX = 1 << 30
"""More than any window: a read without a limit."""

LINGER_S = 60.0
"""How long the other side may keep a stream open that we have closed and do not read."""


class ProtocolRefused(MuxedStreamError):
    """The other side has no such protocol, or takes no more such streams."""


@dataclass(frozen=True, slots=True)
class StreamOwner:
    """The part of a stream's connection that the stream calls."""

    linger: Callable[[YamuxStream], None]
    """We have closed the stream; the other side has not, perhaps never will."""
    forget: Callable[[YamuxStream], None]
    """The stream is over."""


class YamuxStream(IMuxedStream):
    """One stream. Made by its connection."""

    def __init__(self, connection: IMuxedConn, number: int, sender: Sender, window: Window, owner: StreamOwner) -> None:
        self.muxed_conn = connection
        self.number = number
        self.readers = trio.lowlevel.ParkingLot()
        self.writers = trio.lowlevel.ParkingLot()
        self._sender = sender
        self._machine = sender.machine
        self._owner = owner
        self._closed = False
        self._reset = False
        self._read_at_s = 0.0
        self._writes = 0
        self._expected = b""
        self._protocol = ""
        self._window = window
        self._is_over = False
        self._scopes: list[Scope] = []
        self._until_over: trio.CancelScope | None = None

    def expect(self, answer: bytes, protocol: str) -> None:
        """`answer` is read first and taken away: with it the other side agrees to `protocol`."""
        self._expected, self._protocol = answer, protocol

    async def __aenter__(self) -> YamuxStream:
        return self

    async def read(self, n: int | None = None) -> bytes:
        """The bytes that have arrived, at most `n`.

        Raises MuxedStreamEOF at the end, MuxedStreamReset if the stream or the connection ended without one,
        ProtocolRefused if the expected bytes do not come.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if n == 0:
            return b""
        bytes_max = UNREAD_BYTES_MAX if n is None or n < 0 else n
        sender, window = self._sender, self._window
        while not self._reset:
            self._read_at_s = trio.current_time()
            may_read = min(bytes_max, window.may_read)
            data = self._machine.read(self.number, may_read, self._read_at_s, window.size_bytes)
            if data:
                window.note_read(len(data))
                sender.flush()
                await sender.let_others_run(len(data))
                if self._expected and not (data := self._past_expected(data)):
                    continue
                return data
            if data is not None:
                self.forget_if_over()
                raise MuxedStreamEOF("the other side has closed the stream")
            if sender.has_ended:
                break
            await self.readers.park()
            sender.has_waited()
        raise self._end_error()

    async def write(self, data: Buffer) -> None:
        """Returns when the kernel has everything. If it is cancelled, the beginning of `data` may have been sent.

        Raises MuxedStreamReset if the stream or the connection has ended, MuxedStreamClosed if we have closed it, and
        ProtocolRefused as `read`.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        sender, rest = self._sender, memoryview(data)
        while rest:
            if self._reset:  # another stream may have this number by now
                raise self._end_error()
            if sender.is_congested and len(data) > SMALL_BYTES:
                await self._wait(sender.drained)
                continue
            taken = self._give(rest[: sender.part_bytes], len(data))
            if taken is None:
                self._check_alive()
                raise MuxedStreamClosed("the stream was closed")
            sender.flush()
            rest = rest[taken:]
            if rest and not taken:
                await self._wait(sender.drained if sender.is_congested else self.writers)
        self._check_alive()
        if sender.is_congested:
            await self._wait(sender.drained)
        await sender.let_others_run(len(data))

    def write_at_once(self, data: bytes) -> int:
        """Like `write`, but only as much as the socket is likely to take now. Returns how much; 0 also at the end."""
        sender = self._sender
        if self.is_closed or sender.is_congested:
            return 0
        taken = self._give(data, len(data))
        sender.flush()
        return taken or 0

    async def let_others_run(self, moved_bytes: int) -> None:
        """Call it now and then after `write_at_once`."""
        await self._sender.let_others_run(moved_bytes)

    async def close(self) -> None:
        """Send no more. The bytes that the other side sends can still be read."""
        await trio.lowlevel.checkpoint()
        if not self._closed and not self._reset:
            self._closed = True
            self._machine.close_stream(self.number)
            self._sender.flush()
            self._owner.linger(self)
            self.forget_if_over()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self.give_up()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("put a deadline around the call: cancelling it is safe")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._sender.get_remote_address()

    def close_when_over(self, scope: Scope) -> None:
        """`scope` has what is reserved for the stream. It is closed when neither side may send any more."""
        self._scopes.append(scope)
        if self._is_over:
            self._end()

    @contextmanager
    def until_over(self) -> Iterator[None]:
        """The context is cancelled when the stream is over: its peer may reset it, and open more. One at a time."""
        with trio.CancelScope() as scope:
            self._until_over = scope
            if self._is_over:
                scope.cancel()
            yield
        self._until_over = None

    # The interface for its connection

    @property
    def is_over(self) -> bool:
        """Neither side may send any more."""
        return self._is_over

    @property
    def is_closed(self) -> bool:
        return self._closed or self._reset

    @property
    def is_read_from(self) -> bool:
        return bool(self.readers) or trio.current_time() - self._read_at_s < LINGER_S

    def give_up(self) -> None:
        """Both directions, now, and say so."""
        if not self._is_over:  # as in `write`
            self._machine.reset_stream(self.number)
            self._sender.flush()
        self.end_by_reset()

    def end_by_reset(self) -> None:
        self._reset = True
        self._end()
        self.wake()

    def forget_if_over(self) -> None:
        if self._closed and not self._machine.has_stream(self.number):
            self._end()

    def _end(self) -> None:
        self._is_over = True
        self._window.close()
        for scope in self._scopes:
            scope.close()
        if self._until_over is not None:
            self._until_over.cancel()
        self._owner.forget(self)

    def wake(self) -> None:
        self.readers.unpark_all()
        self.writers.unpark_all()

    def _give(self, part: Buffer, size_bytes: int) -> int | None:
        """Give the machine a part of a large write. Returns how many bytes it took, None if we have closed."""
        gently = self._sender.note_write(size_bytes, self._writes)
        self._writes += 1
        return self._machine.write(self.number, part, gently=gently)

    def _past_expected(self, data: bytes) -> bytes:
        expected, rest = self._expected[: len(data)], data[len(self._expected) :]
        if not data.startswith(expected):
            self.give_up()
            raise self._end_error()
        self._expected = self._expected[len(data) :]
        return rest

    async def _wait(self, for_what: trio.lowlevel.ParkingLot) -> None:
        self._check_alive()
        await for_what.park()
        self._sender.has_waited()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._reset or self._sender.has_ended:
            raise self._end_error()

    def _end_error(self) -> MuxedStreamError:
        if not self._reset:
            return MuxedStreamReset("the connection is closed")
        if self._expected:  # it may have said so, but its last bytes do not survive a reset
            return ProtocolRefused(f"the other side does not speak {self._protocol}")
        return MuxedStreamReset("the stream was reset")
