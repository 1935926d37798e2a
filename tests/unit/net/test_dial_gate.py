"""No dial of a host goes past the gate: what a stranger has named is dialled seldom, and only where the host is."""

from __future__ import annotations

import ast
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import trio
import trio.testing
from hypothesis import given, settings
from hypothesis import strategies as st
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from libp2p.transport.exceptions import OpenConnectionError
from libp2p.transport.tcp import tcp
from multiaddr import Multiaddr

import llmnode
from llmnode.core.budget import Resource
from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import scope_of
from llmnode.core.policy import LinkPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, host_and_port, parse_peer
from llmnode.net.dialling import SHARE_OF_STRANGERS
from llmnode.net.host import open_network
from llmnode.net.identity import fresh_identity
from unit.in_trio import in_trio
from unit.links import POLICY

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from llmnode.net.host import Libp2pNetwork

OTHER = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"


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
async def test_a_peer_is_dialled_though_strangers_announce_others_at_its_address() -> None:
    """It answers, and proves its identity. Announcements cost a stranger nothing."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as server,
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as client,
    ):
        place = server.addresses[0].partition("/p2p/")[0]
        for number in range(2 * POLICY.dials.place_burst):
            with pytest.raises(PeerUnreachable, match="another peer was there lately" if number else "answers, not"):
                await client.dial(f"{place}/p2p/{somebody()}", is_heard=True)
        link = await client.dial(server.addresses[0], is_heard=True)
        assert link.peer == server.peer


@in_trio
async def test_a_peer_that_was_met_is_dialled_whatever_strangers_announce_at_its_host() -> None:
    """Dead ports, and others at its own address that are being dialled at the same moment."""
    async with (
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as server,
        open_network([LISTEN_ANY_LOOPBACK], POLICY) as client,
    ):
        address = server.addresses[0]
        place = host_and_port(parse_peer(address).addrs[0])
        assert place is not None
        link = await client.dial(address, is_heard=True)
        await link.end("done")
        await link.wait_closed()
        for port in range(1, POLICY.dials.host_failures + 1):
            client._gate.report((place[0], port), reached=False)
        async with AsyncExitStack() as under_way:
            for _ in range(POLICY.dials.place_burst):
                client._gate._gate._hosts.give_back(place[0], trio.current_time())
                await under_way.enter_async_context(client._gate.dialling(place, PeerId(str(somebody()))))
            with pytest.raises(OpenConnectionError):
                await under_way.enter_async_context(client._gate.dialling(place, PeerId(str(somebody()))))
            again = await client.dial(address, is_heard=True)
            assert again.peer == server.peer


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


@pytest.mark.parametrize("is_near", [True, False])
@in_trio
async def test_a_relay_in_a_network_of_ours_is_dialled_if_a_peer_behind_it_was_named_near(is_near: bool) -> None:
    """A former run or mDNS may have named it."""
    async with victim() as (port, came), open_network([], POLICY) as network:
        address = f"/ip4/127.0.0.1/tcp/{port}/p2p/{somebody()}/p2p-circuit/p2p/{somebody()}"
        if is_near:
            network.note_near(address)
        with trio.move_on_after(1), pytest.raises(PeerUnreachable):
            await network.dial(address, is_heard=True)
        assert bool(came) is is_near


@in_trio
async def test_the_users_word_is_enough() -> None:
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as server, open_network([], POLICY) as client:
        with pytest.raises(PeerUnreachable, match="private network"):
            await client.dial(server.addresses[0], is_heard=True)
        client.vouch(server.addresses)
        assert (await client.dial(server.addresses[0], is_heard=True)).peer == server.peer


# The gate judges the address that is dialled

PUBLIC, PRIVATE, METADATA = "/ip4/8.8.8.8/tcp/22", "/ip4/192.168.1.1/tcp/1", "/ip4/169.254.169.254/tcp/80"
TWO_PLACES = [
    *(f"{PUBLIC}{other}" for other in (PRIVATE, METADATA, "/ip6/fd00::1/tcp/1", "/ip4/192.168.1.1", "/tcp/1")),
    f"{PUBLIC}/p2p/{OTHER}{PRIVATE}",
    f"{PUBLIC}/http{PRIVATE}",
    f"{PUBLIC}/p2p/{OTHER}/p2p-circuit{PRIVATE}",
    "/ip4/8.8.8.8/ip4/192.168.1.1/tcp/22",
    "/ip6/2001:4860:4860::8888/tcp/22/ip4/192.168.1.1/tcp/1",
    "/dns4/localhost/tcp/22/ip4/127.0.0.1/tcp/1",
    "/ip4/8.8.8.8/udp/22/ip4/192.168.1.1/tcp/1",
    "/p2p-circuit/ip4/192.168.1.1/tcp/1",
]
TWO_AS_TEXT = Multiaddr(b"\x36\x20" + b"localhost/tcp/22/ip4/192.168.1.1" + b"\x06\x00\x16")
"""A name that reads like two places once it is text, which py-libp2p makes of it."""
PARTS = st.sampled_from(
    [
        *("/ip4/8.8.8.8", "/ip4/192.168.1.1", "/ip4/169.254.169.254", "/ip4/127.0.0.1", "/ip6/::1", "/ip6/fd00::1"),
        *("/ip6/2001:4860:4860::8888", "/ip6/::ffff:127.0.0.1", "/dns4/localhost", "/tcp/22", "/tcp/1", "/udp/1"),
        *(f"/p2p/{OTHER}", "/p2p-circuit", "/http", "/ws", "/tls", "/quic-v1", "/unix/ip4/127.0.0.1"),
    ]
)


class Recorder:
    """Opens no connection, and notes what the gate has been asked and what TCP was to dial then."""

    def __init__(self, network: Libp2pNetwork, monkeypatch: pytest.MonkeyPatch) -> None:
        self.judged: list[tuple[str, int]] = []
        self.dialled: list[tuple[str, int]] = []
        self._swarm: Any = network.host.get_network()
        gate = network._gate._gate
        why_not = gate.why_not

        def judge(host: str, port: int, now_s: float, peer: PeerId, **seen: bool) -> str | None:
            self.judged.append((host, port))
            return why_not(host, port, now_s, peer, **seen)

        async def dial(host: str, port: int, *_source: tuple[str, int]) -> trio.SocketStream:
            self.dialled.append((host, port))
            raise OSError("nobody is there")

        monkeypatch.setattr(gate, "why_not", judge)
        monkeypatch.setattr(tcp.trio, "open_tcp_stream", dial)
        monkeypatch.setattr(tcp, "_open_tcp_stream_from", dial)

    async def dial(self, address: Multiaddr, source: tuple[str, int] | None = None) -> None:
        self.judged.clear()
        self.dialled.clear()
        with suppress(BaseLibp2pError):
            await self._swarm.dial_addr(address, somebody(), source)


def many_dials() -> LinkPolicy:
    dials = replace(POLICY.dials, **dict.fromkeys(("burst", "place_burst", "host_failures"), 1e6), pause_s=0.0)
    return replace(POLICY, dials=dials)


@in_trio
async def test_an_address_of_two_places_is_not_dialled_at_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate would judge the first, and py-libp2p dial the last."""
    async with open_network([], many_dials()) as network:
        recorder = Recorder(network, monkeypatch)
        for source in (None, ("127.0.0.1", 0)):
            for address in (PUBLIC, f"{PUBLIC}/p2p/{OTHER}"):
                await recorder.dial(Multiaddr(address), source)
                assert recorder.dialled == recorder.judged == [("8.8.8.8", 22)]
            for address in (*TWO_PLACES, TWO_AS_TEXT):
                await recorder.dial(Multiaddr(address), source)
                assert not recorder.dialled, address
        for address in TWO_PLACES:  # as the DHT and identify have them dialled
            peer = somebody()
            network.host.get_peerstore().add_addrs(peer, [Multiaddr(address)], 60)
            with pytest.raises(BaseLibp2pError):
                await network.host.new_stream(peer, ["/ipfs/kad/1.0.0"])  # type: ignore[list-item]
            assert not recorder.dialled, address


