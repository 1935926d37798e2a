"""yamux (`/yamux/1.0.0`) for py-libp2p, with the protocol in Rust and fused with the Noise session below it.

Only a connection's own two tasks wait for the socket. Who reads, writes or opens a stream moves bytes into or out of
the protocol machine and waits, if at all, for a queue: cancelling that wait, at any moment, leaves the connection and
its other streams whole. While the socket takes them, bytes to be sent go to it at once and no task is switched.

Knows neither links nor heartbeats: whether a silent peer is dead is for `link.py` to say.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from typing import TYPE_CHECKING, cast

import trio
from libp2p.abc import IMuxedConn, IMuxedStream
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.stream_muxer.exceptions import (
    MuxedConnUnavailable,
    MuxedStreamClosed,
    MuxedStreamEOF,
    MuxedStreamReset,
)
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream

from llmnode._native import Connection
from llmnode.net.secure import NoiseConnection

if TYPE_CHECKING:
    from libp2p.abc import IHost, IRawConnection, ISecureConn
    from libp2p.connection_types import ConnectionType
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

log = logging.getLogger(__name__)

PROTOCOL = TProtocol("/yamux/1.0.0")

READ_BYTES = 1 << 18
"""One read takes what the kernel has, up to this."""

UNREAD_BYTES_MAX = 1 << 30
"""More than any window: a read without a limit."""

YIELD_AFTER_BYTES = 1 << 18
"""What may pass through a connection before the task that moves it lets the others run."""

CALL_BYTES = 512
"""What a call counts for that moves next to nothing."""

UNACKNOWLEDGED_S = 30
"""How long the kernel resends to a host that is gone before the connection breaks."""

LINGER_S = 60.0
"""How long the other side may keep a stream open that we have closed and do not read."""


def use_yamux(host: IHost) -> None:
    """Have all connections of `host` use this muxer. To be called before it runs."""
    # `MuxerMultistream` makes a `Yamux` of its own for this protocol, whatever class the muxer options name.
    cast("Swarm", host.get_network()).upgrader.muxer_multistream = _OurMuxer({PROTOCOL: YamuxConnection})


class _OurMuxer(MuxerMultistream):
    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        muxer = await self.select_transport(conn)
        return muxer(conn, peer_id)


class YamuxConnection(IMuxedConn):
    """A connection with streams. `start` must be running for as long as it is used; when it ends, so do they."""

    def __init__(self, conn: ISecureConn, peer_id: ID) -> None:
        assert isinstance(conn, NoiseConnection), "this muxer takes over the session of secure.py"
        self.peer_id = peer_id
        self.event_started = trio.Event()
        self.event_ended = trio.Event()
        self.secured_conn = conn
        self.negotiated_security_protocol = "/noise"
        self.negotiated_muxer_protocol = PROTOCOL
        self.machine = Connection(conn.session, initiator=conn.is_initiator)
        self.drained = trio.lowlevel.ParkingLot()  # who waits until the socket has taken what waits to be sent
        self._socket = _socket(conn.raw)
        self._unsent = memoryview(b"")  # encrypted; while there is any, only the sending task writes to the socket
        self._to_send = trio.lowlevel.ParkingLot()  # the sending task
        self._streams: dict[int, YamuxStream] = {}
        self._opened: dict[int, YamuxStream] = {}  # by the other side, and not accepted yet
        self._acceptors = trio.lowlevel.ParkingLot()
        self._openers = trio.lowlevel.ParkingLot()
        self._lingering: dict[YamuxStream, float] = {}  # until when; the oldest first
        self._ended = False
        self._moved_bytes = 0

    # What py-libp2p asks of a connection

    @property
    def is_initiator(self) -> bool:
        return self.secured_conn.is_initiator

    @property
    def is_established(self) -> bool:
        return self.event_started.is_set() and not self._ended

    @property
    def is_closed(self) -> bool:
        return self._ended

    async def start(self) -> None:
        """Move bytes until the connection ends, from whatever side or cause."""
        _set_options(self._socket)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._send)
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
                number = None if self._ended else self.machine.open_stream()
            except EOFError as error:
                raise MuxedConnUnavailable(str(error)) from error
            if number is not None:
                self._to_send.unpark()  # in a moment: what is written at once travels with it
                return self._new_stream(number)
            if self._ended:
                raise MuxedConnUnavailable("the connection is closed")
            await self._openers.park()

    async def accept_stream(self) -> YamuxStream:
        await trio.lowlevel.checkpoint()
        while not self._opened:
            if self._ended:
                raise MuxedConnUnavailable("the connection is closed")
            await self._acceptors.park()
        return self._opened.pop(next(iter(self._opened)))

    async def close(self) -> None:
        """End all streams and close the socket. Waits for no peer."""
        if not self._ended:
            self.machine.go_away()
            self.flush()
            self.end()
        with trio.CancelScope(shield=True):
            await self.secured_conn.close()

    def get_remote_address(self) -> tuple[str, int] | None:
        return self.secured_conn.get_remote_address()

    def get_transport_addresses(self) -> list[Multiaddr]:
        return self.secured_conn.get_transport_addresses()

    def get_connection_type(self) -> ConnectionType:
        return self.secured_conn.get_connection_type()

    # What its streams ask of it

    @property
    def has_ended(self) -> bool:
        return self._ended

    @property
    def is_congested(self) -> bool:
        """The socket does not take more for now: wait for `drained`."""
        return bool(self._unsent)

    def flush(self) -> None:
        """Send what is to be sent, as far as the socket takes it; the sending task does the rest. Never waits."""
        if self._unsent or self._ended:
            return
        if output := self.machine.seal_output():
            self._unsent = memoryview(output)
            if self._socket is not None:
                self._send_now(self._socket)
            if self._unsent:
                self._to_send.unpark()

    async def let_others_run(self, moved_bytes: int) -> None:
        """After moving so much without having waited. Seldom does: switching tasks costs more than a small message.

        It cannot be cancelled, for what was taken would be lost.
        """
        self._moved_bytes += moved_bytes + CALL_BYTES
        if self._moved_bytes > YIELD_AFTER_BYTES:
            self._moved_bytes = 0
            await trio.lowlevel.cancel_shielded_checkpoint()

    def has_waited(self) -> None:
        self._moved_bytes = 0

    def linger(self, stream: YamuxStream) -> None:
        """We have closed `stream`; the other side has not, perhaps never will."""
        self._lingering[stream] = trio.current_time() + LINGER_S

    def forget(self, stream: YamuxStream) -> None:
        self._streams.pop(stream.number, None)
        self._opened.pop(stream.number, None)
        self._lingering.pop(stream, None)
        self._openers.unpark()

    # Its own two tasks

    async def _receive(self) -> None:
        machine, buffer = self.machine, memoryview(bytearray(READ_BYTES))
        with contextlib.suppress(trio.ClosedResourceError, OSError, IOException):
            self._tell(machine.receive_plaintext(self.secured_conn.take_unread()))
            while not self._ended:
                data = await self._read_raw(buffer)
                if not data:
                    return
                self._reset_lingering()
                try:
                    events = machine.receive(data)
                except ValueError as error:
                    log.info("connection to %s ends: %s", self.peer_id, error)
                    return
                self._tell(events)
                self.flush()

    async def _read_raw(self, buffer: memoryview) -> memoryview | bytes:
        if self._socket is None:
            return await self.secured_conn.raw.read(READ_BYTES)
        return buffer[: await self._socket.recv_into(buffer)]

    def _tell(self, events: tuple[list[int], list[int], list[int], list[int]]) -> None:
        opened, readable, writable, reset = events
        for number in opened:
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
        for number in reset:
            if stream := self._streams.get(number):
                stream.end_by_reset()

    async def _send(self) -> None:
        with contextlib.suppress(trio.ClosedResourceError, OSError, IOException):
            while not self._ended:
                if not self._unsent:
                    self.flush()
                if not self._unsent:
                    self.drained.unpark_all()
                    self._openers.unpark_all()
                    await self._to_send.park()
                elif self._socket is None:
                    await self.secured_conn.raw.write(bytes(self._unsent))
                    self._unsent = memoryview(b"")
                else:
                    await trio.lowlevel.wait_writable(self._socket)
                    self._send_now(self._socket)
        self.end()

    def _send_now(self, sock: trio.socket.SocketType) -> None:
        try:
            self._unsent = self._unsent[os.write(sock.fileno(), self._unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            self.end()

    # The end

    def end(self) -> None:
        """From here on nothing is sent or received; what has been received can still be read."""
        if self._ended:
            return
        self._ended = True
        self._unsent = memoryview(b"")  # or the sending task would wait for a socket that is closed
        self.event_ended.set()
        if self._socket is not None:
            self._socket.close()
        for stream in self._streams.values():
            stream.wake()
        for waiting in (self._acceptors, self._openers, self.drained, self._to_send):
            waiting.unpark_all()

    def _new_stream(self, number: int) -> YamuxStream:
        stream = self._streams[number] = YamuxStream(self, number)
        return stream

    def _reset_lingering(self) -> None:
        while self._lingering:
            stream, until = next(iter(self._lingering.items()))
            if until > trio.current_time():
                return
            del self._lingering[stream]
            if stream.is_read_from:
                self.linger(stream)
            else:
                stream.give_up()


class YamuxStream(IMuxedStream):
    """One stream. Made by its connection."""

    def __init__(self, connection: YamuxConnection, number: int) -> None:
        self.muxed_conn: IMuxedConn = connection
        self.number = number
        self.readers = trio.lowlevel.ParkingLot()
        self.writers = trio.lowlevel.ParkingLot()
        self._connection = connection
        self._machine = connection.machine
        self._closed = False
        self._reset = False
        self._read_at_s = 0.0

    async def __aenter__(self) -> YamuxStream:
        return self

    async def read(self, n: int | None = None) -> bytes:
        """What has arrived, up to `n` bytes.

        Raises MuxedStreamEOF at the end, MuxedStreamReset if the stream or the connection ended without one.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        if n == 0:
            return b""
        bytes_max = UNREAD_BYTES_MAX if n is None or n < 0 else n
        connection = self._connection
        while not self._reset:
            self._read_at_s = trio.current_time()
            data = self._machine.read(self.number, bytes_max, self._read_at_s)
            if data:
                connection.flush()
                await connection.let_others_run(len(data))
                return data
            if data is not None:
                self.forget_if_over()
                raise MuxedStreamEOF("the other side has closed the stream")
            if connection.has_ended:
                break
            await self.readers.park()
            connection.has_waited()
        raise MuxedStreamReset("the stream was reset" if self._reset else "the connection is closed")

    async def write(self, data: bytes) -> None:
        """Returns when the kernel has everything. If it is cancelled, the beginning of `data` may have been sent.

        Raises MuxedStreamReset if the stream or the connection has ended, MuxedStreamClosed if we have closed it.
        """
        await trio.lowlevel.checkpoint_if_cancelled()
        connection, rest = self._connection, memoryview(data)
        while rest:
            if connection.is_congested:
                await self._wait(connection.drained)
                continue
            taken = self._machine.write(self.number, rest)
            if taken is None:
                self._check_alive()
                raise MuxedStreamClosed("the stream was closed")
            connection.flush()
            rest = rest[taken:]
            if rest and not taken and not connection.is_congested:
                await self._wait(self.writers)
        self._check_alive()
        if connection.is_congested:
            await self._wait(connection.drained)
        await connection.let_others_run(len(data))

    async def close(self) -> None:
        """Send no more. What the other side sends can still be read."""
        await trio.lowlevel.checkpoint()
        if not self._closed and not self._reset:
            self._closed = True
            self._machine.close_stream(self.number)
            self._connection.flush()
            self._connection.linger(self)
            self.forget_if_over()

    async def reset(self) -> None:
        await trio.lowlevel.checkpoint()
        self.give_up()

    def set_deadline(self, ttl: int) -> None:
        raise NotImplementedError("put a deadline around the call: cancelling it is safe")

    def get_remote_address(self) -> tuple[str, int] | None:
        return self._connection.get_remote_address()

    # What its connection asks of it

    @property
    def is_closed(self) -> bool:
        return self._closed or self._reset

    @property
    def is_read_from(self) -> bool:
        return bool(self.readers) or trio.current_time() - self._read_at_s < LINGER_S

    def give_up(self) -> None:
        """Both directions, now, and say so."""
        self._machine.reset_stream(self.number)
        self._connection.flush()
        self.end_by_reset()

    def end_by_reset(self) -> None:
        self._reset = True
        self._connection.forget(self)
        self.wake()

    def forget_if_over(self) -> None:
        if self._closed and not self._machine.has_stream(self.number):
            self._connection.forget(self)

    def wake(self) -> None:
        self.readers.unpark_all()
        self.writers.unpark_all()

    async def _wait(self, for_what: trio.lowlevel.ParkingLot) -> None:
        self._check_alive()
        await for_what.park()
        self._connection.has_waited()
        self._check_alive()

    def _check_alive(self) -> None:
        if self._reset:
            raise MuxedStreamReset("the stream was reset")
        if self._connection.has_ended:
            raise MuxedStreamReset("the connection is closed")


def _socket(raw: IRawConnection) -> trio.socket.SocketType | None:
    """The socket below a TCP connection: reading from it directly saves two task switches a message.

    None for anything else, such as a connection through a relay.
    """
    if isinstance(raw, RawConnection) and isinstance(raw.stream, TrioTCPStream):
        return raw.stream.stream.socket
    return None


def _set_options(sock: trio.socket.SocketType | None) -> None:
    if sock is not None:
        with contextlib.suppress(OSError):  # it may be closed already
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if hasattr(socket, "TCP_USER_TIMEOUT"):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNACKNOWLEDGED_S * 1000)
