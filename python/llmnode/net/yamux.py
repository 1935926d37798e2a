"""yamux (`/yamux/1.0.0`) for py-libp2p, with the protocol in Rust and fused with the Noise session below it.

Only a connection's own two tasks wait for the socket. A task that reads, writes or opens a stream moves bytes into or
out of the protocol machine and waits, if at all, for a queue. Cancelling that wait, at any moment, leaves the
connection and its other streams whole. While the socket takes them, bytes to be sent go to it at once and no task is
switched.

Knows neither links nor heartbeats: whether a silent peer is dead is for `link.py` to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING

import trio
from libp2p.abc import IMuxedConn
from libp2p.io.exceptions import IOException
from libp2p.stream_muxer.exceptions import MuxedConnUnavailable

from llmnode._native import Connection
from llmnode.core.budget import Kind, Scope
from llmnode.net.secure import YAMUX, NoiseConnection
from llmnode.net.sockets import local_address, socket_of
from llmnode.net.window import Window
from llmnode.net.yamux_sender import UNSENT_BYTES, Sender, limit_unsent
from llmnode.net.yamux_stream import LINGER_S, StreamOwner, YamuxStream

if TYPE_CHECKING:
    from collections.abc import Callable

    from libp2p.abc import ISecureConn
    from libp2p.connection_types import ConnectionType
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

log = logging.getLogger(__name__)

READ_BYTES = 1 << 18
"""One read takes the bytes that the kernel has, up to this number."""

UNACKNOWLEDGED_S = 30
"""How long the kernel resends to a host that is gone before the connection breaks."""


class YamuxConnection(IMuxedConn):
    """A connection with streams. `start` must be running for as long as it is used; when it ends, so do they."""

    def __init__(
        self,
        conn: ISecureConn,
        peer_id: ID,
        scope: Scope | None = None,
        note_untaken: Callable[[YamuxConnection], None] = lambda _: None,
    ) -> None:
        """`scope` has the reservations of the connection, and is closed with it.

        `note_untaken` is told of each stream that its peer opens, and resets before it was accepted.
        """
        assert isinstance(conn, NoiseConnection), "this muxer takes over the session of secure.py"
        self.scope = scope or Scope(None, Kind.CONNECTION, "unlimited", {})
        self.scope.on_evict = self._make_way
        self._note_untaken = note_untaken
        self.farewells: dict[object, Callable[[], None]] = {}
        """Each says something before the connection ends since others need its place. It is called at most once."""
        self.used_s = trio.current_time()
        """When it was last used for anything but links, for a connection that holds nothing does not stay."""
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_ended = trio.Event()
        self.secured_conn = conn
        self.negotiated_security_protocol = "/noise"
        self.negotiated_muxer_protocol = YAMUX
        self.machine = Connection(conn.session, initiator=conn.is_initiator)
        self.sender = Sender(conn.raw, self.machine, on_drained=self._wake_openers, on_broken=self.end)
        self._socket = socket_of(conn.raw)  # read from directly: that saves two task switches a message
        self._streams: dict[int, YamuxStream] = {}
        self._opened: dict[int, YamuxStream] = {}  # by the other side, and not accepted yet
        self._acceptors = trio.lowlevel.ParkingLot()
        self._openers = trio.lowlevel.ParkingLot()
        self._lingering: dict[YamuxStream, float] = {}  # until when; the oldest first
        self._owner = StreamOwner(self._linger, self._forget)
        self._heard_s = trio.current_time()

    # The interface of py-libp2p's connections

    @property
    def is_initiator(self) -> bool:
        return self.secured_conn.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self.has_ended

    @property
    def is_closed(self) -> bool:
        return self.has_ended

    async def start(self) -> None:
        """Move bytes until the connection ends, from whatever side or cause."""
        _set_options(self._socket)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.sender.run)
                self.event_started.set()
                await self._receive()
                nursery.cancel_scope.cancel()
        finally:
            self.event_started.set()
            await self.close()

    async def open_stream(self) -> YamuxStream:
        """Wait until there are fewer streams than the limit. Raises MuxedConnUnavailable if the connection ends."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while True:
            try:
                number = None if self.has_ended else self.machine.open_stream()
            except EOFError as error:
                raise MuxedConnUnavailable(str(error)) from error
            if number is not None:
                self.sender.flush_soon()
                return self._new_stream(number)
            if self.has_ended:
                raise MuxedConnUnavailable("the connection is closed")
            await self._openers.park()

    async def accept_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        while not self._opened:
            if self.has_ended:
                raise MuxedConnUnavailable("the connection is closed")
            await self._acceptors.park()
        return self._opened.pop(next(iter(self._opened)))

    async def close(self) -> None:
        """End all streams and close the socket. Waits for no peer."""
        if not self.has_ended:
            self.machine.go_away()
            self.sender.flush()
            self.end()
        with trio.CancelScope(shield=True):
            await self.secured_conn.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    def get_local_address(self) -> tuple[str, int] | None:
        """The IP address and port of our end; None if it is no socket, or not any more."""
        return local_address(self.secured_conn.raw)

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    # The interface for the rest of `net`

    @property
    def has_ended(self) -> bool:
        return self.sender.has_ended

    def is_silent(self, silence_s: float) -> bool:
        """Whether nothing has come for `silence_s`."""
        return trio.current_time() >= self._heard_s + silence_s

    # Reading

    async def _receive(self) -> None:
        machine, buffer = self.machine, _read_buffer()
        with contextlib.suppress(trio.ClosedResourceError, OSError, IOException):
            self._tell(machine.receive_plaintext(self.secured_conn.take_unread(), trio.current_time()))
            self.sender.flush()
            while not self.has_ended:
                data = await self._read_raw(buffer)
                if not data:
                    return
                self._reset_lingering()
                self._heard_s = trio.current_time()
                try:
                    events = machine.receive(data, self._heard_s)
                except ValueError as error:
                    log.info("connection to %s ends: %s", self.peer_id, error)
                    return
                self._tell(events)
                self.sender.flush()

    async def _read_raw(self, buffer: memoryview) -> memoryview | bytes:
        if self._socket is None:
            return await self.secured_conn.raw.read(READ_BYTES)
        while True:
            await trio.lowlevel.wait_readable(self._socket)  # trio's own methods try first, most often in vain
            with contextlib.suppress(BlockingIOError):
                return buffer[: os.readv(self._socket.fileno(), [buffer])]

    def _tell(self, events: tuple[list[int], list[int], list[int], list[int]]) -> None:
        opened, readable, writable, reset = events
        for number in reset:
            if stream := self._streams.get(number):
                if number in self._opened:
                    self._note_untaken(self)
                stream.end_by_reset()
        for number in opened:
            # One read may bring 20,000 that are reset already, and a number may come again: the machine knows.
            if number in self._streams or not self.machine.has_stream(number):
                self._note_untaken(self)
                if self.has_ended:
                    return
                continue
            self._opened[number] = self._new_stream(number)
            self._acceptors.unpark()
        for number in readable:
            if stream := self._streams.get(number):
                stream.readers.unpark_all()
                if stream.is_closed:
                    stream.forget_if_over()
        for number in writable:
            if stream := self._streams.get(number):
                stream.writers.unpark_all()

    # Its streams

    def _new_stream(self, number: int) -> YamuxStream:
        stream = YamuxStream(self, number, self.sender, Window(self.scope), self._owner)
        self._streams[number] = stream
        return stream

    def _linger(self, stream: YamuxStream) -> None:
        self._lingering[stream] = trio.current_time() + LINGER_S

    def _forget(self, stream: YamuxStream) -> None:
        self._streams.pop(stream.number, None)
        self._opened.pop(stream.number, None)
        self._lingering.pop(stream, None)
        self._openers.unpark()

    def _reset_lingering(self) -> None:
        while self._lingering:
            stream, until = next(iter(self._lingering.items()))
            if until > trio.current_time():
                return
            del self._lingering[stream]
            if stream.is_read_from:
                self._linger(stream)
            else:
                stream.give_up()

    def _wake_openers(self) -> None:
        self._openers.unpark_all()

    # The end

    def _make_way(self) -> None:
        for say_farewell in list(self.farewells.values()):
            say_farewell()
        self.end()

    def end(self) -> None:
        """From here on nothing is sent or received. Bytes that were received can still be read."""
        if self.has_ended:
            return
        self.sender.end()
        self.scope.close()
        self.event_ended.set()
        if self._socket is not None:
            self._socket.close()
        for stream in self._streams.values():
            stream.wake()
        for waiting in (self._acceptors, self._openers):
            waiting.unpark_all()


_BUFFER: trio.lowlevel.RunVar[memoryview] = trio.lowlevel.RunVar("_BUFFER")


def _read_buffer() -> memoryview:
    """All connections of an event loop read into one buffer: each gives its bytes on before others run."""
    try:
        return _BUFFER.get()
    except LookupError:
        buffer = memoryview(bytearray(READ_BYTES))
        _BUFFER.set(buffer)
        return buffer


def _set_options(sock: trio.socket.SocketType | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # others may be dialled from its port, too
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, bytes(8))  # see `punch.ABORT`
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
            limit_unsent(sock, UNSENT_BYTES)
