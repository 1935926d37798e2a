"""The sending half of a connection: what its streams have written goes to the socket, encrypted.

While the socket takes bytes, they go to it at once and no task is switched. Else one task, `run`, waits for the socket.
Knows no streams: tasks that write wait, if at all, until the socket has `drained`.
"""

from __future__ import annotations

import contextlib
import os
import socket
from typing import TYPE_CHECKING

import trio
from libp2p.io.exceptions import IOException

from llmnode.core.links.write_size import Amid, DrainRate, part_bytes
from llmnode.net.sockets import remote_address, socket_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from libp2p.abc import IRawConnection

    from llmnode._native import Connection

YIELD_AFTER_BYTES = 1 << 18
"""After this many bytes of a connection, the task that moves them lets the others run."""

CALL_BYTES = 512
"""A call counts for at least this many bytes, even if it moves next to nothing."""

UNSENT_BYTES = 1 << 17
"""The kernel may hold this much that it cannot send yet: a small message waits behind it. By default it would hold
megabytes. On a slow connection it is less (`core/links/write_size.py`)."""

PART_BYTES = 1 << 18
"""A stream hands over at most this much at once to be encrypted, and less on a slow connection: nothing passes it from
then on."""


class Sender:
    """Sends what is in the protocol machine. `on_drained` is called when the socket has taken everything, `on_broken`
    when it takes nothing any more.
    """

    def __init__(
        self, raw: IRawConnection, machine: Connection, on_drained: Callable[[], None], on_broken: Callable[[], None]
    ) -> None:
        self.machine = machine
        self.has_ended = False
        self.drained = trio.lowlevel.ParkingLot()  # tasks that wait until the socket has taken all that is to be sent
        self._raw = raw
        self._socket = socket_of(raw)  # written to directly: that saves two task switches a message
        self._on_drained = on_drained
        self._on_broken = on_broken
        self._drain = DrainRate()
        self._unsent_bytes = UNSENT_BYTES  # as the kernel was told
        self._unsent = memoryview(b"")  # encrypted; while there is any, only the sending task writes to the socket
        self._to_send = trio.lowlevel.ParkingLot()  # the sending task
        self._moved_bytes = 0
        self._amid = Amid()

    def get_remote_address(self) -> tuple[str, int] | None:
        return remote_address(self._raw)

    @property
    def is_congested(self) -> bool:
        """The socket does not take more for now: wait for `drained`."""
        return bool(self._unsent)

    @property
    def part_bytes(self) -> int:
        """The most that a stream may write at once."""
        return part_bytes(self._drain.bytes_per_s, PART_BYTES)

    def note_write(self, size_bytes: int, writes: int) -> bool:
        """A stream writes a part of `size_bytes` after `writes` earlier writes. Whether gently: see `Amid`."""
        return self._amid.counts(size_bytes) and self._amid.note(size_bytes, writes, trio.current_time())

    def flush(self) -> None:
        """Send the bytes that the socket takes now; the sending task does the rest. It never waits."""
        if self._unsent or self.has_ended:
            return
        if output := self.machine.seal_output():
            self._unsent = memoryview(output)
            if self._socket is not None:
                self._send_now(self._socket)
            if self._unsent:
                self._to_send.unpark()

    def flush_soon(self) -> None:
        """The sending task runs in a moment: bytes that are written until then go along."""
        self._to_send.unpark()

    async def let_others_run(self, moved_bytes: int) -> None:
        """Call this after moving `moved_bytes` without having waited. It seldom waits: switching tasks costs more than
        a small message.

        It cannot be cancelled, or bytes that were taken would be lost.
        """
        self._moved_bytes += moved_bytes + CALL_BYTES
        if self._moved_bytes > YIELD_AFTER_BYTES:
            self._moved_bytes = 0
            await trio.lowlevel.cancel_shielded_checkpoint()

    def has_waited(self) -> None:
        self._moved_bytes = 0

    async def run(self) -> None:
        """Send until the connection ends or the socket breaks."""
        with contextlib.suppress(trio.ClosedResourceError, OSError, IOException):
            while not self.has_ended:
                if not self._unsent:
                    self.flush()
                if not self._unsent:
                    self.drained.unpark_all()
                    self._on_drained()
                    await self._to_send.park()
                elif self._socket is None:
                    await self._raw.write(bytes(self._unsent))
                    self._drain.note(len(self._unsent), trio.current_time(), is_full=True)
                    self._unsent = memoryview(b"")
                else:
                    await trio.lowlevel.wait_writable(self._socket)
                    self._send_now(self._socket)
        self._on_broken()

    def end(self) -> None:
        """From here on nothing is sent."""
        self.has_ended = True
        self._unsent = memoryview(b"")  # or the sending task would wait for a socket that is closed
        self.drained.unpark_all()
        self._to_send.unpark_all()

    def _send_now(self, sock: trio.socket.SocketType) -> None:
        taken = 0
        try:
            taken = os.write(sock.fileno(), self._unsent)
        except BlockingIOError:
            pass
        except OSError:
            return self._on_broken()
        self._unsent = self._unsent[taken:]
        if self._unsent or self._drain.is_counting:
            self._drain.note(taken, trio.current_time(), is_full=bool(self._unsent))
            unsent_bytes = part_bytes(self._drain.bytes_per_s, UNSENT_BYTES)
            if unsent_bytes != self._unsent_bytes:
                self._unsent_bytes = unsent_bytes
                limit_unsent(sock, unsent_bytes)
        return None


def limit_unsent(sock: trio.socket.SocketType, size_bytes: int) -> None:
    """Have the kernel hold at most `size_bytes` that it cannot send yet."""
    if hasattr(socket, "TCP_NOTSENT_LOWAT"):
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, size_bytes)
