"""A host of py-libp2p as a node needs it: our Noise and yamux, our limits, and its faults over a long life mended.

Each adapter says what would happen without it. They reach into py-libp2p where it offers no setting for it.
"""

from __future__ import annotations

import contextlib
import logging
from functools import partial
from typing import TYPE_CHECKING, cast

import libp2p.network.swarm
import trio
from libp2p import new_host
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from multiaddr import Multiaddr

from llmnode.core.budget import Kind, Resource, Worth
from llmnode.errors import ConfigError
from llmnode.net.addresses import all_reachable
from llmnode.net.admission import ConnectionAdmission
from llmnode.net.identify import use_our_identify
from llmnode.net.listeners import listen_at
from llmnode.net.peerstore import KnownPeers
from llmnode.net.pings import PING, answer_pings
from llmnode.net.secure import noise_transport
from llmnode.net.upgrade import use_our_transport
from llmnode.net.yamux import YamuxConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from libp2p.abc import IHost, IMuxedConn, INetStream, IRawConnection
    from libp2p.crypto.keys import KeyPair
    from libp2p.host.basic_host import BasicHost
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.transport.tcp.tcp import TCP, TCPListener

    from llmnode.core.policy import LinkPolicy
    from llmnode.net.dialling import Gate
    from llmnode.net.yamux_stream import YamuxStream

log = logging.getLogger(__name__)

ANY_TCP = Multiaddr("/ip4/127.0.0.1/tcp/0")

NEWCOMERS = 64
"""py-libp2p lets this many connections more than the budget come in, so that we decide which of all have to go."""


@contextlib.asynccontextmanager
async def open_host(
    key_pair: KeyPair,
    listen: Sequence[Multiaddr],
    policy: LinkPolicy,
    announce: Sequence[Multiaddr] = (),
    swarm_key: bytes | None = None,
    admission: ConnectionAdmission | None = None,
) -> AsyncIterator[IHost]:
    """A running host of this identity. TCP, Noise and yamux alone: its default would accept plaintext as well.

    Raises ConfigError, perhaps in a group, if it cannot listen at one of `listen`.

    Its connections and streams are within the budget of `admission`, and its dials go through the gate of that.

    It tells others the addresses `announce`, if any, instead of those it listens at. For `swarm_key` see
    `secure.noise_transport`.
    """
    for noisy in ("libp2p", "async_service"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    # A successful dial waits this long for a rival that does not exist: 250 ms each, unless it is lowered.
    libp2p.network.swarm._HAPPY_EYEBALLS_DELAY = 0.005
    admission = admission or ConnectionAdmission(policy)
    most = admission.policy.connections + NEWCOMERS
    limits = ConnectionConfig(
        max_connections=most,
        high_watermark=most,
        low_watermark=0,
        min_connections=0,  # as many as this it would not accept, to keep them for dials
        max_connections_per_peer=admission.policy.connections_per_peer,
        inbound_upgrade_timeout=policy.dial_timeout_s,
        outbound_upgrade_timeout=policy.dial_timeout_s,
    )
    noise = noise_transport(key_pair, swarm_key)
    known = KnownPeers(policy.peerstore, admission.policy)
    if not admission.budget.process.open(Kind.PEER, "the list of peers").take(Resource.MEMORY, known.most_bytes):
        raise ConfigError("the memory budget leaves nothing for a list of peers: raise BudgetPolicy.memory_bytes")
    host = new_host(
        key_pair=key_pair,
        peerstore_opt=known,
        sec_opt={NOISE: noise},
        listen_addrs=listen or [ANY_TCP],  # says which transports to load
        connection_config=limits,
        announce_addrs=announce or None,
        addrs_factory=None if announce else _where_others_reach,
        disable_identify_address_discovery=True,  # four peers could have us announce any address
    )
    swarm = cast("Swarm", host.get_network())
    swarm.set_resource_manager(None)  # its own has other limits, which grow and shrink, and remembers every peer
    use_our_transport(host, noise, policy.dial_timeout_s, admission)
    use_our_identify(cast("BasicHost", host), known)
    _admit_inbound(swarm, admission, policy.dial_timeout_s)
    _guard_dials(swarm, admission.gate)
    _dial_when_told(swarm)
    _outlive_streams(swarm, admission)
    host.set_stream_handler(PING, partial(answer_pings, admission))
    async with host.run(listen_addrs=[]):
        await listen_at(swarm, listen)
        # It would dial every peer that we have ever met, and most eagerly those that we have just left.
        await swarm.auto_connector.stop()
        _accept_few(swarm, admission)
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):  # or the port would stay taken, by nobody, until the process ends
                for listener in list(swarm.listeners.values()):
                    await listener.close()


