"""Connections over which a server pushes results to next hops, and which of them it could not reach lately."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.bans import Bans
from llmnode.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.client.connection import Connection
    from llmnode.client.pool import ConnectionPool
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import ServePolicy


class NextHops:
    """Of all sessions of a server. Without a pool every hop goes through its client."""

    def __init__(
        self, pool: ConnectionPool | None, addresses: Callable[[PeerId], Sequence[str] | None], policy: ServePolicy
    ) -> None:
        """`addresses` are those of a peer that serves the same model, None of any other."""
        self._pool = pool
        self._addresses = addresses
        self._policy = policy
        self._unreached = Bans(policy.redial_s, policy.longest_redial_s)
        self._proving: set[PeerId] = set()
        self._proved: dict[PeerId, tuple[Connection, float]] = {}

    async def find(self, peer: PeerId, since_s: float | None) -> Connection:
        """A connection to `peer`; with `since_s`, at once, and one over which it has answered since then.

        Raises PeerError for one that has announced no part of our model, or that cannot be reached, which is found out
        once for all sessions. It says when to ask again if that is being found out.
        """
        addresses = self._addresses(peer)
        if self._pool is None or addresses is None:
            raise PeerUnreachable("not known to serve this model", peer=peer)
        if since_s is not None:
            return self._find_again(self._pool, peer, addresses, since_s)
        if self._unreached.is_banned(peer, trio.current_time()):
            raise PeerUnreachable("could not be reached lately", peer=peer)
        try:
            with trio.fail_after(self._policy.connect_timeout_s):
                return await self._pool.connect(addresses)
        except (PeerUnreachable, ConfigError, trio.TooSlowError):  # of what the peer says of itself, and not the user
            self._unreached.report(peer, trio.current_time())
            raise PeerUnreachable("cannot be reached from here", peer=peer) from None

    def _find_again(self, pool: ConnectionPool, peer: PeerId, addresses: Sequence[str], since_s: float) -> Connection:
        connection, proved_s = self._proved.get(peer, (None, 0.0))
        if connection is not None and proved_s >= since_s and not connection.has_ended:
            return connection
        if self._unreached.is_banned(peer, trio.current_time()):
            raise PeerUnreachable("could not be reached lately", peer=peer)
        if peer not in self._proving:
            self._proving.add(peer)
            pool.start_soon(partial(self._prove, pool, peer, addresses))
        patience_s = self._policy.connect_timeout_s
        raise PeerRefused(RefusalCode.CANNOT_FORWARD, "is being dialled", retry_after_s=patience_s, peer=peer)

    async def _prove(self, pool: ConnectionPool, peer: PeerId, addresses: Sequence[str]) -> None:
        """A connection that is there may be dead without anybody knowing yet: it has to answer."""
        self._proved = {each: way for each, way in self._proved.items() if not way[0].has_ended}
        timeout_s = self._policy.connect_timeout_s
        try:
            with trio.fail_after(timeout_s):
                connection = await pool.connect(addresses)
                await connection.best.describe(timeout_s)
        except (PeerError, ConfigError, trio.TooSlowError):
            self._unreached.report(peer, trio.current_time())
        else:
            self._proved[peer] = connection, trio.current_time()
        finally:
            self._proving.discard(peer)
