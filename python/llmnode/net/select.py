"""multistream-select (`/multistream/1.0.0`) with a round trip only where an answer must be awaited.

A peer agrees to a protocol by repeating the bytes that asked for it: the name of multistream-select, and that of the
protocol. So we send all of them at once, together with the first bytes of the protocol. py-libp2p by itself sends each
name when the one before is answered. An invalid name would be the end of py-libp2p's host, and a long one is read
whole.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import trio
from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect import Multiselect
from libp2p.protocol_muxer.multiselect_client import (
    DEFAULT_NEGOTIATE_TIMEOUT,
    MULTISELECT_PROTOCOL_ID,
    MultiselectClient,
)
from libp2p.utils import encode_delim, read_varint_prefixed_bytes_limited

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from libp2p.abc import IHost, INetStream
    from libp2p.custom_types import StreamHandlerFn
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

    from llmnode.net.yamux_stream import YamuxStream

NAME_BYTES_MAX = 1 << 10
NAMES_MOST = 8
"""The names that the other side may say, one after the other: that of multistream-select, and some of protocols."""


def proposal(protocol: TProtocol) -> bytes:
    """The bytes that ask for `protocol`, which are also the answer that agrees."""
    return encode_delim(MULTISELECT_PROTOCOL_ID.encode()) + encode_delim(protocol.encode())


class EagerSelect(MultiselectClient):
    """Proposes the first protocol at once. It takes one round trip if the other side agrees, instead of two."""

    async def select_one_of(
        self,
        protocols: Sequence[TProtocol],
        communicator: IMultiselectCommunicator,
        negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT,
    ) -> TProtocol:
        """Raises MultiselectClientError."""
        return await super().select_one_of(protocols, _FirstAhead(communicator, protocols[0]), negotiate_timeout)


class CarefulSelect(Multiselect):
    """Answers proposals. Raises MultiselectError for whatever is none."""

    async def negotiate(
        self, communicator: IMultiselectCommunicator, negotiate_timeout: int = DEFAULT_NEGOTIATE_TIMEOUT
    ) -> tuple[TProtocol | None, StreamHandlerFn | None]:
        return await super().negotiate(_Names(communicator), negotiate_timeout)


class _Names(IMultiselectCommunicator):
    """Reads names, one after the other. Raises MultiselectCommunicatorError for an invalid or too long one.

    It does so for too many, too: each takes a tenth of a millisecond, and a stream may bring any number of them.
    """

    def __init__(self, communicator: IMultiselectCommunicator) -> None:
        self._stream = cast("MultiselectCommunicator", communicator).read_writer
        self._left = NAMES_MOST

    async def write(self, msg_str: str) -> None:
        await self._send(encode_delim(msg_str.encode()))

    async def read(self) -> str:
        if not self._left:
            raise MultiselectCommunicatorError(f"more than {NAMES_MOST} names of protocols")
        self._left -= 1
        try:
            name = (await read_varint_prefixed_bytes_limited(self._stream, NAME_BYTES_MAX)).decode()
        except (BaseLibp2pError, ValueError) as error:
            reason = str(error) or type(error).__name__
            raise MultiselectCommunicatorError(f"no name of a protocol ({reason})") from error
        if not name.endswith("\n"):
            raise MultiselectCommunicatorError("no name of a protocol: its last line does not end")
        return name.removesuffix("\n")

    async def _send(self, names: bytes) -> None:
        try:
            await self._stream.write(names)
        except BaseLibp2pError as error:
            raise MultiselectCommunicatorError(str(error)) from error


class _FirstAhead(_Names):
    """Sends the first proposal with the bytes before it, and not again in its turn."""

    def __init__(self, communicator: IMultiselectCommunicator, first: TProtocol) -> None:
        super().__init__(communicator)
        self._first = first
        self._turns = iter((MULTISELECT_PROTOCOL_ID, first))

    async def write(self, msg_str: str) -> None:
        if next(self._turns, None) != msg_str:
            await super().write(msg_str)
        elif msg_str == MULTISELECT_PROTOCOL_ID:
            await self._send(proposal(self._first))


async def open_unanswered(host: IHost, peer: ID, protocol: TProtocol) -> NetStream:
    """A stream to a connected peer over our yamux. Bytes that are written now go along with the proposal.

    If the other side does not agree, reading raises ProtocolRefused.
    """
    return await propose(await cast("Swarm", host.get_network()).new_stream(peer), protocol)


async def propose(opened: INetStream, protocol: TProtocol) -> NetStream:
    """The fresh stream `opened` with its proposal, as `open_unanswered`."""
    stream = cast("NetStream", opened)
    muxed, asked = cast("YamuxStream", stream.muxed_stream), proposal(protocol)
    async with reset_if_it_fails(stream):
        muxed.expect(asked, protocol)
        await muxed.write(asked)
    stream.set_protocol(protocol)
    return stream


@contextlib.asynccontextmanager
async def reset_if_it_fails(stream: INetStream) -> AsyncIterator[None]:
    """A stream that is not agreed on is of no use, whatever is the cause."""
    try:
        yield
    except BaseException:
        with trio.CancelScope(shield=True):
            await stream.reset()
        raise