def _where_others_reach(listening: Sequence[Multiaddr]) -> list[Multiaddr]:
    """It would tell others that it is at 0.0.0.0, where none of them can dial it."""
    return [Multiaddr(each) for each in all_reachable(listening)]


def _accept_few(swarm: Swarm, admission: ConnectionAdmission) -> None:
    """It begins a task for each connection, however many come from one address."""

    async def accept(listening: trio.socket.SocketType) -> trio.SocketStream:
        while True:
            accepted, address = await listening.accept()
            if admission.accepts(address[0]):
                return trio.SocketStream(accepted)
            accepted.close()

    for listener in swarm.listeners.values():
        for each in cast("TCPListener", listener).listeners:
            each.accept = partial(accept, each.socket)  # type: ignore[method-assign]


def _admit_inbound(swarm: Swarm, admission: ConnectionAdmission, patience_s: float) -> None:
    """It keeps the task and the slot of an inbound connection until the host ends, so that the slots run out for good.

    Nor does it know how many are from one place, which alone could take all.
    """
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgrade_and_stay(raw_conn: IRawConnection, address: Multiaddr) -> IMuxedConn:
        with trio.CancelScope() as evicted:
            half_open = admission.begin(raw_conn, evicted.cancel)
            try:
                await admission.wait_turn(raw_conn, patience_s)
                connection = await upgrade(raw_conn, address)
            finally:
                admission.end(half_open)
            assert isinstance(connection, YamuxConnection)
            await connection.event_ended.wait()
        raise SwarmException("the connection is over")  # its caller ends, instead of waiting for the swarm

    swarm.upgrade_inbound_raw_conn = upgrade_and_stay  # type: ignore[method-assign, assignment]


def _outlive_streams(swarm: Swarm, admission: ConnectionAdmission) -> None:
    """It ends with the first unforeseen error in any of its streams, whichever side has opened the stream.

    It handles any number of streams: agreeing on a protocol and identifying itself takes a millisecond. Here
    address groups have turns. A stream beyond a limit is reset.
    """
    handle = swarm.common_stream_handler

    async def handle_or_reset(stream: INetStream) -> None:
        connection = cast("YamuxConnection", stream.muxed_conn)
        muxed_stream = cast("YamuxStream", cast("NetStream", stream).muxed_stream)
        is_admitted = admission.admits_stream(muxed_stream, connection.scope)
        has_turn = is_admitted and await admission.wait_stream_turn(muxed_stream)
        if not has_turn:
            is_theirs = not is_admitted or muxed_stream.is_over  # its peer has opened too many, or reset it
            await stream.reset()
            # Others at its address may have had the turns: what is used does not end for that.
            if is_theirs or connection.scope.use < Worth.USED:
                admission.note_refused(connection)
            return
        try:
            await handle(stream)
        except Exception:
            log.exception("a stream of peer=%s ends", stream.muxed_conn.peer_id)
            await stream.reset()

    swarm.set_stream_handler(handle_or_reset)


def _dial_when_told(swarm: Swarm) -> None:
    """It would try a dead address four times, for 0.7 s, and then not again for a minute: not even if asked to.

    It would remember each peer that has left, for an auto connector that does not run.
    """
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm._negative_peer_cache = libp2p.network.swarm._NegativePeerCache(ttl=0.0, max_size=1)
    swarm.auto_connector.record_disconnect = lambda _peer: None  # type: ignore[method-assign, assignment]


def _guard_dials(swarm: Swarm, gate: Gate) -> None:
    """It would dial any address of any peer, as often as it is told of it."""
    gate.guard(swarm, cast("TCP", swarm.transport_manager.transport_for_dialing(ANY_TCP)))
