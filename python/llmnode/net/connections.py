"""Tells which of a host's connections are in use besides links, and opens streams over a particular one of them.

A connection goes with its last link, unless somebody holds it: a reservation, a circuit, a dial that is under way.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import trio
from libp2p.connection_types import ConnectionType
from libp2p.network.connection.swarm_connection import SwarmConn
from libp2p.peer.id import ID
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

from llmnode.core.budget import Resource, Worth
from llmnode.net.select import EagerSelect, reset_if_it_fails

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from libp2p.abc import IHost, IMuxedConn, INetConn, INetStream
    from libp2p.custom_types import TProtocol
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm

    from llmnode.core.policy import BudgetPolicy, LinkPolicy
    from llmnode.net.admission import ConnectionAdmission
    from llmnode.net.yamux import YamuxConnection

log = logging.getLogger(__name__)

LOOK_EVERY_S = 1.0
"""Unused connections are looked for this often."""
PLACES = Resource.CONNECTIONS, Resource.INBOUND, Resource.LINKS
"""The resources of which a connection holds one each, with a link."""


@dataclass(frozen=True, slots=True)
class OpenCounts:
    """How many links, connections and streams a network has open now. `relayed` links go through a relay. `circuits` go
    through us.

    `streams` are those of all protocols: links, and libp2p's own.
    """

    links: int
    relayed: int
    circuits: int
    reservations: int
    connections: int
    streams: int


class HeldConnections:
    """The connections that are in use, by links or by other holders."""

    def __init__(self, host: IHost, policy: LinkPolicy, asked: Callable[[], Mapping[IMuxedConn, float]]) -> None:
        """`asked` gives the connections with links, and when the other side last asked for something over these."""
        self._swarm = cast("Swarm", host.get_network())
        self._policy = policy
        self._asked = asked
        self._held: Counter[IMuxedConn | ID] = Counter()

    @contextlib.contextmanager
    def hold(self, what: IMuxedConn | ID) -> Iterator[None]:
        """Keep a connection open, or any to a peer as long as it is not known which it will be."""
        self._held[what] += 1
        for each in self._swarm.get_connections(what) if isinstance(what, ID) else [what]:
            self._note_use(
                cast("YamuxConnection", each.muxed_conn if isinstance(each, SwarmConn) else each), has_link=False
            )
        try:
            yield
        finally:
            self._held[what] -= 1
            if not self._held[what]:
                del self._held[what]

    def is_held(self, connection: IMuxedConn) -> bool:
        return connection in self._held or connection.peer_id in self._held

    def _is_unused(self, connection: IMuxedConn) -> bool:
        return not self.is_held(connection) and connection not in self._asked()

    async def end_unused(self, admission: ConnectionAdmission) -> None:
        """Until cancelled, end connections that nothing uses for a while; sooner if there are many connections.

        Says for all of them how much they are worth when there are too many. Where places are few, a link over which
        nobody asks for anything is no use, whatever its heartbeats.
        """
        policy = admission.policy
        unused_since: dict[IMuxedConn, float] = {}
        while True:
            await trio.sleep(min(LOOK_EVERY_S, policy.crowded_idle_s, policy.idle_s))
            connections = cast("list[SwarmConn]", self._swarm.get_connections())
            held = admission.budget.process.held[Resource.CONNECTIONS]
            is_crowded = held > policy.crowded_share * policy.connections
            idle_s = policy.crowded_idle_s if is_crowded else policy.idle_s
            now_s, before, asked = trio.current_time(), unused_since, self._asked()
            unused_since = {}
            for connection in connections:
                muxed = cast("YamuxConnection", connection.muxed_conn)
                asked_s = asked.get(muxed)
                if asked_s is not None and asked_s < now_s - policy.idle_link_s and self._is_short(muxed, policy):
                    asked_s = None
                if self._note_use(muxed, has_link=asked_s is not None):
                    continue
                since_s = unused_since[muxed] = max(before.get(muxed, now_s), muxed.used_s)
                if now_s - since_s >= idle_s:
                    log.debug("unused connection ends peer=%s", muxed.peer_id)
                    muxed.end()

    def _is_short(self, muxed: YamuxConnection, policy: BudgetPolicy) -> bool:
        """Whether places are few where this connection of others has one."""
        is_ours = muxed.scope.worth is Worth.OURS
        return not is_ours and any(muxed.scope.is_taken(each, policy.crowded_share) for each in PLACES)

    def _note_use(self, muxed: YamuxConnection, *, has_link: bool) -> bool:
        """Whether anything uses it. A session over a link does, too."""
        scope, is_held = muxed.scope, self.is_held(muxed)
        if scope.worth is Worth.OURS:
            scope.runs = Worth.USED if is_held or has_link else Worth.NOTHING
            return scope.runs is Worth.USED
        scope.worth = Worth.USED if is_held else Worth.LINK if has_link else Worth.NOTHING
        return scope.use is not Worth.NOTHING

    def living(self, peer: ID) -> list[SwarmConn]:
        """All connections to `peer`."""
        connections = cast("list[SwarmConn]", self._swarm.get_connections(peer))
        return [connection for connection in connections if not connection.is_closed]

    def direct(self, peer: ID) -> SwarmConn | None:
        """A connection to `peer` that goes through no relay."""
        return next((connection for connection in self.living(peer) if not is_relayed(connection)), None)

    async def close_unused(self, peer: ID) -> None:
        """Close the connections to `peer` that are of no use to anybody."""
        await self._close_unused(self.living(peer))

    async def close_superseded(self, peer: ID) -> None:
        """Close its relayed connections that are of no use to anybody, if there is a direct one."""
        if self.direct(peer) is not None:
            await self._close_unused([each for each in self.living(peer) if is_relayed(each)])

    async def _close_unused(self, connections: Iterable[SwarmConn]) -> None:
        with trio.move_on_after(self._policy.farewell_s, shield=True):
            for connection in connections:
                muxed = connection.muxed_conn
                if self._is_unused(muxed):
                    await connection.close()


def is_relayed(connection: INetConn) -> bool:
    return connection.get_connection_type() is ConnectionType.RELAYED


async def open_stream(connection: SwarmConn, protocol: TProtocol, timeout_s: float) -> NetStream:
    """A stream over this connection and no other. Raises an error of libp2p, as if there is no such protocol."""
    stream = await connection.new_stream()
    async with reset_if_it_fails(stream):
        await EagerSelect().select_one_of([protocol], MultiselectCommunicator(stream), max(1, int(timeout_s)))
    stream.set_protocol(protocol)
    return stream


def connection_of(stream: INetStream) -> SwarmConn:
    """Over which the stream goes; libp2p types it as optional."""
    connection = cast("NetStream", stream).swarm_conn
    assert connection is not None
    return connection
