"""A host of py-libp2p as a node needs it: our Noise and yamux, our limits, and its faults over a long life mended.

Each adapter says what would happen without it. They reach into py-libp2p where it offers no setting for it.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
from collections import Counter
from typing import TYPE_CHECKING, cast

import libp2p.network.swarm
import trio
from libp2p import new_host
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

from llmnode.net.secure import noise_transport
from llmnode.net.sockets import remote_address, resolved
from llmnode.net.upgrade import use_our_transport
from llmnode.net.yamux import YamuxConnection

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from libp2p.abc import IHost, IMuxedConn, INetStream, IRawConnection
    from libp2p.crypto.keys import KeyPair
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID

    from llmnode.core.policy import LinkPolicy

log = logging.getLogger(__name__)

ANY_TCP = Multiaddr("/ip4/127.0.0.1/tcp/0")

IPV6_NETWORK_BITS = 64
"""A provider gives a customer at least a network of this size."""


@contextlib.asynccontextmanager
async def open_host(
    key_pair: KeyPair,
    listen: Sequence[Multiaddr],
    policy: LinkPolicy,
    announce: Sequence[Multiaddr] = (),
    swarm_key: bytes | None = None,
) -> AsyncIterator[IHost]:
    """A running host of this identity. TCP, Noise and yamux alone: its default would accept plaintext as well.

    It tells others the addresses `announce`, if any, instead of those it listens at. For `swarm_key` see
    `secure.noise_transport`.
    """
    for noisy in ("libp2p", "async_service"):
        logging.getLogger(noisy).setLevel(logging.CRITICAL)
    # A successful dial waits this long for a rival that does not exist: 250 ms each, unless it is lowered.
    libp2p.network.swarm._HAPPY_EYEBALLS_DELAY = 0.005
    limits = ConnectionConfig(
        max_connections=policy.connections,
        high_watermark=policy.connections,
        low_watermark=0,
        min_connections=0,  # as many as this it would not accept, to keep them for dials
        max_connections_per_peer=2 * policy.links_per_peer,  # those that are ending count
        inbound_upgrade_timeout=policy.dial_timeout_s,
        outbound_upgrade_timeout=policy.dial_timeout_s,
    )
    noise = noise_transport(key_pair, swarm_key)
    host = new_host(
        key_pair=key_pair,
        sec_opt={NOISE: noise},
        listen_addrs=listen or [ANY_TCP],  # says which transports to load
        connection_config=limits,
        announce_addrs=announce or None,
    )
    swarm = cast("Swarm", host.get_network())
    use_our_transport(host, noise, policy.dial_timeout_s)
    _free_inbound_slots(swarm, policy)
    _close_cancelled_dials(swarm)
    _dial_when_told(swarm)
    _know_names_of_the_system(swarm)
    _outlive_streams(swarm)
    async with host.run(listen_addrs=listen):
        # It would dial every peer that we have ever met, and most eagerly those that we have just left.
        await swarm.auto_connector.stop()
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):  # or the port would stay taken, by nobody, until the process ends
                for listener in list(swarm.listeners.values()):
                    await listener.close()


def _free_inbound_slots(swarm: Swarm, policy: LinkPolicy) -> None:
    """It keeps the task and the slot of an inbound connection until the host ends, so that the slots run out for good.

    Nor does it know how many are from one place, which alone could take all.
    """
    upgrade = swarm.upgrade_inbound_raw_conn
    from_host: Counter[str] = Counter()

    async def upgrade_and_stay(raw_conn: IRawConnection, address: Multiaddr) -> IMuxedConn:
        host = host_of(raw_conn)
        if from_host[host] >= policy.connections_per_host:
            raise SwarmException(f"too many connections from {host}")
        from_host[host] += 1
        try:
            connection = await upgrade(raw_conn, address)
            assert isinstance(connection, YamuxConnection)
            await connection.event_ended.wait()
        finally:
            from_host[host] -= 1
            if not from_host[host]:
                del from_host[host]
        raise SwarmException("the connection is over")  # its caller ends, instead of waiting for the swarm

    swarm.upgrade_inbound_raw_conn = upgrade_and_stay  # type: ignore[method-assign, assignment]


def host_of(connection: IRawConnection | YamuxConnection) -> str:
    """The other side's IPv4 address, or the network of its IPv6 address, within which it can choose.

    For a circuit, whose other side could be anywhere, it is the relay's.
    """
    address = connection.get_remote_address() if isinstance(connection, YamuxConnection) else remote_address(connection)
    if address is None:
        return str(next(iter(connection.get_transport_addresses()), "nowhere"))
    ip = ipaddress.ip_address(address[0].partition("%")[0])
    return str(ip if ip.version == 4 else ipaddress.ip_network((ip, IPV6_NETWORK_BITS), strict=False))


def _close_cancelled_dials(swarm: Swarm) -> None:
    """It would leave the socket of a connection that we give it open when that is cancelled in its handshake (`look`,
    `Puncher`), until the collector finds it. Those that it dials itself it closes.
    """
    upgrade = swarm.upgrade_outbound_raw_conn

    async def upgrade_or_close(raw_conn: IRawConnection, peer: ID, pre_scope: object = None) -> SwarmConn:
        try:
            return await upgrade(raw_conn, peer, pre_scope)
        except trio.Cancelled:
            with trio.CancelScope(shield=True):
                await raw_conn.close()
            raise

    swarm.upgrade_outbound_raw_conn = upgrade_or_close  # type: ignore[method-assign, assignment]


def _outlive_streams(swarm: Swarm) -> None:
    """It ends with the first unforeseen error in any of its streams, whichever side has opened the stream."""
    handle = swarm.common_stream_handler

    async def handle_or_reset(stream: INetStream) -> None:
        try:
            await handle(stream)
        except Exception:
            log.exception("a stream of peer=%s ends", stream.muxed_conn.peer_id)
            await stream.reset()

    swarm.set_stream_handler(handle_or_reset)


def _dial_when_told(swarm: Swarm) -> None:
    """It would try a dead address four times, for 0.7 s, and then not again for a minute: not even if asked to."""
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm._negative_peer_cache = libp2p.network.swarm._NegativePeerCache(ttl=0.0)


def _know_names_of_the_system(swarm: Swarm) -> None:
    """It asks DNS servers alone, which know neither /etc/hosts nor the names of a local network."""
    transport = swarm.transport_manager.transport_for_dialing(ANY_TCP)
    assert transport is not None
    dial = transport.dial

    async def dial_resolved(maddr: Multiaddr) -> IRawConnection:
        try:
            *others, last = await resolved(maddr)
        except (OSError, UnicodeError) as error:
            raise OpenConnectionError(str(error)) from error
        for each in others:
            with contextlib.suppress(OpenConnectionError):
                return await dial(each)
        return await dial(last)

    transport.dial = dial_resolved  # type: ignore[method-assign]
