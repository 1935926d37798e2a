"""Connections over which a server pushes results to next hops, and which of them it could not reach lately."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from functools import partial
from itertools import count
from typing import TYPE_CHECKING

import trio

from llmnode.core.fair_places import FairPlaces
from llmnode.core.ids import PeerId
from llmnode.core.peers.bans import Bans
from llmnode.core.rates import Rates
from llmnode.errors import ConfigError, PeerError, PeerRefused, PeerUnreachable
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.policy import ServePolicy
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)


class NextHops:
    """Connections that all sessions of a server share. Without a pool every hop goes through its client."""

    def __init__(
        self, pool: ConnectionPool | None, addresses: Callable[[PeerId], Sequence[str] | None], policy: ServePolicy
    ) -> None:
        """`addresses` are those of a peer that serves the same model, None for any other peer."""
        self.numbers = count(1)
        """Each right to push has one of its own (`push_right.py`)."""
        self.returned: Counter[tuple[str, PeerId]] = Counter()
        """Since the last question, by the address group of the client and by the next hop: pushes that were made, and
        withdrawals that were counted and not sent. There are no more keys than there were sessions then.
        """
        self._pool = pool
        self._addresses = addresses
        self._policy = policy
        self._sought = Rates(policy.hops_sought_burst, policy.hops_sought_per_s)
        self._rights = Rates(policy.rights_burst, policy.rights_per_s)
        self._unreached = Bans(policy.redial_s, policy.longest_redial_s)
        self._asking: dict[PeerId, trio.Event] = {}
        self._answered: dict[PeerId, tuple[PeerConnection, float]] = {}
        self._kept = FairPlaces[PeerId](policy.hops_kept)
        """The peers to which connections were opened here, by the address groups of the clients."""

    async def find(self, peer: PeerId, group: str, since_s: float, *, again: bool) -> PeerConnection:
        """Any open connection to `peer`; with `again`, one over which the peer has answered after `since_s`.

        `group` is the address group of the client that asks. Others find their next hops, however many it names.

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
        if peer not in self._asking:
            is_new = self._known(pool, peer, None) is None
            if is_new and not (self._has_place(pool, group) and self._sought.take(group, trio.current_time())):
                raise no_next_hop(peer)
            self._asking[peer] = trio.Event()
            pool.start_soon(partial(self._ask, pool, peer, group if is_new else None))
        if not again:
            with trio.move_on_after(self._policy.dial_patience_s):
                await self._asking[peer].wait()
            if (connection := self._known(pool, peer, since_s)) is not None:
                return connection
        raise no_next_hop(peer)

    def may_ask(self, group: str, peer: PeerId, questions: int) -> bool:
        """Whether a next hop may be asked for a right to push now, for a client of this address group.

        The next hop looks at a limited number of questions of this server, over the links that all pushes go over. It
        gives back one for each push that it uses itself, so pushes to other next hops do not count here.
        """
        now_s = trio.current_time()
        for key, returned in self.returned.items():
            self._rights.give_back(key, now_s, returned)
        self.returned.clear()
        return self._rights.take((group, peer), now_s, questions)

    def _known(self, pool: ConnectionPool, peer: PeerId, since_s: float | None) -> PeerConnection | None:
        """A connection with an answer after `since_s`; any open one if that is None."""
        if since_s is None:
            return next((each for each in pool.living() if each.peer == peer), None)
        connection, answered_s = self._answered.get(peer, (None, 0.0))
        return connection if connection is not None and answered_s >= since_s and not connection.has_ended else None

    def _has_place(self, pool: ConnectionPool, group: str) -> bool:
        """Whether one more connection may be kept for clients of this address group."""
        kept = self._connections(pool)
        return len(kept) < self._policy.hops_kept or self._victim(kept, group) is not None

    def _connections(self, pool: ConnectionPool) -> dict[PeerId, list[PeerConnection]]:
        """Those that were opened here and live, of each peer, the oldest first. One over a relay may go on beside a
        direct one, and after it.
        """
        living: defaultdict[PeerId, list[PeerConnection]] = defaultdict(list)
        for each in pool.all_open():
            living[each.peer].append(each)
        for peer in [each for each in self._kept if each not in living]:
            self._kept.leave(peer)
        return {peer: living[peer] for peer in self._kept}

    def _victim(self, kept: Mapping[PeerId, Sequence[PeerConnection]], group: str) -> PeerId | None:
        """The one that makes way when there are too many: the oldest to which no session pushes, or else the newest of
        another address group that has more. None if there is none.
        """
        unused = (peer for peer, connections in kept.items() if not any(each.is_listened_to for each in connections))
        return next(unused, None) or self._kept.victim(group)

    async def _keep(self, pool: ConnectionPool, connection: PeerConnection, group: str) -> None:
        """Keep a new connection, for which another one may have to end.

        Clients choose the next hops, which may be their own. One stranger could have all places of this server. Raises
        PeerUnreachable if others were faster.
        """
        kept, leaving = self._connections(pool), None
        if len(kept) >= self._policy.hops_kept and (leaving := self._victim(kept, group)) is None:
            await connection.end()
            raise PeerUnreachable("others have the places for next hops", peer=connection.peer)
        if leaving is not None:
            self._kept.leave(leaving)
        self._kept.put(connection.peer, group)
        for each in kept[leaving] if leaving is not None else ():
            await each.end()

    async def _ask(self, pool: ConnectionPool, peer: PeerId, group: str | None) -> None:
        """Ask the peer something: an open connection may be dead.

        A failure takes the whole time, whatever the cause. It counts for the address group, if one is given.
        """
        self._answered = {each: way for each, way in self._answered.items() if not way[0].has_ended}
        timeout_s = self._policy.connect_timeout_s
        try:
            with trio.move_on_after(timeout_s):
                try:
                    addresses = self._addresses(peer)
                    if addresses is None:
                        raise PeerUnreachable("not known to serve this model", peer=peer)
                    connection = await pool.connect(addresses)
                    if group is not None:
                        await self._keep(pool, connection, group)
                    await connection.best.describe(timeout_s)
                    self._answered[peer] = connection, trio.current_time()
                    if group is not None:
                        self._sought.give_back(group, trio.current_time())
                    return
                except (PeerError, ConfigError) as error:  # the peer's address is wrong, not the user's
                    log.debug("no next hop peer=%s: %s", peer, error)
                    await trio.sleep_forever()
            self._unreached.report(peer, trio.current_time())
        finally:
            self._asking.pop(peer).set()


def no_next_hop(peer: PeerId) -> PeerRefused:
    return PeerRefused(RefusalCode.CANNOT_FORWARD, "no connection to the next hop", peer=peer)
