"""From a relayed connection to a direct one, through NATs: DCUtR over TCP.

https://github.com/libp2p/specs/blob/master/relay/DCUtR.md. Two peers that are connected through a relay tell each other
how they are seen from there. Then they dial each other at once, each from the port of its own connection to the relay.
Its NAT has opened that port already, and takes the incoming dial for an answer. The peer that was dialled through the
relay begins. The peer that dialled is the client of the new connection, for Noise and all above. A failed attempt
leaves the two connected as they were.

A stranger says what we dial, so that is little: one IP address, through the gate of all dials (`dialling.py`).
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import trio
from libp2p.abc import INotifee
from libp2p.custom_types import TProtocol
from libp2p.exceptions import BaseLibp2pError
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr.exceptions import Error as MultiaddrError

from llmnode.core.address_groups import address_groups
from llmnode.core.fair_places import FairPlaces
from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import may_be_dialled, place_in, tcp_address
from llmnode.net.admission import groups_of
from llmnode.net.circuit_wire import CircuitConnection, leave, receive, send
from llmnode.net.connections import is_relayed, open_stream
from llmnode.net.dialling import connect_from
from llmnode.net.identify import identify
from llmnode.net.yamux import YamuxConnection

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from libp2p.abc import IHost, IMuxedConn, INetConn, INetStream, INetwork
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

    from llmnode.core.policy import PunchPolicy
    from llmnode.net.connections import HeldConnections
    from llmnode.net.dialling import Gate

log = logging.getLogger(__name__)

PUNCH = TProtocol("/libp2p/dcutr")
FAILURES = (PeerError, BaseLibp2pError, MultiaddrError, OSError, ValueError, trio.TooSlowError)


@dataclass(frozen=True, slots=True)
class Door:
    """Our end of a connection to a relay: where it is here, and how it is seen from there."""

    host: str
    port: int
    seen_host: str
    seen_port: int


class Puncher(INotifee):
    """Punches for one host, which tells it of connections. Its tasks end with `nursery`."""

    def __init__(
        self, host: IHost, nursery: trio.Nursery, policy: PunchPolicy, held: HeldConnections, gate: Gate
    ) -> None:
        self._gate = gate
        self._swarm = cast("Swarm", host.get_network())
        self._nursery = nursery
        self._policy = policy
        self._held = held
        self._came = trio.Event()  # a direct connection, from or to anybody
        self._places = FairPlaces[trio.CancelScope](policy.at_once)
        self._beginning: set[ID] = set()
        self._dialling: dict[ID, trio.CancelScope] = {}
        self._tries: WeakKeyDictionary[IMuxedConn, deque[float]] = WeakKeyDictionary()
        """When we were lately asked over a connection."""

    def start(self, host: IHost) -> None:
        """Take part when others begin, and begin with peers that dial us through a relay."""
        host.set_stream_handler(PUNCH, self.take_stream)
        self._swarm.register_notifee(self)

    async def wait_direct(self, peer: ID) -> SwarmConn:
        """Until there is a direct connection to `peer`."""
        while (connection := self._held.direct(peer)) is None:
            await self._came.wait()
        return connection

    # The side that was dialled

    async def connected(self, network: INetwork, conn: INetConn) -> None:
        connection = cast("SwarmConn", conn)
        if not is_relayed(connection):
            self._came.set()
            self._came = trio.Event()
        elif not _muxed(connection).is_initiator and self._policy.tries:
            self._nursery.start_soon(self._keep_beginning, connection)

    async def _keep_beginning(self, relayed: SwarmConn) -> None:
        """While it lasts: one side may have been too busy, or a direct connection not known to be dead yet."""
        ended = _muxed(relayed).event_ended
        for pause_s in self._policy.pauses_s():
            while (direct := self._held.direct(_muxed(relayed).peer_id)) is not None and not ended.is_set():
                await _wait_any(_muxed(direct).event_ended, ended)
            await self._begin(relayed)
            with trio.move_on_after(pause_s):
                await ended.wait()
            if ended.is_set():
                return

    async def _begin(self, relayed: SwarmConn) -> None:
        peer = _muxed(relayed).peer_id
        if peer in self._beginning:
            return
        self._beginning.add(peer)
        try:
            with self._place(relayed):
                for number in range(1, self._policy.tries + 1):
                    # The last attempt is the other way round, like go-libp2p's: our dial may have been taken for that
                    # of a client.
                    is_client = number == self._policy.tries > 1
                    if await self._try(relayed, is_client=is_client):
                        return
                    if number == 1 and await self._dial_openly(relayed):
                        return
        except FAILURES as error:
            log.debug("stays relayed peer=%s: %s", peer, error)
        finally:
            self._beginning.remove(peer)

    @contextlib.contextmanager
    def _place(self, relayed: SwarmConn) -> Iterator[None]:
        """Holds one of the places for peers with which we punch at the same time. The context ends early if it has to
        make way for another address group. Raises PeerUnreachable if there is none.
        """
        group = _group(relayed)
        if not self._places.has_place(group):
            raise PeerUnreachable("too many others punch already")
        if (victim := self._places.victim(group)) is not None:
            self._places.leave(victim)
            victim.cancel()
        scope = trio.CancelScope()
        self._places.put(scope, group)
        try:
            with scope:
                yield
        finally:
            self._places.leave(scope)

    async def _try(self, relayed: SwarmConn, *, is_client: bool) -> bool:
        """Whether there is a direct connection then. Raises one of FAILURES if the other side does not take part."""
        with trio.fail_after(self._policy.talk_s):
            door = await self._door(relayed)
            stream = await open_stream(relayed, PUNCH, self._policy.talk_s)
            in_order = False
            try:
                began_s = trio.current_time()
                await send(stream.muxed_stream, _connect(door))
                theirs = await self._receive_addresses(stream, door, relayed)
                half_s = (trio.current_time() - began_s) / 2
                await send(stream.muxed_stream, HolePunch(type=HolePunch.SYNC))
                in_order = True
            finally:
                await leave(stream, in_order=in_order)
            await trio.sleep(half_s)
        return await self._punch(relayed, door, theirs, is_client=is_client)

    async def _dial_openly(self, relayed: SwarmConn) -> bool:
        """Dial the other side's listening address, which perhaps everybody reaches. A dial that is not answered takes
        long to fail.
        """
        peer = _muxed(relayed).peer_id
        with trio.move_on_after(self._policy.dial_s):
            door = await self._door(relayed)
            said = await identify(relayed, self._policy.talk_s)
            for host, port in self._permitted(said.places, door, relayed):
                with contextlib.suppress(*FAILURES):
                    direct = cast("SwarmConn", await self._swarm.dial_addr(tcp_address(host, port), peer))
                    self._nursery.start_soon(self._settle, direct)
                    return True
        return False

    # The side that dialled

    async def take_stream(self, stream: INetStream) -> None:
        """libp2p calls this for each stream over which a peer asks us to dial each other."""
        net_stream = cast("NetStream", stream)
        relayed, in_order = net_stream.swarm_conn, False
        assert relayed is not None
        try:
            with trio.fail_after(self._policy.talk_s):
                self._check_may_ask(relayed)
                door = await self._door(relayed)
                theirs = await self._receive_addresses(net_stream, door, relayed)
                await send(net_stream.muxed_stream, _connect(door))
                if (await receive(net_stream.muxed_stream, HolePunch())).type != HolePunch.SYNC:
                    raise RemoteProtocolError("no SYNC where it is due")
            in_order = True
            self._nursery.start_soon(self._follow, relayed, door, theirs)
        except FAILURES as error:
            log.debug("stays relayed peer=%s: %s", stream.muxed_conn.peer_id, error)
        finally:
            await leave(net_stream, in_order=in_order)

    def _check_may_ask(self, relayed: SwarmConn) -> None:
        """Raises RemoteProtocolError."""
        if not is_relayed(relayed) or not _muxed(relayed).is_initiator:
            raise RemoteProtocolError("only who was dialled through a relay asks")
        if not self._places.has_place(_group(relayed)):
            raise PeerUnreachable("too many others punch already")
        tries, now_s = self._tries.setdefault(relayed.muxed_conn, deque()), trio.current_time()
        while tries and tries[0] <= now_s - self._policy.again_s:
            tries.popleft()
        if len(tries) >= self._policy.tries:
            raise RemoteProtocolError(f"asks more than {self._policy.tries} times in {self._policy.again_s:g} s")
        tries.append(now_s)

    async def _follow(self, relayed: SwarmConn, door: Door, theirs: Sequence[tuple[str, int]]) -> None:
        with contextlib.suppress(PeerUnreachable), self._place(relayed):
            await self._punch(relayed, door, theirs, is_client=True)

    # Both

    async def _door(self, relayed: SwarmConn) -> Door:
        """Raises one of FAILURES."""
        circuit = _circuit(relayed)
        local, relay = _muxed(circuit.to_relay).get_local_address(), _muxed(circuit.to_relay).get_remote_address()
        said = await identify(circuit.to_relay, self._policy.talk_s)
        seen = said.seen_at
        if local is None or relay is None or seen is None or not may_be_dialled(*seen, relay[0]):
            raise PeerUnreachable("the relay does not say how it sees us")
        return Door(*local, *seen)

    async def _receive_addresses(self, stream: NetStream, door: Door, relayed: SwarmConn) -> list[tuple[str, int]]:
        """Raises PeerError."""
        message = await receive(stream.muxed_stream, HolePunch())
        if message.type != HolePunch.CONNECT:
            raise RemoteProtocolError("no CONNECT where it is due")
        named = [place for each in message.ObsAddrs if (place := place_in(each)) is not None]
        addresses = self._permitted(named, door, relayed)
        if not addresses:
            raise RemoteProtocolError("names no address that we would dial")
        return addresses

    def _permitted(self, named: Iterable[tuple[str, int]], door: Door, relayed: SwarmConn) -> list[tuple[str, int]]:
        """The addresses that we dial, out of those that a peer names: all are at one IP address.

        Our relays say at which they see the peer. Without that it is the first one that the peer names.
        """
        permitted: dict[tuple[str, int], None] = {}
        host = _circuit(relayed).seen_host
        for place in named:
            if may_be_dialled(*place, door.seen_host) and place[0] == (host or place[0]):
                host = place[0]
                permitted[place] = None
        return list(permitted)[: self._policy.addresses]

    async def _punch(
        self, relayed: SwarmConn, door: Door, theirs: Sequence[tuple[str, int]], *, is_client: bool
    ) -> bool:
        """Dial repeatedly until the time is up or there is a direct connection, ours or theirs. Returns whether there
        is one.
        """
        peer, direct = _muxed(relayed).peer_id, None
        upgrades: list[trio.CancelScope] = []
        if (former := self._dialling.get(peer)) is not None:
            former.cancel()
        scope = self._dialling[peer] = trio.CancelScope(deadline=trio.current_time() + self._policy.dial_s)
        try:
            with scope:
                async with trio.open_nursery() as nursery:
                    for place in theirs:
                        nursery.start_soon(self._dial, door, place, peer if is_client else None, upgrades)
                    direct = await self.wait_direct(peer)
                    nursery.cancel_scope.cancel()
        finally:
            if direct is None:
                for upgrade in upgrades:
                    upgrade.cancel()
            if self._dialling.get(peer) is scope:
                del self._dialling[peer]
        if direct is None:
            return False
        self._nursery.start_soon(self._settle, direct)
        return True

    async def _dial(
        self, door: Door, place: tuple[str, int], server: ID | None, upgrades: list[trio.CancelScope]
    ) -> None:
        """Run until cancelled. Attempts that have begun go on until `upgrades` end. Without a `server`, we are it.

        For the gate all attempts are one dial.
        """
        pause_s = self._policy.redial_s
        with contextlib.suppress(OpenConnectionError):
            async with self._gate.dialling(place, is_repeated=True):
                while True:
                    with contextlib.suppress(OSError):
                        stream = await connect_from((door.host, door.port), place)
                        raw, over = RawConnection(TrioTCPStream(stream), initiator=server is not None), trio.Event()
                        upgrades.append(trio.CancelScope())
                        self._nursery.start_soon(self._upgrade, raw, place, server, upgrades[-1], over)
                        await over.wait()
                    await trio.sleep(pause_s)
                    pause_s = min(2 * pause_s, self._policy.longest_redial_s)

    async def _upgrade(
        self, raw: RawConnection, place: tuple[str, int], server: ID | None, scope: trio.CancelScope, over: trio.Event
    ) -> None:
        """For as long as the handshake takes; as the server, for as long as the connection lasts."""
        try:
            with scope, contextlib.suppress(*FAILURES):
                if server is None:
                    await self._swarm.upgrade_inbound_raw_conn(raw, tcp_address(*place))
                else:
                    await self._swarm.upgrade_outbound_raw_conn(raw, server)
        finally:
            over.set()

    async def _settle(self, direct: SwarmConn) -> None:
        """Keep a new connection until links have moved to it. Then the useless one ends, this or the relayed one."""
        peer = _muxed(direct).peer_id
        log.info("direct peer=%s", peer)
        with self._held.hold(direct.muxed_conn):
            await trio.sleep(self._policy.grace_s)
        await self._held.close_unused(peer)

    # Other events of a host

    async def disconnected(self, network: INetwork, conn: INetConn) -> None: ...

    async def opened_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def closed_stream(self, network: INetwork, stream: INetStream) -> None: ...

    async def listen(self, network: INetwork, multiaddr: Multiaddr) -> None: ...

    async def listen_close(self, network: INetwork, multiaddr: Multiaddr) -> None: ...


def _circuit(relayed: SwarmConn) -> CircuitConnection:
    circuit = _muxed(relayed).secured_conn.raw
    assert isinstance(circuit, CircuitConnection)
    return circuit


def _muxed(connection: SwarmConn) -> YamuxConnection:
    return cast("YamuxConnection", connection.muxed_conn)


def _group(relayed: SwarmConn) -> str:
    """The address group of the other side, as a relay of ours tells it; else that of the relay, which may say anything.

    A peer dials us through a relay of ours.
    """
    muxed = _muxed(relayed)
    seen_host = None if muxed.is_initiator else _circuit(relayed).seen_host
    return groups_of(muxed)[0] if seen_host is None else address_groups(seen_host)[0]


async def _wait_any(*events: trio.Event) -> None:
    async def wait(event: trio.Event) -> None:
        await event.wait()
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for event in events:
            nursery.start_soon(wait, event)


def _connect(door: Door) -> HolePunch:
    return HolePunch(type=HolePunch.CONNECT, ObsAddrs=[tcp_address(door.seen_host, door.seen_port).to_bytes()])
