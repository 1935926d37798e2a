"""A host of py-libp2p as a node needs it: our Noise and yamux, our limits, and its faults over a long life mended.

Each adapter says what would happen without it. They reach into py-libp2p where it offers no setting for it.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, cast

import libp2p.network.swarm
import trio
from libp2p import new_host
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.network.exceptions import SwarmException
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from multiaddr import Multiaddr

from llmnode.net.secure import noise_transport
from llmnode.net.yamux import YamuxConnection, use_yamux

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from libp2p.abc import IHost, IMuxedConn, IRawConnection
    from libp2p.crypto.keys import KeyPair
    from libp2p.network.swarm import Swarm

    from llmnode.core.policy import LinkPolicy


@contextlib.asynccontextmanager
async def open_host(
    key_pair: KeyPair, listen: Sequence[Multiaddr], policy: LinkPolicy, announce: Sequence[Multiaddr] = ()
) -> AsyncIterator[IHost]:
    """A running host of this identity. TCP, Noise and yamux alone: its default would accept plaintext as well.

    It tells others the addresses `announce`, if any, instead of those it listens at.
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
    host = new_host(
        key_pair=key_pair,
        sec_opt={NOISE: noise_transport(key_pair)},
        listen_addrs=listen or [Multiaddr("/ip4/127.0.0.1/tcp/0")],  # says which transports to load
        connection_config=limits,
        announce_addrs=announce or None,
    )
    swarm = cast("Swarm", host.get_network())
    use_yamux(host)
    _free_inbound_slots(swarm)
    _dial_when_told(swarm)
    async with host.run(listen_addrs=listen):
        # It would dial whoever we have ever met, and most eagerly whom we have just left.
        await swarm.auto_connector.stop()
        try:
            yield host
        finally:
            with trio.CancelScope(shield=True):  # or the port would stay taken, by nobody, until the process ends
                for listener in list(swarm.listeners.values()):
                    await listener.close()


def _free_inbound_slots(swarm: Swarm) -> None:
    """It keeps the task of an inbound connection, and its slot, until the host ends: full for good after so many."""
    upgrade = swarm.upgrade_inbound_raw_conn

    async def upgrade_and_stay(raw_conn: IRawConnection, address: Multiaddr) -> IMuxedConn:
        connection = await upgrade(raw_conn, address)
        assert isinstance(connection, YamuxConnection)
        await connection.event_ended.wait()
        raise SwarmException("the connection is over")  # its caller ends, instead of waiting for the swarm

    swarm.upgrade_inbound_raw_conn = upgrade_and_stay  # type: ignore[method-assign, assignment]


def _dial_when_told(swarm: Swarm) -> None:
    """It would try a dead address four times, for 0.7 s, and then not again for a minute: not even if asked to."""
    swarm.retry_config = RetryConfig(max_retries=0)
    swarm._negative_peer_cache = libp2p.network.swarm._NegativePeerCache(ttl=0.0)
