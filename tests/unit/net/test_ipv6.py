"""IPv6 alone, and beside IPv4: links, circuits, and how a node is seen."""

from __future__ import annotations

import errno
import ipaddress
import socket
from contextlib import ExitStack, contextmanager, suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest
import trio
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from llmnode.core.address_groups import address_groups
from llmnode.core.peers.nat import Nat, Reached
from llmnode.core.policy import LinkPolicy, ReachPolicy, RelayPolicy
from llmnode.errors import ConfigError
from llmnode.net import addresses, listeners
from llmnode.net.addresses import all_reachable, parse_peer, tcp_address
from llmnode.net.admission import address_of
from llmnode.net.circuit_relay import _seen
from llmnode.net.host import open_network
from llmnode.net.identify import identify
from llmnode.net.listeners import check_bindable, listen_at, listenable_ips
from llmnode.node.reach import look_by_version
from llmnode.swarm.pool import open_pool
from llmnode.wire.frame import Frame, FrameType
from unit.exact_nodes import exact_node
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Iterator

LOOPBACK_6, LOOPBACK_4 = "/ip6/::1/tcp/0", "/ip4/127.0.0.1/tcp/0"
EVERYWHERE = ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")


def free_socket(family: int) -> socket.socket:
    sock = socket.socket(family)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


def free_port() -> int:
    """One that is free over either version of IP."""
    while True:
        with free_socket(socket.AF_INET) as of_4, free_socket(socket.AF_INET6) as of_6, suppress(OSError):
            of_4.bind(("0.0.0.0", 0))
            of_6.bind(("::", of_4.getsockname()[1]))
            return int(of_4.getsockname()[1])


def listened_port(swarm: Any) -> int:
    (first, *_) = swarm.listeners.values()
    return int(first.get_addrs()[0].value_for_protocol("tcp"))


@contextmanager
def black_hole() -> Iterator[int]:
    """A port of ::1 that answers no further packet: its queue is full."""
    with socket.socket(socket.AF_INET6) as full, ExitStack() as stack:
        full.bind(("::1", 0))
        full.listen(0)
        for _ in range(8):
            filler = stack.enter_context(socket.socket(socket.AF_INET6))
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        yield full.getsockname()[1]


async def check_link(server: Any, client: Any, address: str) -> Any:
    """A frame goes from `client` to `server`. Returns the client's link."""
    link = await client.dial(address)
    async with server.accept() as accepted:
        await link.send(Frame(FrameType.VIEW))
        assert (await accepted.receive()).type is FrameType.VIEW
        assert accepted.peer == client.peer
    return link


@in_trio
async def test_a_node_listens_at_both_and_is_reached_at_each() -> None:
    async with open_network([LOOPBACK_6, LOOPBACK_4], LinkPolicy()) as server:
        assert sorted(address.split("/")[1] for address in server.addresses) == ["ip4", "ip6"]
        for address in server.addresses:
            async with open_network([], LinkPolicy()) as client:
                await check_link(server, client, address)


@in_trio
async def test_every_interface_of_both_versions_has_one_port_and_each_is_reached() -> None:
    async with open_network(EVERYWHERE, LinkPolicy()) as server:
        ports = {address.split("/")[4] for address in server.addresses}
        assert len(ports) == 1
        assert not any(address.split("/")[2].startswith("fe80") for address in server.addresses)
        assert server.listening == server.addresses
        for host in ("/ip4/127.0.0.1", "/ip6/::1"):
            async with open_network([], LinkPolicy()) as client:
                await check_link(server, client, f"{host}/tcp/{next(iter(ports))}/p2p/{server.peer}")


