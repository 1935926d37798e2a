"""The gate under every dial of a host (`core/peers/dial_gate.py`), at the sockets; and names that the system knows.

Everything dials through here, whatever it thinks of an address: links, relays, the DHT, hole punching and dial-backs.
No other file opens a connection.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from typing import TYPE_CHECKING

import trio
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr.exceptions import Error as MultiaddrError

from llmnode.core.budget import Resource
from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import DialGate
from llmnode.net.addresses import place_of, tcp_address
from llmnode.net.explain import root_of
from llmnode.net.secure import AnotherPeer
from llmnode.net.sockets import ips_of, remote_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Sequence

    from libp2p.abc import IRawConnection
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.transport.tcp.tcp import TCP
    from multiaddr import Multiaddr

    from llmnode.core.budget import Scope
    from llmnode.core.policy import DialPolicy
    from llmnode.net.addresses import Place


ABORT = struct.pack("ii", 1, 0)
"""The SO_LINGER option for an abort: a socket that is closed is gone at once, so that its two addresses can be used
again."""
SHARE_OF_STRANGERS = 0.75
"""Dials to addresses that strangers have named may take this share of all dials that are under way."""


class Gate:
    """For one host, which it is put into by `guard`. `process` is the scope in which its dials count."""

    def __init__(self, policy: DialPolicy, process: Scope) -> None:
        self._gate = DialGate(policy)
        self._stagger_s = policy.stagger_s
        self._process = process
        self._waiting = trio.lowlevel.ParkingLot()

    def vouch(self, address: Multiaddr, peer: ID | None = None) -> None:
        """The user has named this address, of this peer or of anybody."""
        self._gate.vouch(*_place(address), _named(peer))

    def note_near(self, address: Multiaddr) -> None:
        """A peer in our own network says that it is there."""
        self._gate.note_near(*_place(address))

    def live_at(self, addresses: Iterable[Multiaddr]) -> None:
        """The host says that it is at these addresses."""
        self._gate.live_at([_place(each)[0] for each in addresses])

    @contextlib.asynccontextmanager
    async def dialling(
        self,
        place: tuple[str, int],
        peer: PeerId | None = None,
        *,
        is_seen: bool = False,
        is_repeated: bool = False,
    ) -> AsyncIterator[None]:
        """A dial is under way, after a wait if there are many. Raises OpenConnectionError if it may not begin.

        For `peer`, `is_seen` and `is_repeated` see `DialGate.why_not`.
        """
        now_s = trio.current_time()
        if (why := self._gate.why_not(*place, now_s, peer, is_seen=is_seen, is_repeated=is_repeated)) is not None:
            raise OpenConnectionError(f"not dialled: {why}")
        most = self._process.limit(Resource.DIALS) or 1
        if not self._gate.is_vouched(*place, peer):
            most = int(SHARE_OF_STRANGERS * most)
        while self._process.held[Resource.DIALS] >= most:
            await self._waiting.park()
        if self._process.reserve(Resource.DIALS, 1) is not None:
            raise OpenConnectionError("not dialled: the node ends")
        try:
            yield
        finally:
            self._process.release(Resource.DIALS, 1)
            self._waiting.unpark_all()

    async def connect_from(self, source: tuple[str, int], target: tuple[str, int]) -> trio.SocketStream:
        """A connection from a port that others of ours use, too. Raises OSError, OpenConnectionError."""
        async with self.dialling(target):
            return await connect_from(source, target)

    def report(
        self, place: tuple[str, int], *, reached: bool, peer: ID | None = None, error: Exception | None = None
    ) -> None:
        """A dial has ended. Whether the expected peer was there. Else the `error`, if there is one, may say which."""
        root = None if error is None else root_of(error)
        found = root.found if isinstance(root, AnotherPeer) else None
        host, now_s, named = place[0].partition("%")[0], trio.current_time(), _named(peer)
        self._gate.report(host, place[1], now_s, reached=reached, peer=named, found=_named(found))

    def guard(self, swarm: Swarm, transport: TCP) -> None:
        """Have all dials of a host go through the gate. To be called once, before it runs."""
        transport.dial = self._guarded(transport.dial)  # type: ignore[method-assign, assignment]
        dial_with_source = transport.dial_with_source

        async def dial_from(address: Multiaddr, source: tuple[str, int]) -> IRawConnection:
            async def dial(each: Multiaddr) -> IRawConnection:
                return await dial_with_source(each, source)

            return await self._guarded(dial)(address)

        transport.dial_with_source = dial_from  # type: ignore[method-assign, assignment]
        swarm.upgrade_outbound_raw_conn = self._watched(swarm.upgrade_outbound_raw_conn)  # type: ignore[method-assign, assignment]

    def _guarded(
        self, dial: Callable[[Multiaddr], Awaitable[IRawConnection]]
    ) -> Callable[[Multiaddr], Coroutine[None, None, IRawConnection]]:
        """py-libp2p gets an address that is made anew from the place that has passed the gate: it reads others in its
        own way. It asks DNS servers alone, which know neither /etc/hosts nor the names of a local network.
        """

        async def dial_resolved(address: Multiaddr) -> IRawConnection:
            place = _direct(address)
            async with self.dialling((place.host, place.port), _peer_at(address)):
                try:
                    found = [tcp_address(each, place.port) for each in await ips_of(place.protocol, place.host)]
                except (OSError, ValueError) as error:
                    raise OpenConnectionError(str(error)) from error
                return await first_to_connect(found, attempt, self._stagger_s)

        async def attempt(address: Multiaddr) -> IRawConnection:
            try:
                return await dial(address)
            except OpenConnectionError:
                self.report(_place(address), reached=False)
                raise

        return dial_resolved

    def _watched(
        self, upgrade: Callable[[IRawConnection, ID, object], Awaitable[SwarmConn]]
    ) -> Callable[..., Awaitable[SwarmConn]]:
        """A connection that we give to py-libp2p may be cancelled in its handshake (`look`, `Puncher`). Then py-libp2p
        would leave its socket open until the collector finds it. It closes the sockets that it dials itself.
        """

        async def upgrade_or_close(raw_conn: IRawConnection, peer: ID, pre_scope: object = None) -> SwarmConn:
            place = remote_address(raw_conn)
            try:
                connection = await upgrade(raw_conn, peer, pre_scope)
            except trio.Cancelled:
                with trio.CancelScope(shield=True):
                    await raw_conn.close()
                raise
            except Exception as error:  # whatever it is, the peer was not reached there
                if place is not None:
                    self.report(place, reached=False, peer=peer, error=error)
                raise
            if place is not None:  # else it is a circuit: the dial was that of the relay
                self.report(place, reached=True, peer=peer)
            return connection

        return upgrade_or_close


async def first_to_connect(
    addresses: Sequence[Multiaddr], dial: Callable[[Multiaddr], Awaitable[IRawConnection]], stagger_s: float
) -> IRawConnection:
    """The first connection to one of the IP addresses of a name, each of which is tried `stagger_s` after the last one.

    So an IPv6 address that leads nowhere does not hold up an IPv4 address of the same name (RFC 8305). Raises the
    error of the last address if none can be reached.
    """
    if len(addresses) == 1:
        return await dial(addresses[0])
    opened: list[IRawConnection] = []
    errors: dict[int, OpenConnectionError] = {}
    try:
        async with trio.open_nursery() as nursery:

            async def attempt(number: int, over: trio.Event) -> None:
                try:
                    opened.append(await dial(addresses[number]))
                    nursery.cancel_scope.cancel()
                except OpenConnectionError as error:
                    errors[number] = error
                over.set()

            for number in range(len(addresses)):
                nursery.start_soon(attempt, number, over := trio.Event())
                with trio.move_on_after(stagger_s):
                    await over.wait()
    except BaseException:
        await _close_all(opened)
        raise
    await _close_all(opened[1:])  # these were opened at the same moment
    if not opened:
        raise errors[len(addresses) - 1]
    return opened[0]


async def _close_all(connections: Iterable[IRawConnection]) -> None:
    for connection in connections:
        with trio.CancelScope(shield=True):
            await connection.close()


def _direct(address: Multiaddr) -> Place:
    """Raises OpenConnectionError for all but a host and its TCP port."""
    with contextlib.suppress(MultiaddrError, ValueError):
        if (place := place_of(address)) is not None:
            return place
    raise OpenConnectionError("not dialled: it is no address of one host and its TCP port")


def _named(peer: ID | None) -> PeerId | None:
    return None if peer is None else PeerId(peer.to_base58())


def _peer_at(address: Multiaddr) -> PeerId | None:
    """The peer that is expected at a direct address. None if it does not say."""
    peer = address.get_peer_id()
    return None if peer is None else PeerId(peer)


def _place(address: Multiaddr) -> tuple[str, int]:
    """The host, which may be a name, and the TCP port of a direct address."""
    place = _direct(address)
    return place.host, place.port


async def connect_from(source: tuple[str, int], target: tuple[str, int]) -> trio.SocketStream:
    """Within `Gate.dialling` alone. The port of `source` may be one that others of ours use, too. Raises OSError."""
    family = socket.AF_INET6 if ":" in target[0] else socket.AF_INET
    sock = trio.socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "SO_REUSEPORT"):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, ABORT)
        await sock.bind(source)
        await sock.connect(target)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)
