"""Links over a libp2p host: dialled, accepted, ended. A peer id is always proved by its key.

Knows nothing of models and sessions.
"""

from __future__ import annotations

import contextlib
from functools import partial
from typing import TYPE_CHECKING, cast

import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.network.exceptions import SwarmException
from libp2p.network.stream.exceptions import StreamError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from llmnode.core.account import Account
from llmnode.core.budget import Kind, Resource, Worth
from llmnode.core.ids import PeerId
from llmnode.core.links.send_rates import SendRates
from llmnode.core.peers.nat import judge
from llmnode.core.policy import CircuitPolicy, ReachPolicy
from llmnode.core.traffic import TrafficMeter
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import (
    all_reachable,
    host_and_port,
    of_peer,
    own_ips,
    parse_announced,
    parse_listen,
    parse_peer,
    parse_relay,
    peer_at_ip,
    relay_of,
    tcp_address,
    versions_of,
    with_peer,
)
from llmnode.net.admission import ConnectionAdmission
from llmnode.net.circuit import Circuits
from llmnode.net.circuit_relay import Relay, RelayCounts
from llmnode.net.circuit_wire import HOP, STOP, limit_bytes_of
from llmnode.net.connections import HeldConnections, OpenCounts, is_relayed
from llmnode.net.explain import explain_failure
from llmnode.net.identity import is_signed, opened
from llmnode.net.libp2p_host import open_host
from llmnode.net.link import Libp2pLink, LinkOwner
from llmnode.net.listeners import check_bindable
from llmnode.net.negotiated import NegotiatedStream, link_protocol
from llmnode.net.punch import Puncher
from llmnode.net.reach import AUTONAT, DialBacks, look
from llmnode.net.select import open_unanswered
from llmnode.net.sockets import with_ips
from llmnode.wire.frame import LINK_VERSIONS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Sequence
    from pathlib import Path

    from libp2p.abc import IHost, IMuxedConn, INetStream
    from libp2p.network.stream.net_stream import NetStream
    from libp2p.network.swarm import Swarm
    from libp2p.peer.peerinfo import PeerInfo

    from llmnode.core.peers.nat import Reach
    from llmnode.core.policy import LinkPolicy, RelayPolicy
    from llmnode.core.traffic import Traffic
    from llmnode.net.yamux import YamuxConnection

LINK_PROTOCOL = link_protocol(LINK_VERSIONS[0])
ACCEPT_QUEUE = 16
"""Links opened to us that nobody has taken yet; more are refused."""


@contextlib.asynccontextmanager
async def open_network(
    listen: Sequence[str],
    policy: LinkPolicy,
    identity: Path | bytes | None = None,
    announce: Sequence[str] = (),
    swarm_key: bytes | None = None,
    relays: Sequence[str] = (),
    relay_policy: RelayPolicy | None = None,
    circuit_policy: CircuitPolicy | None = None,
) -> AsyncIterator[Libp2pNetwork]:
    """Run a host that listens at the multiaddrs `listen`; none means that it only dials.

    Others are told that it is at `announce`, by default where it listens. Its identity is that in the file `identity`,
    or of that key, by default a fresh one. With the `swarm_key` of a private swarm it links with its members alone (see
    `swarm_key.py`). A node that is reached through `relays` announces these and `announce`, and not the addresses where
    it listens: others would first try those in vain. With a `relay_policy` it is a relay itself.

    Raises ConfigError for an address that is malformed, of another transport, or taken, and for a file that holds no
    identity; PeerUnreachable if none of `relays` reserves for us at first.
    """
    addresses = [parse_listen(address) for address in listen]
    for address in addresses:
        check_bindable(address)
    announced = [parse_announced(address) for address in announce]
    reserving = {relay.peer_id: relay for relay in map(parse_relay, relays)}
    admission = ConnectionAdmission(policy)
    for relay in reserving.values():
        admission.gate.vouch(relay.addrs[0], relay.peer_id)
    async with contextlib.AsyncExitStack() as stack:
        key_pair = stack.enter_context(opened(identity))
        peer = PeerId(ID.from_pubkey(key_pair.public_key).to_base58())
        told = [of_peer(address, peer) for address in await with_ips(announced)]
        host = await stack.enter_async_context(open_host(key_pair, addresses, policy, told, swarm_key, admission))
        nursery = await stack.enter_async_context(trio.open_nursery())
        network = Libp2pNetwork(
            host,
            nursery,
            policy,
            circuit_policy or CircuitPolicy(),
            admission,
            listens=bool(addresses),
            announced=[str(each) for each in told],
            reserves=bool(reserving),
        )
        for version in LINK_VERSIONS:
            host.set_stream_handler(link_protocol(version), partial(network.take_stream, version))
        if addresses:
            dial_backs = DialBacks(cast("Swarm", host.get_network()), admission.gate, ReachPolicy())
            host.set_stream_handler(AUTONAT, dial_backs.take_request)
        try:
            if relay_policy is not None:
                network.serve_circuits(relay_policy)
            if reserving:
                await network.reserve(list(reserving.values()))
            yield network
        finally:
            nursery.cancel_scope.cancel()


