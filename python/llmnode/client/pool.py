"""The connections that a node has opened: at most one to a peer, dialled when first needed and again after it ended."""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import trio

from llmnode.client.connection import open_connection
from llmnode.core.ids import PeerId
from llmnode.errors import ConfigError, PeerError, PeerUnreachable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from llmnode.client.connection import Connection
    from llmnode.ports import Network


@dataclass(slots=True)
class _Dial:
    """An attempt that several may wait for."""

    addresses: list[str]
    began_s: float
    over: trio.Event = field(default_factory=trio.Event)
    error: PeerError | ConfigError | None = None


@asynccontextmanager
async def open_pool(network: Network) -> AsyncIterator[ConnectionPool]:
    """All of the pool's connections end with the context."""
    async with trio.open_nursery() as nursery:
        try:
            yield ConnectionPool(network, nursery)
        finally:
            nursery.cancel_scope.cancel()


class ConnectionPool:
    """Made by `open_pool`."""

    def __init__(self, network: Network, nursery: trio.Nursery) -> None:
        self.network = network
        self._nursery = nursery
        self._opened: dict[PeerId, Connection] = {}
        self._dialling: dict[PeerId, _Dial] = {}

    def living(self) -> list[Connection]:
        """In the order in which they were opened."""
        return [connection for connection in self._opened.values() if not connection.has_ended]

    async def connect(self, addresses: Sequence[str]) -> Connection:
        """The living connection to the peer at `addresses`, all of one peer, or a new one to the first that answers.

        Raises PeerUnreachable with the last cause, or ConfigError for an address of no known form.
        """
        if not addresses:
            raise PeerUnreachable("it names no address")
        peer = PeerId(addresses[0].rpartition("/p2p/")[2])
        asked_s = trio.current_time()
        await trio.lowlevel.checkpoint()
        while (connection := self._opened.get(peer)) is None or connection.has_ended:
            if (dial := self._dialling.get(peer)) is None:
                return await self._dial_for_all(peer, addresses)
            await dial.over.wait()
            if dial.error is not None and dial.began_s >= asked_s and dial.addresses == list(addresses):
                raise copy(dial.error)  # not dialled again by each who waited, one after the other
        return connection

    def warm(self, addresses: Sequence[str]) -> None:
        """Have a connection ready for when it is needed. Failing is silent."""
        self._nursery.start_soon(self._connect_quietly, addresses)

    def start_soon(self, work: Callable[[], Awaitable[None]]) -> None:
        """Have `work` done beside everything else; it is cancelled when the pool ends."""
        self._nursery.start_soon(work)

    async def _connect_quietly(self, addresses: Sequence[str]) -> None:
        with suppress(PeerError, ConfigError):
            await self.connect(addresses)

    async def _dial_for_all(self, peer: PeerId, addresses: Sequence[str]) -> Connection:
        """Whoever asks for the same peer meanwhile is given the same answer."""
        dial = self._dialling[peer] = _Dial(list(addresses), trio.current_time())
        try:
            connection = self._opened[peer] = await self._dial(addresses)
        except (PeerError, ConfigError) as error:
            dial.error = error
            raise
        finally:
            del self._dialling[peer]
            dial.over.set()
        return connection

    async def _dial(self, addresses: Sequence[str]) -> Connection:
        for address in addresses[:-1]:
            try:
                return await self._open(address)
            except (PeerError, ConfigError):
                continue
        return await self._open(addresses[-1])

    async def _open(self, address: str) -> Connection:
        connection: Connection = await self._nursery.start(self._hold, address)
        return connection

    async def _hold(self, address: str, task_status: trio.TaskStatus[Connection]) -> None:
        link = await self.network.dial(address)
        async with open_connection(link) as connection:
            task_status.started(connection)
            await connection.wait_ended()
        if self._opened.get(connection.peer) is connection:
            del self._opened[connection.peer]
