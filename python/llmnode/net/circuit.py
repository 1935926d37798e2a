"""A node's side of circuits: connections through relays to peers that cannot be dialled, and to us if we cannot.

A circuit is a connection like any other, with Noise and yamux of its own between its two ends. Each holds the
connection to the relay, which goes with the last that uses it. Relays themselves are in `circuit_relay.py`.
"""

from __future__ import annotations

import contextlib
import logging
import time
from typing import TYPE_CHECKING, NoReturn, cast

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.peerinfo import PeerInfo
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from llmnode.core.ids import PeerId
from llmnode.core.peers.whereabouts import CIRCUIT
from llmnode.errors import PeerError, PeerUnreachable, RemoteProtocolError
from llmnode.net.addresses import circuit_address, host_and_port
from llmnode.net.circuit_wire import HOP, CircuitConnection, leave, name_of, receive, send
from llmnode.net.connections import connection_of, open_stream
from llmnode.net.explain import explain_failure, innermost
from llmnode.net.pings import close_when_silent
from llmnode.net.sockets import with_ips

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Iterator, Sequence

    from libp2p.abc import IHost, INetStream
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID

    from llmnode.core.policy import CircuitPolicy, LinkPolicy
    from llmnode.net.connections import HeldConnections
    from llmnode.net.yamux import YamuxConnection

log = logging.getLogger(__name__)

REASONS = {
    pb.NO_RESERVATION: "it has no reservation at the relay: it has stopped, or lost the relay",
    pb.CONNECTION_FAILED: "the relay cannot reach it, or it refuses circuits",
    pb.RESOURCE_LIMIT_EXCEEDED: "the relay is full",
    pb.RESERVATION_REFUSED: "the relay is full",
    pb.PERMISSION_DENIED: "the relay does not permit it",
}


