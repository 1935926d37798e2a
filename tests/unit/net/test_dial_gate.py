"""No dial of a host goes past the gate: what a stranger has named is dialled seldom, and only where the host is."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.host import open_network
from llmnode.net.identity import fresh_identity
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def victim() -> AsyncIterator[tuple[int, list[object]]]:
    """A port that says nothing, and the connections that were made to it."""
    came: list[object] = []

    async def note(stream: trio.SocketStream) -> None:
        came.append(stream)
        async with stream:
            await stream.receive_some()

    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, note, [listener])
        yield listener.socket.getsockname()[1], came
        nursery.cancel_scope.cancel()


def somebody() -> ID:
    return ID.from_pubkey(fresh_identity().public_key)


@in_trio
async def test_forty_identities_at_one_address_are_few_connections() -> None:
    async with victim() as (port, came), open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:

        async def dial() -> None:
            with trio.move_on_after(1), pytest.raises(PeerUnreachable):
                await network.dial(f"/ip4/127.0.0.1/tcp/{port}/p2p/{somebody()}", is_heard=True)

        async with trio.open_nursery() as nursery:
            for _ in range(40):
                nursery.start_soon(dial)
        assert 1 <= len(came) <= POLICY.dials.place_burst + 1


@in_trio
async def test_a_client_dials_nothing_on_its_own_machine_for_strangers() -> None:
    async with victim() as (port, came), open_network([], POLICY) as network:
        address = f"/ip4/127.0.0.1/tcp/{port}"
        with pytest.raises(PeerUnreachable, match="private network"):
            await network.dial(f"{address}/p2p/{somebody()}", is_heard=True)
        with pytest.raises(PeerUnreachable, match="none of other kinds"):
            await network.dial(f"/dns4/localhost/tcp/{port}/p2p/{somebody()}", is_heard=True)
        with pytest.raises(PeerUnreachable):
            await network.dial(f"{address}/p2p/{somebody()}/p2p-circuit/p2p/{somebody()}", is_heard=True)
        peer = somebody()
        network.host.get_peerstore().add_addrs(peer, [Multiaddr(address)], 60)  # as the DHT does with what it is told
        with pytest.raises(BaseLibp2pError):
            await network.host.new_stream(peer, ["/ipfs/kad/1.0.0"])  # type: ignore[list-item]
        assert not came


@in_trio
async def test_the_users_word_is_enough() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as client:
        with pytest.raises(PeerUnreachable, match="private network"):
            await client.dial(server.addresses[0], is_heard=True)
        client.vouch(server.addresses)
        assert (await client.dial(server.addresses[0], is_heard=True)).peer == server.peer