@settings(max_examples=20)
@given(st.lists(st.lists(PARTS, min_size=1, max_size=6), min_size=20, max_size=20), st.booleans())
def test_whatever_is_dialled_was_judged(drawn: list[list[str]], is_bound: bool) -> None:
    async def main() -> None:
        with pytest.MonkeyPatch.context() as monkeypatch:
            async with open_network([], many_dials()) as network:
                recorder = Recorder(network, monkeypatch)
                for parts in drawn:
                    address = Multiaddr("".join(parts))
                    await recorder.dial(address, ("127.0.0.1", 0) if is_bound else None)
                    assert recorder.dialled in ([], recorder.judged), address
                    assert all(scope_of(host) == "public" for host, _ in recorder.dialled), address

    trio.run(main)


@in_trio
async def test_tcp_is_the_only_transport() -> None:
    """The gate is in that of TCP."""
    async with open_network([LISTEN_ANY_LOOPBACK], POLICY) as network:
        swarm: Any = network.host.get_network()
        assert [type(each) for each in swarm.transport_manager.get_transports()] == [tcp.TCP]


OPENS = {"open_tcp_stream", "open_ssl_over_tcp_stream", "create_connection", "open_connection", "connect_tcp"}
"""Functions of these modules open a connection."""
MODULES = {"trio", "asyncio", "anyio", "socket", "socks"}
GATE = "dialling.py"
OTHER_SOCKETS = {
    "listeners.py": "one that is bound only",
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
