"""A link's stream, which is used before the other side has agreed to the version of the protocol.

The newest version is proposed, and the first frames follow at once: this costs no round trip. A peer that refuses it
has read none of them. So they are kept until the answer comes, and sent again over another stream of the same
connection, with the next older version. Only the task that reads does that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.stream_muxer.exceptions import MuxedStreamError

from llmnode.net.connections import connection_of
from llmnode.net.select import propose
from llmnode.net.yamux_stream import ProtocolRefused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream

    from llmnode.net.yamux_stream import YamuxStream
    from llmnode.wire.frame import Buffer

KEPT_BYTES = 1 << 22
"""Beyond this, writing waits for the answer. It is more than a peer takes before it reads frames (the window of yamux),
so the wait does not make the link look slow."""


def link_protocol(version: int) -> TProtocol:
    return TProtocol(f"/llmnode/link/{version}")


class NegotiatedStream:
    """A stream of the first of `versions`. The older ones are still to be proposed; without any, it is settled."""

    def __init__(self, stream: NetStream, versions: Sequence[int]) -> None:
        self._stream = stream
        self._muxed = cast("YamuxStream", stream.muxed_stream)
        self._version, *self._older = versions
        self._sent: list[bytes] = []  # until it is settled
        self.kept_bytes = 0
        """The size of the frames that are kept until then."""
        self._is_moving = False
        self.settled = trio.Event()
        """The version is known, or the link has ended."""
        if not self._older:
            self.settled.set()

    @property
    def connection(self) -> SwarmConn:
        return connection_of(self._stream)

    @property
    def version(self) -> int | None:
        """None while the other side has not answered."""
        return None if self._older else self._version

    async def read(self, bytes_max: int) -> bytes:
        """Raises as `YamuxStream.read`, ProtocolRefused if the other side speaks none of our versions."""
        while True:
            try:
                data = await self._muxed.read(bytes_max)
            except ProtocolRefused:
                if not self._older:
                    raise
                await self._move()
            else:
                if self._older:
                    self._settle()
                return data

    async def write(self, data: Buffer) -> None:
        """Raises as `YamuxStream.write`."""
        if self._older and self.kept_bytes + len(data) > KEPT_BYTES:
            await self.settled.wait()
        if not self._older:
            return await self._muxed.write(data)
        self._keep(data)
        if not self._is_moving:
            try:
                return await self._muxed.write(data)
            except ProtocolRefused:
                pass
        await self.settled.wait()  # it is sent with the rest

    def write_at_once(self, data: bytes) -> int:
        if not self._older:
            return self._muxed.write_at_once(data)
        if self._is_moving or self.kept_bytes + len(data) > KEPT_BYTES:
            return 0
        taken = self._muxed.write_at_once(data)
        self._keep(data[:taken])
        return taken

    async def let_others_run(self, moved_bytes: int) -> None:
        await self._muxed.let_others_run(moved_bytes)

    async def reset(self) -> None:
        await self._stream.reset()

    def _keep(self, data: Buffer) -> None:
        self._sent.append(bytes(data))
        self.kept_bytes += len(data)

    def _settle(self) -> None:
        self._older, self._sent, self.kept_bytes = [], [], 0
        self.settled.set()

    async def _move(self) -> None:
        """Propose the next version, and send everything again. Raises MuxedStreamError."""
        self._is_moving = True
        version, *older = self._older
        try:
            await self._stream.reset()
            stream = await propose(await self.connection.new_stream(), link_protocol(version))
        except BaseLibp2pError as error:
            raise MuxedStreamError(str(error)) from error
        muxed = cast("YamuxStream", stream.muxed_stream)
        sent = 0
        while sent < len(self._sent):  # it may grow meanwhile
            rest = self._sent[sent:]
            sent += len(rest)
            await muxed.write(b"".join(rest))
        self._stream, self._muxed, self._version, self._older = stream, muxed, version, older
        self._is_moving = False
        if not older:
            self._settle()
