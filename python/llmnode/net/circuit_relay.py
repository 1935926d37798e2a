"""A relay's side of circuits: it reserves for peers that cannot be dialled, and connects others with them.

The bytes of a circuit are encrypted from end to end: a relay sees only the peers, the times and the amounts. Every
request ends as a status, within a deadline; the limits are in `RelayPolicy`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast
from weakref import WeakSet

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from llmnode.core.fair_places import FairPlaces
from llmnode.errors import PeerError, RemoteProtocolError
from llmnode.net.addresses import tcp_address
from llmnode.net.admission import groups_of
from llmnode.net.circuit_splice import Splices
from llmnode.net.circuit_wire import STOP, leave, name_of, receive, send
from llmnode.net.connections import connection_of, is_relayed, open_stream
from llmnode.net.yamux import YamuxConnection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from libp2p.abc import IMuxedConn, INetStream
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream

    from llmnode.core.policy import RelayPolicy
    from llmnode.net.connections import HeldConnections

log = logging.getLogger(__name__)

ADDRESSES_TOLD = 8
PEER_ID_BYTES = 64
"""The longest that a key of any kind makes is 34 or 42."""


class Refused(Exception):
    """A request is answered with this status, which is not OK."""

    def __init__(self, status: pb.Status.ValueType) -> None:
        super().__init__(name_of(status))
        self.status = status


@dataclass(eq=False, slots=True)
class Reservation:
    """A peer that we connect others with, over this connection of it, for as long as `life` goes on."""

    peer: ID
    connection: SwarmConn
    group: str = field(init=False)
    host: str = field(init=False)
    """Its address groups. Each request is compared with those of all reservations, so they are not worked out again."""
    life: trio.CancelScope = field(default_factory=trio.CancelScope)
    is_displaced: bool = False

    def __post_init__(self) -> None:
        self.group, self.host = groups_of(self.connection.muxed_conn)


@dataclass(eq=False, slots=True)
class Circuit:
    """It lives until its `life` is over, and `ended` says that nothing of it is left."""

    target: ID
    life: trio.CancelScope
    ended: trio.Event = field(default_factory=trio.Event)


@dataclass(frozen=True, slots=True)
class RelayCounts:
    """The grants that a relay still holds."""

    reservations: int
    circuits: int


class Relay:
    """Its `take_request` is the handler of HOP streams. It tells others that it is reached at `addresses`."""

    def __init__(
        self,
        nursery: trio.Nursery,
        policy: RelayPolicy,
        held: HeldConnections,
        addresses: Callable[[], Sequence[str]],
    ) -> None:
        self._nursery = nursery
        self._policy = policy
        self._held = held
        self._addresses = addresses
        self._reservations: dict[ID, Reservation] = {}
        self._reserved = FairPlaces[Reservation](policy.reservations)
        self._circuits = FairPlaces[Circuit](policy.circuits)
        self._circuits_to: dict[ID, FairPlaces[Circuit]] = {}
        self._circuits_of: Counter[ID | str] = Counter()
        """Those that a peer or an address group has asked for."""
        self._circuits_over: Counter[IMuxedConn] = Counter()
        """Those that go over a connection, from its peer or to it."""
        self._displaced: WeakSet[IMuxedConn] = WeakSet()
        """The connections whose reservation has made way. They are to end."""
        self._splices = Splices(policy)

    def count(self) -> RelayCounts:
        return RelayCounts(len(self._reservations), len(self._circuits))

    async def take_request(self, stream: INetStream) -> None:
        """libp2p calls this, in a task of its own, for each stream that a peer opens to ask us for something."""
        net_stream = cast("NetStream", stream)
        in_order = False
        try:
            with trio.move_on_after(self._policy.handshake_s) as patience:
                request = await self._receive(net_stream)
                if request.type == pb.HopMessage.RESERVE:
                    await self._reserve(net_stream)
                    in_order = True
                else:
                    in_order = await self._connect(net_stream, request.peer.id, patience)
        except Refused as refusal:
            in_order = await self._say(net_stream, refusal.status)
        except (PeerError, BaseLibp2pError) as error:
            log.debug("request peer=%s ended: %s", stream.muxed_conn.peer_id, error)
        finally:
            await leave(net_stream, in_order=in_order)

    async def _receive(self, stream: NetStream) -> pb.HopMessage:
        """Read a request. Raises Refused if it is none, or PeerUnreachable."""
        try:
            request = await receive(stream.muxed_stream, pb.HopMessage())
        except RemoteProtocolError as error:
            log.info("malformed request peer=%s: %s", stream.muxed_conn.peer_id, error.message)
            raise Refused(pb.MALFORMED_MESSAGE) from None
        if not request.HasField("type"):
            raise Refused(pb.MALFORMED_MESSAGE)
        if request.type not in (pb.HopMessage.RESERVE, pb.HopMessage.CONNECT):
            raise Refused(pb.UNEXPECTED_MESSAGE)
        if is_relayed(connection_of(stream)):
            raise Refused(pb.PERMISSION_DENIED)  # a circuit within a circuit
        return request

    async def _say(self, stream: NetStream, status: pb.Status.ValueType) -> bool:
        """Whether it could be said."""
        with trio.move_on_after(self._policy.handshake_s), contextlib.suppress(PeerError):
            await send(stream.muxed_stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=status))
            return True
        return False

    # Reservations

    async def _reserve(self, stream: NetStream) -> None:
        """Raises Refused, PeerUnreachable."""
        self._grant(connection_of(stream))
        addresses = [Multiaddr(each).to_bytes() for each in list(self._addresses())[:ADDRESSES_TOLD]]
        expires_s = int(time.time() + self._policy.reservation_s)
        reservation = pb.Reservation(expire=expires_s, addrs=addresses)
        answer = pb.HopMessage(type=pb.HopMessage.STATUS, status=pb.OK, reservation=reservation, limit=self._limit())
        await send(stream.muxed_stream, answer)

    def _grant(self, connection: SwarmConn) -> None:
        """A peer's own reservation is renewed; over another connection, it goes there. Raises Refused.

        When all places are taken, the newest of the address group that holds most goes to one of another group.
        """
        peer = connection.muxed_conn.peer_id
        found = self._reservations.get(peer)
        if found is None or found.connection is not connection:
            wanted, policy = Reservation(peer, connection), self._policy
            others = [each for each in self._reservations.values() if each is not found]
            of_host = sum(each.host == wanted.host for each in others)
            of_group = sum(each.group == wanted.group for each in others)
            if of_host >= policy.reservations_per_host or of_group >= policy.reservations_per_group:
                raise Refused(pb.RESERVATION_REFUSED)
            if found is not None:
                self._reserved.leave(found)
                found.life.cancel()
            elif not self._reserved.has_place(wanted.group):
                raise Refused(pb.RESERVATION_REFUSED)
            if (victim := self._reserved.victim(wanted.group)) is not None:
                victim.is_displaced = True
                self._end(victim)
            found = self._reservations[peer] = wanted
            self._displaced.discard(connection.muxed_conn)
            self._reserved.put(wanted, wanted.group)
            self._nursery.start_soon(self._keep, found)
            log.info("reservation peer=%s", peer)
        found.life.deadline = trio.current_time() + self._policy.reservation_s

    async def _keep(self, reservation: Reservation) -> None:
        """It ends with its connection, when it is not renewed, and when it makes way.

        Then its peer has to know: its connection ends, too, after the last circuit over it. Links do not keep it: nodes
        have one to their relay.
        """
        connection = cast("YamuxConnection", reservation.connection.muxed_conn)
        with self._held.hold(connection), reservation.life:
            await connection.event_ended.wait()
        self._end(reservation)
        if reservation.is_displaced:
            self._displaced.add(connection)
            self._end_displaced(connection)

    def _end_displaced(self, connection: YamuxConnection) -> None:
        if connection in self._displaced and not self._circuits_over[connection]:
            connection.end()

    @contextlib.contextmanager
    def _goes_over(self, *connections: IMuxedConn) -> Iterator[None]:
        """A circuit goes over these."""
        self._circuits_over.update(connections)
        try:
            yield
        finally:
            self._circuits_over.subtract(connections)
            self._circuits_over = +self._circuits_over
            for each in connections:
                self._end_displaced(cast("YamuxConnection", each))

    def _end(self, reservation: Reservation) -> None:
        reservation.life.cancel()
        self._reserved.leave(reservation)
        if self._reservations.get(reservation.peer) is reservation:
            del self._reservations[reservation.peer]
            log.info("reservation ended peer=%s", reservation.peer)

    # Circuits

    async def _connect(self, stream: NetStream, peer_bytes: bytes, patience: trio.CancelScope) -> bool:
        """Until the circuit has ended: whether in order. `patience` is that of a circuit from when it stands.

        Raises Refused, PeerUnreachable.
        """
        source = stream.muxed_conn
        if not 0 < len(peer_bytes) <= PEER_ID_BYTES:
            raise Refused(pb.MALFORMED_MESSAGE)
        reservation = self._reservations.get(ID(peer_bytes))
        if reservation is None or reservation.life.deadline <= trio.current_time():
            raise Refused(pb.NO_RESERVATION)
        target = reservation.connection
        around, group = cast("YamuxConnection", source).scope, groups_of(source)[0]
        with (
            self._slot(Circuit(reservation.peer, patience), source.peer_id, group) as displaced,
            self._splices.memory(around) as piece_bytes,
            self._held.hold(source),
            self._held.hold(target.muxed_conn),
            self._goes_over(source, target.muxed_conn),
        ):
            if not piece_bytes:
                raise Refused(pb.RESOURCE_LIMIT_EXCEEDED)
            for each in displaced:
                await each.ended.wait()  # its place at the target is free then, too
            far = await self._reach(target, source, patience)
            in_order = False
            try:
                answer = pb.HopMessage(
                    type=pb.HopMessage.STATUS, status=pb.OK, limit=self._limit(), peer=_seen(target.muxed_conn)
                )
                await send(stream.muxed_stream, answer)
                log.info("circuit from=%s to=%s", source.peer_id, reservation.peer)
                patience.deadline = trio.current_time() + self._policy.circuit_s
                path = group, source.peer_id.to_base58()
                in_order = await self._splices.splice(stream.muxed_stream, far.muxed_stream, path, piece_bytes)
            finally:
                await leave(far, in_order=in_order)
            return in_order

    @contextlib.contextmanager
    def _slot(self, circuit: Circuit, source: ID, group: str) -> Iterator[list[Circuit]]:
        """Gives the circuits that have to make way, and end. Raises Refused if there are too many already.

        The asking peer and its address group have limits. No group keeps another out that holds fewer of all circuits,
        or of those to the target.
        """
        policy = self._policy
        holders: tuple[ID | str, ...] = (source, group)
        limits = (policy.circuits_per_peer, policy.circuits_per_group)
        to_target = self._circuits_to.get(circuit.target) or FairPlaces[Circuit](policy.circuits_per_peer)
        is_full = any(self._circuits_of[each] >= most for each, most in zip(holders, limits, strict=True))
        if is_full or not (to_target.has_place(group) and self._circuits.has_place(group)):
            raise Refused(pb.RESOURCE_LIMIT_EXCEEDED)
        displaced = []
        for places in (to_target, self._circuits):
            if (victim := places.victim(group)) is not None:
                victim.life.cancel()
                self._leave(victim)
                displaced.append(victim)
        self._circuits_to[circuit.target] = to_target
        for places in (to_target, self._circuits):
            places.put(circuit, group)
        self._circuits_of.update(holders)
        try:
            yield displaced
        finally:
            self._leave(circuit)
            circuit.ended.set()
            self._circuits_of.subtract(holders)
            self._circuits_of = +self._circuits_of

    def _leave(self, circuit: Circuit) -> None:
        """Its places are those of others now."""
        self._circuits.leave(circuit)
        if (to_target := self._circuits_to.get(circuit.target)) is not None:
            to_target.leave(circuit)
            if not to_target:
                del self._circuits_to[circuit.target]

    async def _reach(self, target: SwarmConn, source: IMuxedConn, patience: trio.CancelScope) -> NetStream:
        """A stream over which a peer takes a circuit from `source`. Raises Refused: whatever fails is its fault."""
        with trio.CancelScope() as scope:
            # Our own refusal has to reach the waiting peer in time, so the asked peer gets half of the patience.
            scope.deadline = trio.current_time() + (patience.deadline - trio.current_time()) / 2
            with contextlib.suppress(PeerError, BaseLibp2pError):
                far = await open_stream(target, STOP, self._policy.handshake_s)
                if await self._is_taken(far, source):
                    return far
        raise Refused(pb.CONNECTION_FAILED)

    async def _is_taken(self, far: NetStream, source: IMuxedConn) -> bool:
        taken = False
        try:
            request = pb.StopMessage(type=pb.StopMessage.CONNECT, peer=_seen(source), limit=self._limit())
            await send(far.muxed_stream, request)
            answer = await receive(far.muxed_stream, pb.StopMessage())
            taken = answer.type == pb.StopMessage.STATUS and answer.status == pb.OK
        finally:
            if not taken:
                await leave(far, in_order=False)
        return taken

    def _limit(self) -> pb.Limit:
        return pb.Limit(duration=int(self._policy.circuit_s), data=self._policy.circuit_bytes)


def _seen(connection: IMuxedConn) -> pb.PeerId:
    """A peer and the address at which we see it: the two ends of a circuit may punch there, and nowhere else.

    An address of our own link, which is one of IPv6 with an interface, means nothing to others.
    """
    place = cast("YamuxConnection", connection).get_remote_address()
    addresses = [] if place is None or "%" in place[0] else [tcp_address(*place).to_bytes()]
    return pb.PeerId(id=connection.peer_id.to_bytes(), addrs=addresses)
