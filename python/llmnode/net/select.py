"""multistream-select (`/multistream/1.0.0`) in as few round trips as there are answers to wait for.

Who agrees to a protocol answers with the very bytes that asked for it: the name of multistream-select, and that of the
protocol. So all of them go at once, and what belongs to the protocol may go with them. py-libp2p by itself sends each
name when the one before is answered.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio
from libp2p.abc import IMultiselectCommunicator
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import IOException
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_client import (
    DEFAULT_NEGOTIATE_TIMEOUT,
    MULTISELECT_PROTOCOL_ID,
    MultiselectClient,
)
from libp2p.utils import encode_delim

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.abc import IHost
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

    from llmnode.net.yamux_stream import YamuxStream


def proposal(protocol: TProtocol) -> bytes:
    """What asks for `protocol`; and what who agrees answers."""
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
        eager = _FirstAhead(cast("MultiselectCommunicator", communicator), protocols[0])
        return await super().select_one_of(protocols, eager, negotiate_timeout)


class _FirstAhead(IMultiselectCommunicator):
    """Sends the first proposal with what precedes it, and not again in its turn."""

    def __init__(self, communicator: MultiselectCommunicator, first: TProtocol) -> None:
        self._communicator = communicator
        self._first = first
        self._turns = iter((MULTISELECT_PROTOCOL_ID, first))

    async def write(self, msg_str: str) -> None:
        if next(self._turns, None) != msg_str:
            await self._communicator.write(msg_str)
        elif msg_str == MULTISELECT_PROTOCOL_ID:
            try:
                await self._communicator.read_writer.write(proposal(self._first))
            except IOException as error:
                raise MultiselectCommunicatorError(str(error)) from error

    async def read(self) -> str:
        return await self._communicator.read()


async def open_unanswered(host: IHost, peer: ID, protocol: TProtocol) -> NetStream:
    """A stream to a connected peer over our yamux, of which what is written now goes with the proposal.

    If the other side does not agree, reading raises ProtocolRefused.
    """
    stream = cast("NetStream", await cast("Swarm", host.get_network()).new_stream(peer))
    muxed, asked = cast("YamuxStream", stream.muxed_stream), proposal(protocol)
    try:
        muxed.expect(asked, protocol)
        await muxed.write(asked)
    except BaseException:
        with trio.CancelScope(shield=True):
            await stream.reset()
        raise
    stream.set_protocol(protocol)
    return stream
