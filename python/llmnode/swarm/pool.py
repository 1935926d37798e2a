"""The connections that a node has opened: one to each peer, dialled at its first use, and again after it has ended.

If a connection goes through a relay, a direct one follows as soon as possible. New sessions use the direct one. The
relayed one stays until its sessions have moved, and takes over again if the direct one ends before.
"""

from __future__ import annotations

import logging
from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.core.ids import PeerId
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.policy import PoolPolicy
from llmnode.errors import ConfigError, PeerError, PeerUnreachable, SessionClosed, single_error
from llmnode.swarm.peer_connection import open_connection
from llmnode.swarm.uploads import Uploads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from llmnode.ports import Network
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)

ERRORS_TOLD = 3
"""One message names the errors of this number of a peer's addresses."""


@dataclass(slots=True)
class _Dial:
    """An attempt to connect. Several tasks may wait for it."""

    addresses: list[str]
    began_s: float
    over: trio.Event = field(default_factory=trio.Event)
    error: PeerError | ConfigError | None = None


@asynccontextmanager
async def open_pool(network: Network, policy: PoolPolicy | None = None) -> AsyncIterator[ConnectionPool]:
    """Open a pool. All of its connections end with the context."""
    async with trio.open_nursery() as nursery:
        try:
            yield ConnectionPool(network, nursery, policy or PoolPolicy())
        finally:
            nursery.cancel_scope.cancel()


