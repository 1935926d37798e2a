"""How a raw connection becomes one of ours: Noise, then yamux, and both in one round trip with peers that can do that.

The request for Noise goes with the first message of its handshake. Two peers that name their muxers within the
handshake agree on one there, as go-libp2p and we do (libp2p's specification of Noise, *Noise Extensions*).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import trio
from libp2p.security.noise.exceptions import NoiseFailure
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.security.security_multistream import SecurityMultistream
from libp2p.stream_muxer.muxer_multistream import MuxerMultistream

from llmnode.core.policy import LinkPolicy
from llmnode.net.admission import ConnectionAdmission
from llmnode.net.secure import YAMUX, NoiseConnection, NoiseTransport
from llmnode.net.select import CarefulSelect, EagerSelect
from llmnode.net.yamux import YamuxConnection

if TYPE_CHECKING:
    from libp2p.abc import IHost, IMuxedConn, IRawConnection, ISecureConn
    from libp2p.host.basic_host import BasicHost
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID


def use_our_transport(
    host: IHost, noise: NoiseTransport, timeout_s: float, admission: ConnectionAdmission | None = None
) -> None:
    """Have all connections of `host` use `noise` and our yamux, and nothing else. To be called before it runs.

    A dialled peer must prove its identity within `timeout_s`. By default the host has a budget of its own.
    """
    admission = admission or ConnectionAdmission(LinkPolicy())
    basic = cast("BasicHost", host)
    basic.multiselect, basic.multiselect_client = CarefulSelect(basic.multiselect.handlers), EagerSelect()
    upgrader = cast("Swarm", host.get_network()).upgrader
    upgrader.security_multistream = _OurSecurity(noise, timeout_s)
    upgrader.muxer_multistream = _OurMuxer(admission)


class _OurSecurity(SecurityMultistream):
    def __init__(self, noise: NoiseTransport, timeout_s: float) -> None:
        super().__init__({NOISE: noise})
        self._selector.multiselect = CarefulSelect({NOISE: None})
        self._noise = noise
        self._timeout_s = timeout_s

    async def secure_outbound(self, conn: IRawConnection, peer_id: ID) -> ISecureConn:
        try:
            with trio.fail_after(self._timeout_s):
                return await self._noise.propose_outbound(conn, peer_id)
        except trio.TooSlowError:
            raise NoiseFailure(f"no answer in {self._timeout_s:g} s") from None


class _OurMuxer(MuxerMultistream):
    """`MuxerMultistream` itself makes a `Yamux` of its own for this protocol, whatever class the options name."""

    def __init__(self, admission: ConnectionAdmission) -> None:
        super().__init__({YAMUX: YamuxConnection})
        self._admission = admission
        self._selector.multiselect, self._selector.multiselect_client = CarefulSelect({YAMUX: None}), EagerSelect()

    async def new_conn(self, conn: ISecureConn, peer_id: ID) -> IMuxedConn:
        secured = cast("NoiseConnection", conn)
        if not secured.has_agreed_on_yamux:
            await self.select_transport(conn)
        admission = self._admission
        return YamuxConnection(conn, peer_id, admission.prove(secured, peer_id), admission.note_refused)