@in_trio
async def test_a_port_that_is_taken_over_ipv6_does_not_keep_a_node_from_listening_there() -> None:
    async with open_network([], LinkPolicy()) as network:
        taken = free_socket(socket.AF_INET6)
        swarm: Any = network.host.get_network()

        class Swarm:
            """Another program takes the port over IPv6 as soon as the node has it over IPv4."""

            listeners = swarm.listeners

            async def listen(self, address: Multiaddr) -> bool:
                listens = await swarm.listen(address)
                if address == Multiaddr(EVERYWHERE[0]):
                    taken.bind(("::", listened_port(swarm)))
                    taken.listen()
                return bool(listens)

        with taken:
            await listen_at(cast("Any", Swarm()), [Multiaddr(each) for each in EVERYWHERE])
            ports = [int(each.value_for_protocol("tcp")) for each in network.host.get_transport_addrs()]
            assert len(set(ports)) == len(ports) == 2
            assert taken.getsockname()[1] == ports[0]


@in_trio
async def test_one_port_may_be_named_for_both_versions() -> None:
    port = free_port()
    async with open_network([f"/ip4/0.0.0.0/tcp/{port}", f"/ip6/::/tcp/{port}"], LinkPolicy()) as server:
        for host in ("/ip4/127.0.0.1", "/ip6/::1"):
            async with open_network([], LinkPolicy()) as client:
                await check_link(server, client, f"{host}/tcp/{port}/p2p/{server.peer}")


@in_trio
async def test_every_interface_of_ipv6_leaves_the_port_of_ipv4_to_others() -> None:
    with free_socket(socket.AF_INET) as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        port = other.getsockname()[1]
        async with open_network([f"/ip6/::/tcp/{port}"], LinkPolicy()) as server:
            assert all(address.startswith("/ip6/") for address in server.addresses)
            with socket.create_connection(("127.0.0.1", port)):
                other.accept()[0].close()
            with pytest.raises(ConfigError, match="cannot listen"):
                async with open_network([f"/ip6/::/tcp/{port}"], LinkPolicy()):
                    pass


def test_the_loopback_is_told_to_others_only_if_there_is_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    listening = [Multiaddr("/ip4/0.0.0.0/tcp/1"), Multiaddr("/ip6/::/tcp/1")]

    def told(*own: str) -> list[str]:
        monkeypatch.setattr(addresses, "own_ips", lambda: [ipaddress.ip_address(each) for each in own])
        return [each.split("/")[2] for each in all_reachable(listening)]

    here = ["127.0.0.1", "::1"]
    assert told(*here, "fe80::1") == here
    assert told(*here, "fe80::1", "2a00::1") == ["2a00::1"]
    assert told(*here, "10.0.0.1", "fe80::1") == ["10.0.0.1"]
    in_order = ["11.0.0.1", "2a00::1", "10.0.0.1", "fd00::1", "10.0.0.2"]
    assert told(*here, "10.0.0.1", "10.0.0.2", "11.0.0.1", "fd00::1", "2a00::1") == in_order


@in_trio
async def test_others_hear_by_identify_where_they_reach_a_node_that_is_everywhere() -> None:
    async with open_network(EVERYWHERE, LinkPolicy()) as server, open_network([], LinkPolicy()) as client:
        address = f"/ip6/::1/tcp/{listened_port(server.host.get_network())}/p2p/{server.peer}"
        client.vouch([address])
        await client.host.connect(parse_peer(address))
        (connection,) = client.host.get_network().get_connections()
        said = await identify(cast("Any", connection), 10)
        assert [str(tcp_address(*each)) for each in said.places] == [
            each.partition("/p2p/")[0] for each in server.listening
        ]


def test_a_machine_without_ipv6_listens_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    real = socket.socket

    def only_4(family: int = socket.AF_INET, *rest: Any) -> socket.socket:
        if family == socket.AF_INET6:
            raise OSError(errno.EAFNOSUPPORT, "Address family not supported by protocol")
        return real(family, *rest)

    monkeypatch.setattr(listeners.socket, "socket", only_4)
    assert not [each for each in listenable_ips() if ":" in each]
    assert "127.0.0.1" in listenable_ips()
    with pytest.raises(ConfigError, match=r"cannot listen at /ip6/::1/tcp/0 \(Address family not supported"):
        check_bindable(Multiaddr(LOOPBACK_6))


