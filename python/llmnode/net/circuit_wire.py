"""Circuit relay v2 on the wire: its messages, and a circuit's bytes as a connection that Noise and yamux go over.

https://github.com/libp2p/specs/blob/master/relay/circuit-v2.md. Does not know which peers may reserve or connect.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar, cast

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.abc import IRawConnection
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.exceptions import IOException
from libp2p.network.stream.exceptions import StreamError
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.stream_muxer.exceptions import MuxedStreamEOF, MuxedStreamError
from multiaddr.exceptions import Error as MultiaddrError

from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import place_in

if TYPE_CHECKING:
    from libp2p.abc import IMuxedStream
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from multiaddr import Multiaddr

    from llmnode.net.yamux import YamuxConnection

HOP = TProtocol("/libp2p/circuit/relay/0.2.0/hop")
STOP = TProtocol("/libp2p/circuit/relay/0.2.0/stop")

MESSAGE_BYTES = 4096
"""The limit of go-libp2p. A reservation with all addresses of a relay is well below."""
FAILURES = (PeerError, BaseLibp2pError, StreamError, MultiaddrError, ValueError, trio.TooSlowError)
"""An exchange of messages with a peer that fails ends with one of these."""
LENGTH_BYTES = 3
"""The length of a message takes at most this many bytes as a varint."""
PIECE_BYTES = 1 << 18
"""Bytes are moved in pieces of at most this size."""

_Message = TypeVar("_Message", bound=Message)


async def receive(stream: IMuxedStream, into: _Message, most_bytes: int = MESSAGE_BYTES) -> _Message:
    """The next message, and not a byte more. Raises RemoteProtocolError if it is none, PeerUnreachable at the end."""
    length = 0
    for place in range(LENGTH_BYTES):
        (byte,) = await _exactly(stream, 1)
        length |= (byte & 0x7F) << (7 * place)
        if byte < 0x80:
            break
    else:
        raise RemoteProtocolError("circuit: the length of a message does not end")
    if length > most_bytes:
        raise RemoteProtocolError(f"circuit: a message of {length} bytes, at most {most_bytes} allowed")
    try:
        into.ParseFromString(await _exactly(stream, length))
    except DecodeError as error:
        raise RemoteProtocolError(f"circuit: no {type(into).__name__} ({error})") from error
    return into


async def send(stream: IMuxedStream, message: Message) -> None:
    """Raises PeerUnreachable."""
    body = message.SerializeToString()
    length, rest = bytearray(), len(body)
    while rest > 0x7F:
        length.append(0x80 | rest & 0x7F)
        rest >>= 7
    length.append(rest)
    try:
        await stream.write(bytes(length) + body)
    except MuxedStreamError as error:
        raise PeerUnreachable(f"circuit: the stream ended ({error})") from error


async def _exactly(stream: IMuxedStream, size: int) -> bytes:
    data = b""
    try:
        while len(data) < size:
            data += await stream.read(size - len(data))
    except MuxedStreamError as error:
        raise PeerUnreachable(f"circuit: the stream ended ({error})") from error
    return data


def _host_of(peer: pb.PeerId) -> str | None:
    place = place_in(peer.addrs[0]) if peer.addrs else None
    return None if place is None else place[0]


def name_of(status: int) -> str:
    """For people; any number may have been sent."""
    return pb.Status.Name(pb.Status.ValueType(status)) if status in pb.Status.values() else f"status {status}"


class CircuitConnection(IRawConnection):
    """A stream to a relay that has become a circuit: its bytes are the far peer's. `finish` must be called at the end.

    `address` is that of the far peer, as far as it is known. `told` is what the relay has said of the circuit: how much
    it carries, and, if it is one of ours, where it sees the far peer.
    """

    def __init__(
        self, stream: NetStream, address: Multiaddr, told: pb.HopMessage | pb.StopMessage, *, is_initiator: bool
    ) -> None:
        self.is_initiator = is_initiator
        self.limit_bytes = told.limit.data or None
        self.seen_host = _host_of(told.peer)
        """The IP address of the far peer, as its relay sees it."""
        self._stream = stream
        self._bytes = stream.muxed_stream  # its wrapper would take a lock for each call
        self._address = address

    @property
    def to_relay(self) -> SwarmConn:
        """The connection that it goes over."""
        assert self._stream.swarm_conn is not None
        return self._stream.swarm_conn

    async def read(self, n: int | None = None) -> bytes:
        """Nothing at the end. Raises IOException if the circuit was cut."""
        try:
            return await self._bytes.read(n)
        except MuxedStreamEOF:
            return b""
        except MuxedStreamError as error:
            raise IOException(f"the circuit was cut: {error}") from error

    async def write(self, data: bytes) -> None:
        try:
            await self._bytes.write(data)
        except MuxedStreamError as error:
            raise IOException(f"the circuit was cut: {error}") from error

    async def close(self) -> None:
        """Send no more, so that the other side ends as well; the owner of the circuit will `finish` it."""
        await self._bytes.close()

    async def finish(self, patience_s: float) -> None:
        """End both directions. The other side has `patience_s` to take our last bytes and to end too."""
        ended = False
        with trio.move_on_after(patience_s, shield=True):
            await self._bytes.close()
            try:
                while True:
                    await self._bytes.read(PIECE_BYTES)
            except MuxedStreamEOF:
                ended = True
            except MuxedStreamError:
                pass
        await leave(self._stream, in_order=ended)

    def get_remote_address(self) -> tuple[str, int] | None:
        return None

    def get_transport_addresses(self) -> list[Multiaddr]:
        return [self._address]

    def get_connection_type(self) -> ConnectionType:
        return ConnectionType.RELAYED


async def leave(stream: NetStream, *, in_order: bool) -> None:
    """Give a stream up. If it was `in_order`, all bytes that were sent over it still arrive."""
    with trio.CancelScope(shield=True):
        await (stream.close() if in_order else stream.reset())


def limit_bytes_of(connection: SwarmConn) -> int | None:
    """The most bytes that the connection's relay carries; None if it names no limit, or there is no relay."""
    raw = cast("YamuxConnection", connection.muxed_conn).secured_conn.raw
    return raw.limit_bytes if isinstance(raw, CircuitConnection) else None
