"""Connections over which a server pushes results to next hops, and which of them it could not reach lately."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.bans import Bans
from llmnode.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ServePolicy
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)


class NextHops:
    """They serve all sessions of a server. Without a pool every hop goes through its client."""

    def __init__(
        self, pool: ConnectionPool | None, addresses: Callable[[PeerId], Sequence[str] | None], policy: ServePolicy
    ) -> None:
        """`addresses` are those of a peer that serves the same model, None of any other."""
        self._pool = pool
        self._addresses = addresses
        self._policy = policy
        self._unreached = Bans(policy.redial_s, policy.longest_redial_s)
        self._proving: dict[PeerId, trio.Event] = {}
        self._proved: dict[PeerId, tuple[PeerConnection, float]] = {}

    async def find(self, peer: PeerId, since_s: float, *, again: bool) -> PeerConnection:
        """A connection to `peer`: one that is there, or, if it is asked for `again`, over which it has answered since.

        Raises PeerRefused if there is none, always in the same words, and after times that do not depend on the cause:
        a client must not learn what is at an address that it has announced. A peer that could not be reached is not
        tried again for a while, for all sessions.
        """
        pool = self._pool
        if pool is None:
            raise no_next_hop(peer)
        if (connection := self._known(pool, peer, since_s if again else None)) is not None:
            return connection
        if self._unreached.is_banned(peer, trio.current_time()):
            raise no_next_hop(peer)
        if peer not in self._proving:
            self._proving[peer] = trio.Event()
            pool.start_soon(partial(self._prove, pool, peer))
        if not again:
            with trio.move_on_after(self._policy.dial_patience_s):
                await self._proving[peer].wait()
            if (connection := self._known(pool, peer, since_s)) is not None:
                return connection
        raise no_next_hop(peer)

    def _known(self, pool: ConnectionPool, peer: PeerId, since_s: float | None) -> PeerConnection | None:
        """Over which it has answered since then; by None, any that is there."""
        if since_s is None:
            return next((each for each in pool.living() if each.peer == peer), None)
        connection, proved_s = self._proved.get(peer, (None, 0.0))
        return connection if connection is not None and proved_s >= since_s and not connection.has_ended else None

    async def _prove(self, pool: ConnectionPool, peer: PeerId) -> None:
        """It has to answer: a connection that is there, or that a link was opened over, may be dead meanwhile.

        A failure takes the whole time, whatever the cause.
        """
        self._proved = {each: way for each, way in self._proved.items() if not way[0].has_ended}
        timeout_s = self._policy.connect_timeout_s
        try:
            with trio.move_on_after(timeout_s):
                try:
                    addresses = self._addresses(peer)
                    if addresses is None:
                        raise PeerUnreachable("not known to serve this model", peer=peer)
                    connection = await pool.connect(addresses)
                    await connection.best.describe(timeout_s)
                    self._proved[peer] = connection, trio.current_time()
                    return
                except (PeerError, ConfigError) as error:  # of what the peer says of itself, and not the user
                    log.debug("no next hop peer=%s: %s", peer, error)
                    await trio.sleep_forever()
            self._unreached.report(peer, trio.current_time())
        finally:
            self._proving.pop(peer).set()


def no_next_hop(peer: PeerId) -> PeerRefused:
    return PeerRefused(RefusalCode.CANNOT_FORWARD, "no connection to the next hop", peer=peer)
