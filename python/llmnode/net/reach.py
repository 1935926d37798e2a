"""Whether others can dial us: they are asked to try it (AutoNAT), and say how they see us (identify).

https://github.com/libp2p/specs/blob/master/autonat/autonat-v1.md. An asked node dials only the IP address that the
question comes from, so that it cannot be sent to other machines. It counts only a dial as success in which the other
side proves the identity of the asking peer.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from typing import TYPE_CHECKING, cast

import trio
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.host.autonat.pb.autonat_pb2 import Message
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from llmnode.core.ids import PeerId
from llmnode.core.peers.nat import Reached, Sight
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import host_and_port, place_in, tcp_address
from llmnode.net.admission import groups_of
from llmnode.net.circuit_wire import leave, receive, send
from llmnode.net.connections import is_relayed, open_stream
from llmnode.net.dialling import connect_from
from llmnode.net.explain import innermost
from llmnode.net.identify import identify
from llmnode.net.punch import FAILURES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from libp2p.abc import INetStream
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.peerinfo import PeerInfo

    from llmnode.core.policy import ReachPolicy
    from llmnode.net.connections import HeldConnections
    from llmnode.net.dialling import Gate
    from llmnode.net.yamux import YamuxConnection

log = logging.getLogger(__name__)

AUTONAT = TProtocol("/libp2p/autonat/1.0.0")
MINUTE_S = 60.0


class DialBackRefused(Exception):
    """A request is answered with this status, which is not OK."""

    def __init__(self, status: Message.ResponseStatus.ValueType, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class DialBacks:
    """Its `take_request` is the handler of AUTONAT streams."""

    def __init__(self, swarm: Swarm, gate: Gate, policy: ReachPolicy) -> None:
        self._swarm = swarm
        self._gate = gate
        self._policy = policy
        self._recent: deque[tuple[float, str, str]] = deque()
        """The time, address group and host of each request within the last minute."""

    async def take_request(self, stream: INetStream) -> None:
        """libp2p calls this, in a task of its own, for each stream over which a peer asks us to dial it."""
        net_stream, in_order = cast("NetStream", stream), False
        try:
            with trio.fail_after(self._policy.answer_s):
                await send(net_stream.muxed_stream, await self._answer(net_stream))
            in_order = True
        except FAILURES as error:
            log.debug("not asked in the end peer=%s: %s", stream.muxed_conn.peer_id, error)
        finally:
            await leave(net_stream, in_order=in_order)

    async def _answer(self, stream: NetStream) -> Message:
        """Raises PeerUnreachable."""
        response = Message.DialResponse()
        try:
            reached = await self._dial_any(stream.muxed_conn.peer_id, await self._asked(stream))
            response.status, response.addr = Message.OK, reached.to_bytes()
        except DialBackRefused as refusal:
            response.status, response.statusText = refusal.status, str(refusal)
        return Message(type=Message.DIAL_RESPONSE, dialResponse=response)

    async def _asked(self, stream: NetStream) -> list[tuple[str, int]]:
        """Where the peer wants to be dialled, as far as we do it. Raises Refused, PeerUnreachable."""
        try:
            request = await receive(stream.muxed_stream, Message())
        except RemoteProtocolError as error:
            raise DialBackRefused(Message.E_BAD_REQUEST, error.message) from None
        remote = cast("YamuxConnection", stream.muxed_conn).get_remote_address()
        if request.type != Message.DIAL or request.dial.peer.id not in (b"", stream.muxed_conn.peer_id.to_bytes()):
            raise DialBackRefused(Message.E_BAD_REQUEST, "no request of that peer to dial it")
        if is_relayed(cast("SwarmConn", stream.swarm_conn)) or remote is None:
            raise DialBackRefused(Message.E_DIAL_REFUSED, "seen through a relay only")
        places = [each for each in _places(request.dial.peer.addrs) if each[0] == remote[0]][: self._policy.addresses]
        if not places:
            raise DialBackRefused(Message.E_DIAL_REFUSED, "no address is named where the request comes from")
        self._count(*groups_of(stream.muxed_conn))
        return places

    def _count(self, group: str, host: str) -> None:
        """Raises Refused."""
        now_s = trio.current_time()
        while self._recent and self._recent[0][0] < now_s - MINUTE_S:
            self._recent.popleft()
        policy = self._policy
        of_group = [each[2] for each in self._recent if each[1] == group]
        counts = len(self._recent), len(of_group), of_group.count(host)
        limits = policy.requests_per_minute, policy.group_requests_per_minute, policy.host_requests_per_minute
        if any(count >= most for count, most in zip(counts, limits, strict=True)):
            raise DialBackRefused(Message.E_DIAL_REFUSED, "asked too often")
        self._recent.append((now_s, group, host))

    async def _dial_any(self, peer: ID, places: Sequence[tuple[str, int]]) -> Multiaddr:
        """Raises Refused without a reason: it could tell the asking peer what is on our machine or behind its NAT."""
        with trio.move_on_after(self._policy.dial_s):
            for place in places:
                with contextlib.suppress(BaseLibp2pError, OSError):
                    await self._dial(peer, place)
                    return tcp_address(*place)
        raise DialBackRefused(Message.E_DIAL_ERROR, "not reached")

    async def _dial(self, peer: ID, place: tuple[str, int]) -> None:
        """No connection of the swarm: it is there for the proof alone. Raises OSError, or an error of libp2p."""
        async with self._gate.dialling(place, is_seen=True):
            reached = False
            failed: Exception | None = None
            try:
                async with await connect_from((any_host(place[0]), 0), place) as stream:
                    raw = RawConnection(TrioTCPStream(stream), initiator=True)
                    await self._swarm.upgrader.upgrade_security(raw, True, peer)
                reached = True
            except Exception as error:
                failed = error
                raise
            finally:
                self._gate.report(place, reached=reached, peer=peer, error=failed)


async def look(
    swarm: Swarm,
    gate: Gate,
    held: HeldConnections,
    peers: Iterable[PeerInfo],
    told: Callable[[str], Iterable[Multiaddr]],
    policy: ReachPolicy,
) -> list[Sight]:
    """How `peers`, at IP addresses, see connections that all come from one port of ours, and whether they can dial us.

    `told` gives our addresses for a peer that sees us at that IP address. A peer that does not answer has seen nothing.
    """
    sights: list[Sight] = []
    source: tuple[str, int] | None = None
    for info in peers:
        place = host_and_port(info.addrs[0])
        assert place is not None
        if _is_other_version(place[0], source):
            continue
        try:
            with trio.fail_after(policy.look_s):
                stream = await gate.connect_from(source or (any_host(place[0]), 0), place)
                source = source or (any_host(place[0]), stream.socket.getsockname()[1])
                raw = RawConnection(TrioTCPStream(stream), initiator=True)
                with held.hold(info.peer_id):
                    connection = await swarm.upgrade_outbound_raw_conn(raw, info.peer_id)
                    sights.append(await _sight(connection, place[0], told, policy))
        except FAILURES as error:
            log.info("peer=%s does not say how it sees us: %s", info.peer_id, innermost(error))
        finally:
            await held.close_unused(info.peer_id)  # a link may go over it by now
    return sights


async def _sight(
    connection: SwarmConn, peer_host: str, told: Callable[[str], Iterable[Multiaddr]], policy: ReachPolicy
) -> Sight:
    """Raises one of FAILURES."""
    peer = connection.muxed_conn.peer_id
    said = await identify(connection, policy.look_s)
    seen = said.seen_at
    if seen is None:
        raise PeerUnreachable("it does not say how it sees us")
    reached, at = Reached.NOT_TRIED, ""
    if AUTONAT in said.protocols:
        reached, at = await _ask(connection, told(seen[0]), policy)
    return Sight(PeerId(peer.to_base58()), peer_host, *seen, reached, at)


async def _ask(connection: SwarmConn, addresses: Iterable[Multiaddr], policy: ReachPolicy) -> tuple[Reached, str]:
    """Raises one of FAILURES."""
    own = connection.swarm.get_peer_id().to_bytes()
    asked = Message.PeerInfo(id=own, addrs=[each.to_bytes() for each in addresses])
    stream = await open_stream(connection, AUTONAT, policy.look_s)
    in_order = False
    try:
        await send(stream.muxed_stream, Message(type=Message.DIAL, dial=Message.Dial(peer=asked)))
        answer = await receive(stream.muxed_stream, Message())
        in_order = True
    finally:
        await leave(stream, in_order=in_order)
    if answer.type != Message.DIAL_RESPONSE:
        raise RemoteProtocolError("autonat: no response")
    status = answer.dialResponse.status
    log.info("asked peer=%s to dial us: %s %s", stream.muxed_conn.peer_id, status, answer.dialResponse.statusText[:200])
    if status == Message.OK:
        return Reached.YES, str(Multiaddr(answer.dialResponse.addr)) if answer.dialResponse.addr else ""
    return (Reached.NO if status == Message.E_DIAL_ERROR else Reached.NOT_TRIED), ""


def _places(named: Iterable[bytes]) -> list[tuple[str, int]]:
    """IP addresses and ports of those multiaddrs that are of TCP and nothing else."""
    return list(dict.fromkeys(place for each in named if (place := place_in(each)) is not None and place[1]))


def any_host(host: str) -> str:
    return "::" if ":" in host else "0.0.0.0"


def _is_other_version(host: str, source: tuple[str, int] | None) -> bool:
    return source is not None and (":" in host) != (":" in source[0])