class ConnectionPool:
    """A node's connections. Made by `open_pool`."""

    def __init__(self, network: Network, nursery: trio.Nursery, policy: PoolPolicy) -> None:
        self.network = network
        self._nursery = nursery
        self._policy = policy
        self._uploads = Uploads()
        self._opened: dict[PeerId, PeerConnection] = {}
        self._dialling: dict[PeerId, _Dial] = {}
        self._held: dict[PeerConnection, None] = {}
        self._passing: set[PeerConnection] = set()
        """The open ones that nobody has asked to keep."""

    def living(self) -> list[PeerConnection]:
        """The open connections, the oldest first."""
        return [connection for connection in self._opened.values() if not connection.has_ended]

    def all_open(self) -> list[PeerConnection]:
        """The open connections with those over relays that go on beside a direct one, the oldest first."""
        return [connection for connection in self._held if not connection.has_ended]

    async def connect(self, addresses: Sequence[str], *, keeps: bool = True) -> PeerConnection:
        """The open connection to the peer at `addresses`, or a new one to the first address that answers.

        All `addresses` are of one peer. If nobody `keeps` the connection, `release` ends it. Raises PeerUnreachable
        with the last cause, ConfigError for an address of no known form, and SessionClosed as `start_soon`.
        """
        if not addresses:
            raise PeerUnreachable("it names no address: it is reached through relays alone, and has lost them")
        peer = peer_of(addresses[0])
        asked_s = trio.current_time()
        await trio.lowlevel.checkpoint()
        if self._nursery.cancel_scope.cancel_called:
            raise _over()
        while (connection := self._opened.get(peer)) is None or connection.has_ended:
            if (dial := self._dialling.get(peer)) is None:
                return await self._dial_for_all(peer, addresses, keeps=keeps)
            await dial.over.wait()
            if dial.error is not None and dial.began_s >= asked_s and dial.addresses == list(addresses):
                raise copy(dial.error)  # or each waiter would dial it again, one after the other
        if keeps:
            self._passing.discard(connection)
        return connection

    async def release(self, connection: PeerConnection) -> None:
        """End the connection to a peer, unless it is used, or somebody keeps it. Cannot be cancelled."""
        for each in (connection, connection.best):
            if each in self._passing and not each.sessions:
                self._passing.discard(each)
                if self._opened.get(each.peer) is each:
                    del self._opened[each.peer]
                await _end_all([each])

    def warm(self, addresses: Sequence[str]) -> None:
        """Open a connection that will be used later. A failure is silent. Raises SessionClosed as `start_soon`."""
        self.start_soon(partial(self._connect_quietly, addresses))

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` in the pool's nursery. It is cancelled when the pool ends. Raises SessionClosed afterwards."""
        try:
            self._nursery.start_soon(work)
        except RuntimeError:  # the nursery has closed, while a task elsewhere still used the pool
            raise _over() from None

    async def _connect_quietly(self, addresses: Sequence[str]) -> None:
        with suppress(PeerError, ConfigError):
            await self.connect(addresses)

    async def _dial_for_all(self, peer: PeerId, addresses: Sequence[str], *, keeps: bool) -> PeerConnection:
        """Dial a peer once for all tasks that ask for it meanwhile."""
        dial = self._dialling[peer] = _Dial(list(addresses), trio.current_time())
        try:
            connection = self._opened[peer] = await self._dial(addresses)
            if not keeps:
                self._passing.add(connection)
        except (PeerError, ConfigError) as error:
            dial.error = error
            raise
        finally:
            del self._dialling[peer]
            dial.over.set()
        return connection

    async def _dial(self, addresses: Sequence[str]) -> PeerConnection:
        """The first connection that opens. The next address is tried before the last has failed (as in RFC 8305)."""
        if len(addresses) == 1:
            with single_error():
                return await self._open(addresses[0])
        in_order = sorted(addresses, key=_is_relayed)
        opened: list[PeerConnection] = []
        errors: dict[str, PeerError | ConfigError] = {}
        try:
            with single_error():
                async with trio.open_nursery() as nursery:

                    async def attempt(address: str, over: trio.Event) -> None:
                        try:
                            opened.append(await self._open(address))
                            nursery.cancel_scope.cancel()
                        except (PeerError, ConfigError) as error:
                            errors[address] = error
                        over.set()

                    over: trio.Event | None = None
                    for address in in_order:
                        if over is not None:
                            with trio.move_on_after(self._stagger_s(address)):
                                await over.wait()
                        nursery.start_soon(attempt, address, over := trio.Event())
        except BaseException:
            await _end_all(opened)
            raise
        if not opened:
            raise _all_of([errors[address] for address in in_order])
        await _end_all(opened[1:])  # these were opened at the same moment
        return opened[0]

    def _stagger_s(self, address: str) -> float:
        return self._policy.relay_stagger_s if _is_relayed(address) else self._policy.stagger_s

    async def _open(self, address: str) -> PeerConnection:
        connection: PeerConnection = await self._nursery.start(self._hold, address)
        return connection

    async def _hold(self, address: str, task_status: trio.TaskStatus[PeerConnection]) -> None:
        link = await self.network.dial(address, is_heard=True)
        async with open_connection(link, self._uploads) as connection:
            self._held[connection] = None
            task_status.started(connection)
            if connection.relayed:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(self._better, connection, address)
                    await connection.wait_ended()
                    nursery.cancel_scope.cancel()
            else:
                await connection.wait_ended()
        del self._held[connection]
        self._passing.discard(connection)
        if self._opened.get(connection.peer) is connection:
            del self._opened[connection.peer]

    async def _better(self, connection: PeerConnection, address: str) -> None:
        """Let a direct connection follow a relayed one. The relayed one ends when nothing uses it any more."""
        while True:
            await connection.wait_direct()
            with suppress(PeerError, ConfigError):
                better = await self._open(address)
                if better.relayed:  # the peer could be reached directly only for a moment
                    await better.end()
                else:
                    await self._follow(connection, better)
            if self._opened.get(connection.peer) is not connection:  # another one was opened meanwhile
                return await self._end_unused(connection)
            await trio.sleep(self._policy.retry_s)

    async def _follow(self, connection: PeerConnection, better: PeerConnection) -> None:
        """Wait until the better one has ended."""
        peer = connection.peer
        connection.better = better
        if connection in self._passing:
            self._passing.add(better)
        if self._opened.get(peer) is connection:
            self._opened[peer] = better
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._end_unused, connection)
            await better.wait_ended()
            nursery.cancel_scope.cancel()
        connection.better = None
        if self._opened.get(peer) in (None, better):
            self._opened[peer] = connection

    async def _end_unused(self, connection: PeerConnection) -> None:
        await connection.wait_unused(self._policy.idle_s)
        await connection.end()


def _all_of(errors: Sequence[PeerError | ConfigError]) -> PeerError | ConfigError:
    """One error that has the messages of several: each address may fail for a reason of its own."""
    texts = dict.fromkeys(each.message if isinstance(each, PeerError) else str(each) for each in errors)
    if len(texts) == 1:
        return errors[-1]
    return PeerUnreachable("; ".join(list(texts)[-ERRORS_TOLD:]))


def _over() -> SessionClosed:
    return SessionClosed("the connection to the swarm is closed")


def _is_relayed(address: str) -> bool:
    return "/p2p-circuit/" in address


async def _end_all(connections: Sequence[PeerConnection]) -> None:
    for connection in connections:
        with trio.CancelScope(shield=True):  # it ends without waiting for the peer
            await connection.end()