class Circuits:
    """The circuits of one host, from us and to us. Its tasks end with `nursery`."""

    def __init__(
        self,
        host: IHost,
        nursery: trio.Nursery,
        link_policy: LinkPolicy,
        policy: CircuitPolicy,
        held: HeldConnections,
        connect: Callable[[PeerInfo], Awaitable[None]],
    ) -> None:
        """`connect` has a direct connection to a relay: it dials the address that is given, and no other."""
        self._connect_directly = connect
        self._host = host
        self._swarm = cast("Swarm", host.get_network())
        self._nursery = nursery
        self._link_policy = link_policy
        self._policy = policy
        self._held = held
        self._reserved: dict[ID, Sequence[str]] = {}  # our addresses by relay, in the order in which these were named
        self._changed = trio.Event()

    @property
    def addresses(self) -> list[str]:
        """Where we are reached through relays that have reserved for us, and not refused it since."""
        return [address for addresses in self._reserved.values() for address in addresses]

    async def wait_changed(self) -> None:
        """Until `addresses` are others."""
        await self._changed.wait()

    # From us

    async def connect(self, relay: PeerInfo, peer: ID) -> None:
        """Have a connection to `peer` through `relay`. Raises PeerUnreachable, or an error of libp2p."""
        await self._nursery.start(self._hold_circuit, relay, peer)

    async def _hold_circuit(self, relay: PeerInfo, peer: ID, task_status: trio.TaskStatus[None]) -> None:
        try:
            with contextlib.ExitStack() as holds:
                if relay.peer_id == self._host.get_id():
                    raise PeerUnreachable("it is said to be reached through us, and is not connected to us")
                request = pb.HopMessage(type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=peer.to_bytes()))
                stream = await self._open(relay, holds)
                agreed = await _agree(stream, request)
                address = Multiaddr(f"{relay.addrs[0]}/p2p/{relay.peer_id}{CIRCUIT}")
                circuit = CircuitConnection(stream, address, agreed, is_initiator=True)
                try:
                    connection = await self._swarm.upgrade_outbound_raw_conn(circuit, peer)
                    task_status.started()
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(close_when_silent, connection_of(stream), self._link_policy)
                        await cast("YamuxConnection", connection.muxed_conn).event_ended.wait()
                        nursery.cancel_scope.cancel()
                finally:
                    await circuit.finish(self._link_policy.farewell_s)
        finally:
            await self._held.close_unused(relay.peer_id)

    async def _open(self, relay: PeerInfo, holds: contextlib.ExitStack) -> NetStream:
        """A stream for a request to `relay`; `holds` has its connection from now on. Raises PeerUnreachable."""
        with self._held.hold(relay.peer_id):
            try:
                await self._connect_directly(relay)
            except (BaseLibp2pError, OSError) as error:
                why = explain_failure(error, relay.addrs[0])
                raise PeerUnreachable(f"cannot connect to the relay at {relay.addrs[0]} {why}") from error
            try:
                stream = cast("NetStream", await self._host.new_stream(relay.peer_id, [HOP]))
            except (BaseLibp2pError, OSError) as error:
                log.info("peer=%s opens no stream for circuits: %s", relay.peer_id, innermost(error))
                why = f"the node at {relay.addrs[0]} does not relay: name one that `llmnode relay` started"
                raise PeerUnreachable(why) from error
            holds.enter_context(self._held.hold(stream.muxed_conn))
        return stream

    # Reservations

    def start_reserving(self, relay: PeerInfo, tried: Callable[[PeerUnreachable | None], None]) -> None:
        """Have `relay` reserve for us, and again whenever that has ended. `tried` gets the result of each attempt."""
        self._reserved[relay.peer_id] = ()
        self._nursery.start_soon(self._keep_reservation, relay, tried)

    async def _keep_reservation(self, relay: PeerInfo, tried: Callable[[PeerUnreachable | None], None]) -> NoReturn:
        pause_s = self._policy.retry_s
        while True:
            try:
                with contextlib.ExitStack() as holds:
                    connection, lifetime_s = await self._reserve(relay, holds)
                    pause_s = self._policy.retry_s
                    self._note(relay, await self._addresses_at(relay))
                    tried(None)
                    await self._renew(relay, connection, lifetime_s)
            except PeerUnreachable as error:
                log.info("no reservation relay=%s: %s", relay.peer_id, error.message)
                tried(error)
            finally:
                self._note(relay, ())
                await self._held.close_unused(relay.peer_id)
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, self._policy.longest_retry_s)

    async def _reserve(self, relay: PeerInfo, holds: contextlib.ExitStack) -> tuple[SwarmConn, float]:
        """The connection that the reservation lives with, and for how long it holds. Raises PeerUnreachable."""
        with _patience(relay, self._link_policy.dial_timeout_s), self._held.hold(relay.peer_id):
            await self._dial_from_where_we_listen(relay)
            stream = await self._open(relay, holds)
            return connection_of(stream), await _agree_to_reserve(stream)

    async def _dial_from_where_we_listen(self, relay: PeerInfo) -> None:
        """Dial the relay from our listening port, so that NATs have that port open and peers that punch through reach
        us. Failing is silent.
        """
        version = next(iter(relay.addrs[0].protocols())).name
        ports = [
            host_and_port(each) for each in self._host.get_transport_addrs() if str(each).startswith(f"/{version}/")
        ]
        if ports and not self._held.living(relay.peer_id):
            with contextlib.suppress(BaseLibp2pError, OSError):
                await self._swarm.dial_addr(relay.addrs[0], relay.peer_id, ports[0])

    async def _renew(self, relay: PeerInfo, connection: SwarmConn, lifetime_s: float) -> None:
        """Until the connection has ended. Raises PeerUnreachable if the relay does not renew it."""
        error = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(close_when_silent, connection, self._link_policy)
            while error is None:
                wait_s = min(lifetime_s * self._policy.renew_share, self._policy.renew_within_s)
                with trio.move_on_after(max(wait_s, self._policy.renew_least_s)):
                    await cast("YamuxConnection", connection.muxed_conn).event_ended.wait()
                    error = PeerUnreachable("connection lost")
                    break
                try:
                    with _patience(relay, self._link_policy.dial_timeout_s):
                        lifetime_s = await _agree_to_reserve(
                            await open_stream(connection, HOP, self._link_policy.dial_timeout_s)
                        )
                except PeerUnreachable as refused:
                    error = refused
                except BaseLibp2pError as broken:
                    error = PeerUnreachable(f"connection lost ({innermost(broken)})")
            nursery.cancel_scope.cancel()
        assert error is not None
        raise error

    async def _addresses_at(self, relay: PeerInfo) -> Sequence[str]:
        """If the relay is named by DNS, those at its IP addresses too: others dial no name of a stranger."""
        relays = [PeerInfo(relay.peer_id, [each]) for each in await with_ips(relay.addrs[:1])]
        return [circuit_address(each, self._host.get_id()) for each in relays]

    def _note(self, relay: PeerInfo, addresses: Sequence[str]) -> None:
        if self._reserved[relay.peer_id] != addresses:
            self._reserved[relay.peer_id] = addresses
            self._changed.set()
            self._changed = trio.Event()

    # To us

    async def take_circuit(self, stream: INetStream) -> None:
        """libp2p calls this for each stream that a relay opens: over it somebody connects to us, as over a socket."""
        net_stream = cast("NetStream", stream)
        try:
            with self._held.hold(stream.muxed_conn):
                await self._serve(net_stream)
        except (PeerError, BaseLibp2pError, OSError, ValueError) as error:
            log.debug("circuit through relay=%s ended: %s", stream.muxed_conn.peer_id, error)
            await leave(net_stream, in_order=False)

    async def _serve(self, stream: NetStream) -> None:
        """Until the circuit has ended. Raises PeerError, or an error of libp2p, as when it has."""
        try:
            with trio.fail_after(self._policy.handshake_s):
                request = await self._let_in(stream)
        except trio.TooSlowError:
            raise PeerUnreachable("the relay does not say who wants to connect") from None
        if request is None:
            await leave(stream, in_order=True)
            return
        address = Multiaddr(f"/p2p/{stream.muxed_conn.peer_id}{CIRCUIT}")
        circuit = CircuitConnection(stream, address, request, is_initiator=False)
        try:
            await self._swarm.upgrade_inbound_raw_conn(circuit, address)
        finally:
            await circuit.finish(self._link_policy.farewell_s)

    async def _let_in(self, stream: NetStream) -> pb.StopMessage | None:
        """The relay's request, None if we do not take it. Raises PeerError.

        Noise proves the caller's identity: the relay's word is not needed.
        """
        status, request = pb.OK, pb.StopMessage()
        try:
            request = await receive(stream.muxed_stream, request)
            if not request.HasField("type") or not request.peer.id:
                status = pb.MALFORMED_MESSAGE
            elif request.type != pb.StopMessage.CONNECT:
                status = pb.UNEXPECTED_MESSAGE
            elif stream.muxed_conn.peer_id not in self._reserved:
                status = pb.PERMISSION_DENIED
        except RemoteProtocolError as error:
            log.info("malformed circuit relay=%s: %s", stream.muxed_conn.peer_id, error.message)
            status = pb.MALFORMED_MESSAGE
        await send(stream.muxed_stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=status))
        return request if status == pb.OK else None


