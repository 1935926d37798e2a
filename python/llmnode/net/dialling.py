"""The gate under every dial of a host (`core/peers/dial_gate.py`), at the sockets; and names that the system knows.

Links, relays and the DHT dial through here, whatever they think of an address. Hole punching does not.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, cast

import trio
from libp2p.transport.exceptions import OpenConnectionError

from llmnode.core.peers.dial_gate import DialGate
from llmnode.net.sockets import remote_address, resolved

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine, Iterable

    from libp2p.abc import IRawConnection
    from libp2p.network.connection.swarm_connection import SwarmConn
    from libp2p.network.swarm import Swarm
    from libp2p.peer.id import ID
    from libp2p.transport.tcp.tcp import TCP
    from multiaddr import Multiaddr

    from llmnode.core.policy import DialPolicy


class Gate:
    """For one host, which it is put into by `guard`."""

    def __init__(self, policy: DialPolicy) -> None:
        self._gate = DialGate(policy)

    def vouch(self, address: Multiaddr) -> None:
        """The user has named this address."""
        self._gate.vouch(*_place(address))

    def live_at(self, addresses: Iterable[Multiaddr]) -> None:
        """The host says that it is at these addresses."""
        self._gate.live_at([_place(each)[0] for each in addresses])

    def check(self, host: str, port: int) -> None:
        """A dial begins. Raises OpenConnectionError if it may not."""
        if (why := self._gate.why_not(host, port, trio.current_time())) is not None:
            raise OpenConnectionError(f"not dialled: {why}")

    def report(self, place: tuple[str, int], *, reached: bool) -> None:
        """A dial has ended. Whether the expected peer was there."""
        self._gate.report(place[0].partition("%")[0], place[1], trio.current_time(), reached=reached)

    def _report_end(self, place: tuple[str, int] | None, *, reached: bool) -> None:
        if place is not None:  # else it is a circuit: the dial was that of the relay
            self.report(place, reached=reached)

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
        """py-libp2p asks DNS servers alone, which know neither /etc/hosts nor the names of a local network."""

        async def dial_resolved(address: Multiaddr) -> IRawConnection:
            self.check(*_place(address))
            try:
                *others, last = await resolved(address)
            except (OSError, UnicodeError) as error:
                raise OpenConnectionError(str(error)) from error
            for each in others:
                with contextlib.suppress(OpenConnectionError):
                    return await attempt(each)
            return await attempt(last)

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
            except Exception:  # whatever it is, the peer was not reached there
                self._report_end(place, reached=False)
                raise
            self._report_end(place, reached=True)
            return connection

        return upgrade_or_close


def _place(address: Multiaddr) -> tuple[str, int]:
    """The host, which may be a name, and the TCP port of a direct address."""
    first = next(iter(address.protocols())).name
    return cast("str", address.value_for_protocol(first)), int(address.value_for_protocol("tcp"))
