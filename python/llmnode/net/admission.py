"""Connections of a host: each is admitted within the budget, and ends soon if nothing uses it.

A connection counts from its first byte, at the address that it comes from, and once its peer is proved as one of that
peer. Knows nothing of frames.
"""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, cast
from weakref import WeakKeyDictionary

import trio
from libp2p.network.exceptions import SwarmException

from llmnode.core.address_groups import address_groups
from llmnode.core.budget import Budget, Kind, Resource, Worth
from llmnode.core.ids import PeerId
from llmnode.core.rates import Rates
from llmnode.net.circuit_wire import CircuitConnection
from llmnode.net.dialling import Gate
from llmnode.net.sockets import remote_address, socket_of
from llmnode.net.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable

    from libp2p.abc import IMuxedConn, IRawConnection
    from libp2p.peer.id import ID

    from llmnode.core.budget import Scope
    from llmnode.core.policy import LinkPolicy
    from llmnode.net.secure import NoiseConnection
    from llmnode.net.yamux import YamuxConnection
    from llmnode.net.yamux_stream import YamuxStream


class ConnectionAdmission:
    """The limits for the connections of one host. Raises SwarmException for those that exceed them."""

    def __init__(self, policy: LinkPolicy) -> None:
        self.budget = Budget(policy.budget)
        self.policy = policy.budget
        self.gate = Gate(policy.dials, self.budget.process)
        """Decides which connections the host opens."""
        self._accepted = Rates(self.policy.accepted_burst, self.policy.accepted_per_s)
        self._accepted_of_group = Rates(self.policy.group_accepted_burst, self.policy.group_accepted_per_s)
        self._handshakes = Turns(self.policy.handshakes)
        self._streams = Turns(self.policy.stream_turns)
        self._refused = Rates(self.policy.refused_streams_burst, self.policy.refused_streams_per_s)
        self._pings = Rates(self.policy.free_pings_burst, self.policy.free_pings_per_s)
        self._begun: dict[str, dict[Scope, None]] = {}
        """The half-open connections of each address, the oldest first."""
        self._half_open: WeakKeyDictionary[IRawConnection, Scope] = WeakKeyDictionary()

    def accepts(self, address: str) -> bool:
        """Whether one more connection from this IP address is looked at. Then it counts."""
        (group, host), now_s = address_groups(address), trio.current_time()
        if self._accepted_of_group.wait_s(group, now_s) > 0 or not self._accepted.take(host, now_s):
            return False
        self._accepted_of_group.count(group, now_s)
        return True

    async def wait_turn(self, raw: IRawConnection, patience_s: float) -> None:
        """Until the other side has said something, and it is the turn of its address group."""
        try:
            with trio.fail_after(patience_s):
                if (sock := socket_of(raw)) is not None:
                    await trio.lowlevel.wait_readable(sock)
                await self._handshakes.wait(address_groups(address_of(raw)))
        except (trio.TooSlowError, trio.ClosedResourceError, OSError) as error:
            raise SwarmException("a connection that says nothing, or too many from its addresses") from error

    def begin(self, raw: IRawConnection, end: Callable[[], None]) -> Scope:
        """A connection to us whose peer has not proved its identity yet. `end` gives it up.

        When there are too many of one address, its oldest makes way. That is no search, as it is for other places.
        """
        address = address_of(raw)
        host = address_groups(address)[1]
        begun = self._begun.get(host, {})
        if len(begun) >= self.policy.half_open_per_host:
            oldest = next(iter(begun))
            del begun[oldest]
            oldest.evict()
        scope = self._admit(address, None, is_inbound=True)  # an address that is refused leaves nothing behind
        scope.on_evict = end
        self._half_open[raw] = scope
        self._begun.setdefault(host, {})[scope] = None
        return scope

    def end(self, half_open: Scope) -> None:
        """The connection has been proved to be of a peer, or has failed."""
        half_open.close()
        host = half_open.of_kind(Kind.HOST)
        assert host is not None
        if (begun := self._begun.get(host.name)) is not None:
            begun.pop(half_open, None)
            if not begun:
                del self._begun[host.name]

    def prove(self, connection: NoiseConnection, peer: ID) -> Scope:
        """The connection has been proved to be of `peer`. The owner of the scope closes it."""
        half_open = self._half_open.pop(connection.raw, None)
        if half_open is not None:
            if half_open.is_closed:
                raise SwarmException("others have taken the place of this connection")
            half_open.close()
        address, is_inbound = address_of(connection.raw), not connection.is_initiator
        scope = self._admit(address, PeerId(peer.to_base58()), is_inbound=is_inbound)
        if not is_inbound:
            scope.worth = Worth.OURS
        return scope

    def admits_stream(self, stream: YamuxStream, scope: Scope) -> bool:
        """Whether one more stream is within the limits of a connection. It is taken until the stream is over: the other
        side may fill its window, whether or not we have closed our side.
        """
        taken = scope.open(Kind.LINK, "a stream")
        is_admitted = taken.take_all({Resource.STREAMS: 1, Resource.MEMORY: self.policy.stream_bytes})
        if is_admitted:
            stream.close_when_over(taken)
        else:
            taken.close()
        return is_admitted

    async def wait_stream_turn(self, stream: YamuxStream, amount: float = 1.0) -> bool:
        """Until the other side may have a stream handled, or something done over one: that is an `amount` of this.

        Its address group has turns, and those that we have connected to have others: strangers behind a relay are not
        to take those of the relay itself. False after too long a wait, or
        when the stream is over.
        """
        connection = cast("YamuxConnection", stream.muxed_conn)
        side = "ours, " if connection.scope.worth is Worth.OURS else ""
        path = f"{side}{groups_of(connection)[0]}", str(connection.peer_id)
        if self._streams.take(path, amount):
            return True
        has_turn = False
        with stream.until_over(), trio.move_on_after(self.policy.stream_patience_s):
            await self._streams.wait(path, amount)
            has_turn = True
        return has_turn

    def has_free_ping(self, connection: YamuxConnection) -> bool:
        """Whether the other side may have one more ping answered without a turn. Then it counts."""
        return self._pings.take(connection.scope.number, trio.current_time())

    def note_refused(self, connection: YamuxConnection) -> None:
        """A stream was not handled. The connection ends if its peer opens many such."""
        if not self._refused.take(connection.peer_id, trio.current_time()):
            connection.end()

    def _admit(self, address: str, peer: PeerId | None, *, is_inbound: bool) -> Scope:
        scope = self.budget.connection(address, peer)
        wanted = {Resource.CONNECTIONS: 1, Resource.MEMORY: self.policy.connection_bytes}
        if is_inbound:
            wanted = {Resource.INBOUND: 1} | wanted
        if not scope.take_all(wanted):
            scope.close()
            raise SwarmException(f"too many connections, or too many from {address}")
        return scope


def address_of(raw: IRawConnection) -> str:
    """The other side's IP address. For a circuit, whose other side could be anywhere, it is the relay's address.

    So all circuits through the relays of one machine are in its address group, whatever the identities of these.
    """
    while isinstance(raw, CircuitConnection):
        raw = cast("YamuxConnection", raw.to_relay.muxed_conn).secured_conn.raw
    address = remote_address(raw)
    return "nowhere" if address is None else str(ipaddress.ip_address(address[0].partition("%")[0]))


def groups_of(connection: IMuxedConn) -> tuple[str, str]:
    """The address group that the other side is in, and the narrower one (`core/address_groups.py`)."""
    return address_groups(address_of(cast("YamuxConnection", connection).secured_conn.raw))