async def _agree_to_reserve(stream: NetStream) -> float:
    """For how long the relay has reserved, by its clock and ours. Raises PeerUnreachable."""
    answer = await _agree(stream, pb.HopMessage(type=pb.HopMessage.RESERVE))
    await leave(stream, in_order=True)
    return answer.reservation.expire - time.time()


async def _agree(stream: NetStream, request: pb.HopMessage) -> pb.HopMessage:
    """The relay's answer that agrees to `request`. Raises PeerUnreachable that says why it does not."""
    agreed = False
    try:
        await send(stream.muxed_stream, request)
        answer = await receive(stream.muxed_stream, pb.HopMessage())
        if answer.type != pb.HopMessage.STATUS:
            raise RemoteProtocolError("circuit: no status")
        if answer.status != pb.OK:
            raise PeerUnreachable(REASONS.get(answer.status, f"the relay refuses: {name_of(answer.status)}"))
        agreed = True
        return answer
    except RemoteProtocolError as error:
        raise PeerUnreachable(f"the relay breaks the protocol: {error.message}") from error
    finally:
        if not agreed:
            await leave(stream, in_order=False)


@contextlib.contextmanager
def _patience(relay: PeerInfo, timeout_s: float) -> Iterator[None]:
    """Raises PeerUnreachable of the relay, whatever is wrong with it."""
    peer = PeerId(relay.peer_id.to_base58())
    try:
        with trio.fail_after(timeout_s):
            yield
    except trio.TooSlowError:
        raise PeerUnreachable(f"no answer from the relay at {relay.addrs[0]}", peer=peer) from None
    except PeerUnreachable as error:
        error.blame(peer)
        raise