class Libp2pNetwork:
    """The `Network` port over a running libp2p host. Made by `open_network`."""

    def __init__(
        self,
        host: IHost,
        nursery: trio.Nursery,
        policy: LinkPolicy,
        circuit_policy: CircuitPolicy,
        admission: ConnectionAdmission,
        *,
        listens: bool,
        announced: Sequence[str] = (),
        reserves: bool = False,
    ) -> None:
        self.host = host
        self.peer = PeerId(host.get_id().to_base58())
        self._key = host.get_private_key()
        self._nursery = nursery
        self.budget = admission.budget
        self._gate = admission.gate
        self._policy = policy
        self._listens = listens
        self._announced = announced
        self._reserves = reserves
        self._traffic = TrafficMeter()
        self.send_rates = SendRates()
        self._links: dict[Libp2pLink, IMuxedConn] = {}
        self._opened, self._accepted = trio.open_memory_channel[Libp2pLink](ACCEPT_QUEUE)
        self._held = HeldConnections(host, policy, self._asked)
        self._circuits = Circuits(host, nursery, policy, circuit_policy, self._held, self._connect)
        self._puncher = Puncher(host, nursery, circuit_policy.punch, self._held, admission.gate)
        self._puncher.start(host)
        self._relay: Relay | None = None
        self._dialling: dict[tuple[ID, Multiaddr], trio.Lock] = {}
        nursery.start_soon(self._held.end_unused, admission)
        self._gate.live_at(parse_peer(each).addrs[0] for each in announced or self.listening)

    @property
    def addresses(self) -> list[str]:
        if self._announced or self._reserves:
            return [*self._announced, *self._circuits.addresses]
        return [str(each) for each in self.host.get_addrs()] if self._listens else []

    async def wait_addresses_changed(self) -> None:
        """Until a relay through which we are reached is lost or there again."""
        await self._circuits.wait_changed()

    @property
    def listening(self) -> list[str]:
        """Where it listens, whatever it announces: multiaddrs that end in `/p2p/ID`."""
        here = self.host.get_transport_addrs() if self._listens else ()
        return all_reachable([with_peer(each, self.peer) for each in here])

    def count_open(self) -> OpenCounts:
        connections = cast("Swarm", self.host.get_network()).get_connections()
        streams = sum(len(connection.get_streams()) for connection in connections)
        granted = RelayCounts(0, 0) if self._relay is None else self._relay.count()
        return OpenCounts(
            links=len(self._links),
            relayed=sum(link.relayed for link in self._links),
            circuits=granted.circuits,
            reservations=granted.reservations,
            connections=len(connections),
            streams=streams,
        )

    @property
    def traffic(self) -> Traffic:
        return self._traffic.total

    @property
    def key(self) -> bytes:
        return self._key.to_bytes()

    def sign(self, message: bytes) -> bytes:
        return self._key.sign(message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return is_signed(peer, message, signature)

    def vouch(self, addresses: Iterable[str]) -> None:
        for info in map(parse_peer, addresses):
            dialled = relay_of(info) or info
            self._gate.vouch(dialled.addrs[0], dialled.peer_id)

    def note_near(self, address: str) -> None:
        """A peer in our own network says that it is there (see `mdns.py`), or was there. Raises ConfigError."""
        info = parse_peer(address)
        self._gate.note_near((relay_of(info) or info).addrs[0])

    async def dial(self, address: str, *, is_heard: bool = False) -> Libp2pLink:
        info = parse_peer(address)
        if not is_heard:
            self.vouch([address])
        peer = PeerId(info.peer_id.to_base58())
        link = None
        try:
            with trio.fail_after(self._policy.dial_timeout_s):
                await self._until_ended_links_are_gone(peer)
                with self._held.hold(info.peer_id):
                    await self._connect(info)
                    stream = await open_unanswered(self.host, info.peer_id, LINK_PROTOCOL)
                    link = self._link(NegotiatedStream(stream, LINK_VERSIONS), peer)
                    self._links[link] = stream.muxed_conn
        except trio.TooSlowError:
            if place := host_and_port(info.addrs[0]):
                self._gate.report(place, reached=False, peer=info.peer_id)
            why = f"no answer from {address} in {self._policy.dial_timeout_s:g} s: it hangs, or a firewall is between"
            raise PeerUnreachable(why, peer=peer) from None
        except PeerUnreachable as error:
            raise PeerUnreachable(f"cannot connect to {address}: {error.message}", peer=peer) from error
        except (BaseLibp2pError, SwarmException, StreamError, OSError) as error:
            why = f"cannot connect to {address} {explain_failure(error, info.addrs[0])}"
            raise PeerUnreachable(why, peer=peer) from error
        finally:
            if link is None:
                # A connection over which no stream could be opened would be given to the next dial as well.
                await self._held.close_unused(info.peer_id)
        self._nursery.start_soon(self._run, link, stream.muxed_conn)
        await self._held.close_superseded(info.peer_id)
        return link

    async def _connect(self, info: PeerInfo) -> None:
        """Have a connection, a direct one for a direct address: links go over that, whatever else there is.

        Raises PeerUnreachable, or an error of libp2p.
        """
        if (relay := relay_of(info)) is not None:
            if not self._held.living(info.peer_id):
                await self._circuits.connect(relay, info.peer_id)
            return
        async with self._one_dial(info):
            if self._held.direct(info.peer_id) is None:
                # `connect` would find a relayed one enough, and dial the first address that it has ever heard of.
                await cast("Swarm", self.host.get_network()).dial_addr(info.addrs[0], info.peer_id)

    @contextlib.asynccontextmanager
    async def _one_dial(self, info: PeerInfo) -> AsyncIterator[None]:
        """Nobody else dials this peer at this address meanwhile."""
        place = info.peer_id, info.addrs[0]
        lock = self._dialling.setdefault(place, trio.Lock())
        try:
            async with lock:
                yield
        finally:
            if not lock.locked():
                self._dialling.pop(place, None)

    async def look(self, addresses: Iterable[str], policy: ReachPolicy) -> Reach | None:
        """How the peers at `addresses` see us, and whether they can dial us where we listen, or say that we do.

        Those that are not at an IP address, but behind a relay or nowhere, are not asked. Nor are those of a version of
        IP over which we say that nobody reaches us. None if nobody answers.
        """
        versions = versions_of(self._announced or self.listening)
        peers = [info for each in addresses if (info := peer_at_ip(each)) and versions_of(info.addrs) <= versions]
        ports = {int(Multiaddr(each).value_for_protocol("tcp")) for each in (*self._announced, *self.listening)}
        sights = await look(
            cast("Swarm", self.host.get_network()),
            self._gate,
            self._held,
            peers[: policy.peers],
            lambda host: [tcp_address(host, port) for port in sorted(ports)],
            policy,
        )
        return judge(sights, {str(ip) for ip in own_ips()})

    async def reserve(self, relays: Sequence[PeerInfo]) -> None:
        """Let `relays`, all different, make this node reachable from now on.

        Raises PeerUnreachable if none of them reserves for us at first.
        """
        self.host.set_stream_handler(STOP, self._circuits.take_circuit)
        attempts: dict[ID, PeerUnreachable | None] = {}
        all_tried = trio.Event()

        def note(relay: PeerInfo, error: PeerUnreachable | None) -> None:
            attempts.setdefault(relay.peer_id, error)
            if len(attempts) == len(relays):
                all_tried.set()

        for relay in relays:
            self._circuits.start_reserving(relay, partial(note, relay))
        await all_tried.wait()
        first, *_ = attempts.values()
        if first is not None and all(attempts.values()):
            raise first

    def serve_circuits(self, policy: RelayPolicy) -> None:
        """Be a relay for any peer that asks, within `policy`."""
        self._relay = Relay(self._nursery, policy, self._held, lambda: self.addresses)
        self.host.set_stream_handler(HOP, self._relay.take_request)

    @contextlib.asynccontextmanager
    async def accept(self) -> AsyncIterator[Libp2pLink]:
        link = await self._accepted.receive()
        try:
            yield link
        finally:
            await link.end("no longer served")

    async def take_stream(self, version: int, stream: INetStream) -> None:
        """libp2p calls this, in a task of its own, for each stream that a peer opens with one of our protocols."""
        agreed = NegotiatedStream(cast("NetStream", stream), [version])
        link = self._link(agreed, PeerId(stream.muxed_conn.peer_id.to_base58()))
        try:
            living = [each for each in self._links_with(link.peer) if not each.has_ended]
            if len(living) >= self._policy.links_per_peer or not link.scope.take(Resource.LINKS, 1):
                raise trio.WouldBlock
            self._opened.send_nowait(link)
        except trio.WouldBlock:
            # Not left waiting: until somebody reads it, libp2p would keep all that the peer sends.
            link.scope.close()
            await stream.reset()
            return
        await self._run(link, stream.muxed_conn)

    async def _run(self, link: Libp2pLink, connection: IMuxedConn) -> None:
        self._links[link] = connection
        muxed = cast("YamuxConnection", connection)
        muxed.scope.worth = max(muxed.scope.worth, Worth.LINK)
        muxed.farewells[link] = link.say_full
        try:
            await link.run()
        finally:
            del muxed.farewells[link]
            link.scope.close()
            del self._links[link]

    def _asked(self) -> dict[IMuxedConn, float]:
        """The connections with links, and when the other side last asked for something over one of them."""
        asked: dict[IMuxedConn, float] = {}
        for link, connection in self._links.items():
            asked[connection] = max(link.asked_s, asked.get(connection, link.asked_s))
        return asked

    def _links_with(self, peer: PeerId) -> list[Libp2pLink]:
        return [link for link in self._links if link.peer == peer]

    async def _until_ended_links_are_gone(self, peer: PeerId) -> None:
        """A connection goes down with its link: a dial meanwhile would get the dying one."""
        for link in self._links_with(peer):
            if link.has_ended:
                await link.wait_closed()

    def _link(self, stream: NegotiatedStream, peer: PeerId) -> Libp2pLink:
        connection = stream.connection

        async def drop() -> None:
            """A connection goes with its last link, if nothing else holds it. It goes too if it is silent, which its
            other holders would find out too late. This one alone: the peer may have dialled again already.
            """
            with trio.move_on_after(self._policy.farewell_s, shield=True):
                muxed = cast("YamuxConnection", connection.muxed_conn)
                used = list(self._links.values()).count(muxed) > 1 or self._held.is_held(muxed)
                if used and not muxed.is_silent(2 * self._policy.heartbeat_s):
                    await stream.reset()
                else:
                    await connection.close()

        async def wait_direct() -> None:
            await self._puncher.wait_direct(connection.muxed_conn.peer_id)

        scope = cast("YamuxConnection", connection.muxed_conn).scope
        return Libp2pLink(
            stream,
            peer,
            self._policy,
            LinkOwner(drop, self._traffic, self.send_rates, wait_direct),
            Account(scope.open(Kind.LINK, peer), Resource.MEMORY),
            relayed=is_relayed(connection),
            relay_limit_bytes=limit_bytes_of(connection),
        )
