"""Peers describe themselves, and say where they see us: identify (https://github.com/libp2p/specs/tree/master/identify).

We ask, and read the answer within limits. py-libp2p reads 1 MiB, and keeps all of that: addresses in a cache of
the process as well, after the peer has left. It takes such messages unasked too (identify/push): we do not.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import trio
from libp2p.identity.identify.identify import ID as IDENTIFY
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.identity.identify_push.identify_push import ID_PUSH

from llmnode.core.policy import PeerstorePolicy
from llmnode.net.addresses import place_in
from llmnode.net.circuit_wire import leave, receive
from llmnode.net.connections import open_stream

if TYPE_CHECKING:
    from libp2p.abc import INetConn
    from libp2p.host.basic_host import BasicHost
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID

    from llmnode.net.peerstore import KnownPeers

log = logging.getLogger(__name__)

POLICY = PeerstorePolicy()


@dataclass(frozen=True, slots=True)
class Described:
    """The description that a peer gives, cut to what may be kept of it."""

    places: tuple[tuple[str, int], ...]
    """The IP addresses and TCP ports at which it listens."""
    protocols: tuple[str, ...]
    seen_at: tuple[str, int] | None
    """Where it sees us."""


async def identify(connection: SwarmConn, timeout_s: float, policy: PeerstorePolicy = POLICY) -> Described:
    """The other side's description of itself, and of us. Raises PeerError, or an error of libp2p."""
    stream = await open_stream(connection, IDENTIFY, timeout_s)
    try:
        said = await receive(stream.muxed_stream, Identify(), policy.identify_bytes)
    finally:
        await leave(stream, in_order=False)
    places = dict.fromkeys(place for each in said.listen_addrs[: policy.looked_at] if (place := place_in(each)))
    protocols = said.protocols[: policy.protocols]
    return Described(
        tuple(places)[: policy.addresses],
        tuple(str(each) for each in protocols if len(each) <= policy.protocol_chars),
        place_in(said.observed_addr),
    )


def use_our_identify(host: BasicHost, known: KnownPeers) -> None:
    """Have a host ask peers in our way when they connect. To be called before it runs."""
    swarm, disconnected = cast("Swarm", host.get_network()), host._on_notifee_disconnected
    known.is_connected = lambda peer: bool(swarm.get_connections(peer))

    async def ask(peer_id: ID, *, reason: str) -> None:
        try:
            with trio.fail_after(known.policy.identify_s):
                connection = cast("SwarmConn", swarm.get_connections(peer_id)[0])
                await connection.event_started.wait()
                said = await identify(connection, known.policy.identify_s, known.policy)
        except Exception as error:  # noqa: BLE001  any would end the process: py-libp2p has no other task above this one
            log.debug("peer=%s does not describe itself (%s): %r", peer_id, reason, error)
            return
        if known.is_connected(peer_id):
            known.note(peer_id, said.places, said.protocols)
            host._identified_peers[peer_id] = reason  # it is not asked again until it has left

    def forget(conn: INetConn) -> None:
        disconnected(conn)
        peer = conn.muxed_conn.peer_id
        if not known.is_connected(peer):
            known.forget_connected(peer)

    host._identify_peer = ask  # type: ignore[method-assign]
    host._on_notifee_disconnected = forget  # type: ignore[method-assign]
    host.remove_stream_handler(ID_PUSH)