@in_trio
async def test_an_ipv6_address_that_swallows_everything_does_not_hold_up_a_connection() -> None:
    async with (
        open_network([LOOPBACK_4], LinkPolicy()) as server,
        open_network([], LinkPolicy()) as client,
        open_pool(client) as pool,
    ):
        with black_hole() as port:
            dead = f"/ip6/::1/tcp/{port}/p2p/{server.peer}"
            client.vouch([dead, *server.addresses])
            with trio.fail_after(LinkPolicy().dial_timeout_s / 2):
                connection = await pool.connect([dead, *server.addresses])
            assert not connection.has_ended


@in_trio
async def test_who_is_behind_a_relay_at_ipv6_is_reached_by_who_has_ipv6_alone() -> None:
    async with (
        open_network([LOOPBACK_6], LinkPolicy(), relay_policy=RelayPolicy()) as relay,
        open_network([LOOPBACK_4], LinkPolicy(), relays=relay.addresses) as server,
        open_network([], LinkPolicy()) as client,
    ):
        (through,) = server.addresses
        assert through.startswith("/ip6/::1/")
        link = await check_link(server, client, through)
        assert link.relayed


@in_trio
async def test_it_is_asked_over_each_version_at_which_a_node_listens_whether_others_reach_it() -> None:
    async with (
        open_network([LOOPBACK_6, LOOPBACK_4], LinkPolicy()) as one,
        open_network([LOOPBACK_6, LOOPBACK_4], LinkPolicy()) as own,
        open_network([LOOPBACK_4], LinkPolicy()) as of_4,
    ):
        both = [(each.host, each.reached) for each in await look_by_version(own, one.addresses)]
        assert both == [("127.0.0.1", Reached.YES), ("::1", Reached.YES)]
        assert [each.host for each in await look_by_version(of_4, one.addresses)] == ["127.0.0.1"]


@in_trio
async def test_a_server_asks_over_each_version_at_which_a_neighbour_is_announced() -> None:
    listen = [LOOPBACK_4, LOOPBACK_6]
    async with exact_node(listen=listen) as neighbour:
        over_4, over_6 = neighbour.addresses
        assert over_4.startswith("/ip4/") and over_6.startswith("/ip6/")
        async with exact_node(listen=listen, peers=[over_4]) as node:
            while neighbour.peer not in {each.peer for each in node.swarm.view.announcements()}:
                await node.swarm.wait_changed()
            assert [(each.host, each.reached) for each in await node.look()] == [
                ("127.0.0.1", Reached.YES),
                ("::1", Reached.YES),
            ]


def test_a_relay_tells_nobody_of_an_address_of_its_own_link() -> None:
    for host, is_told in (("2a00::1", True), ("fe80::1%eth0", False)):
        connection = SimpleNamespace(peer_id=ID(b"peer"), get_remote_address=lambda host=host: (host, 4001))
        assert bool(_seen(cast("Any", connection)).addrs) == is_told


@in_trio
async def test_a_node_is_seen_and_dialled_at_its_ipv6_address() -> None:
    async with (
        open_network([LOOPBACK_6], LinkPolicy()) as one,
        open_network([LOOPBACK_6, LOOPBACK_4], LinkPolicy()) as own,
    ):
        reach = await own.look(one.addresses, ReachPolicy())
        assert reach is not None
        assert (reach.nat, reach.reached, reach.host) == (Nat.NONE, Reached.YES, "::1")


@in_trio
async def test_connections_are_counted_by_their_ipv6_network() -> None:
    """Without an address, all peers with IPv6 would share the limit of one host."""
    async with open_network([LOOPBACK_6], LinkPolicy()) as server, open_network([], LinkPolicy()) as client:
        await check_link(server, client, server.addresses[0])
        (connection,) = server.host.get_network().get_connections()
        muxed: Any = connection.muxed_conn
        assert address_groups(address_of(muxed.secured_conn.raw)) == ("::/64", "::/64")
