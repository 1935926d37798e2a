"""No dial of a host goes past the gate: what a stranger has named is dialled seldom, and only where the host is."""

from __future__ import annotations

import ast
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import trio
import trio.testing
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from multiaddr import Multiaddr

import llmnode
from llmnode.core.budget import Resource
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.dialling import SHARE_OF_STRANGERS
from llmnode.net.host import open_network
from llmnode.net.identity import fresh_identity
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator


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


OPENS = {"open_tcp_stream", "open_ssl_over_tcp_stream", "create_connection", "open_connection", "connect_tcp"}
"""Functions of these modules open a connection."""
MODULES = {"trio", "asyncio", "anyio", "socket", "socks"}
GATE = "dialling.py"
OTHER_SOCKETS = {
    "addresses.py": "one that is bound only",
    "mdns.py": "one of UDP, for the group of mDNS alone",
    "child.py": "one that it has inherited",
}
WITHIN_THE_GATE = {"punch.py", "reach.py"}
"""These files call `connect_from` within `Gate.dialling`."""


def calls(path: Path) -> Iterator[tuple[str, str]]:
    """The last two parts of the name of each function that is called."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id=owner) | ast.Attribute(attr=owner), attr=name)):
                yield owner, name
            case ast.Call(func=function):
                owner, _, name = ast.unparse(function).rpartition(".")
                yield owner.rpartition(".")[2], name


def test_no_other_file_opens_a_connection() -> None:
    """Downloads of models go through huggingface_hub, to the address of a hub that the user names."""
    paths = [each for each in Path(llmnode.__file__).parent.rglob("*.py") if each.name != GATE]
    assert len(paths) > 100
    for path in paths:
        for owner, name in calls(path):
            assert owner not in MODULES or name not in OPENS, f"{path}: {name} dials past the gate"
            assert owner not in ("sock", "socket") or name not in ("connect", "connect_ex"), f"{path}: {name}"
            assert (owner, name) != ("socket", "socket") or path.name in OTHER_SOCKETS, f"{path} makes a socket"
            if name in ("connect_from", "dial_with_source"):
                assert owner in ("gate", "_gate") or path.name in WITHIN_THE_GATE, f"{path}: {name}"


def test_the_search_finds_what_dials() -> None:
    found = set(calls(Path(llmnode.__file__).parent / "net" / GATE))
    assert {("socket", "socket"), ("sock", "connect")} <= found


@in_trio
async def test_dial_backs_and_punches_have_the_rates_of_all_dials() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        place, began = ("8.8.8.8", 4001), 0
        for number in range(2 * POLICY.dials.place_burst):
            with suppress(OpenConnectionError):
                async with network._gate.dialling(place, is_seen=bool(number % 2), is_repeated=True):
                    began += 1
        assert began == POLICY.dials.place_burst


@in_trio
async def test_strangers_addresses_leave_dials_for_the_users() -> None:
    """Dials that are under way are limited: later ones wait for the end of one."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network, trio.open_nursery() as nursery:
        gate, most = network._gate, POLICY.budget.dials
        under_way = 0

        async def hang(host: str) -> None:
            nonlocal under_way
            async with gate.dialling((host, 4001), is_seen=True):
                under_way += 1
                await trio.sleep_forever()

        for number in range(most):
            nursery.start_soon(hang, f"8.8.{number}.1")
        await trio.testing.wait_all_tasks_blocked()
        assert under_way == int(SHARE_OF_STRANGERS * most) == network.budget.process.held[Resource.DIALS]
        gate.vouch(Multiaddr("/ip4/9.9.9.9/tcp/4001"))
        nursery.start_soon(hang, "9.9.9.9")
        await trio.testing.wait_all_tasks_blocked()
        assert under_way == int(SHARE_OF_STRANGERS * most) + 1
        nursery.cancel_scope.cancel()
    assert not network.budget.process.held[Resource.DIALS]
