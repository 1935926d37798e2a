"""IPv6 alone, and beside IPv4: links, circuits, and how a node is seen."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from llmnode.core.address_groups import address_groups
from llmnode.core.peers.nat import Nat, Reached
from llmnode.core.policy import LinkPolicy, ReachPolicy, RelayPolicy
from llmnode.net.admission import address_of
from llmnode.net.host import open_network
from llmnode.wire.frame import Frame, FrameType
from unit.in_trio import in_trio

LOOPBACK_6, LOOPBACK_4 = "/ip6/::1/tcp/0", "/ip4/127.0.0.1/tcp/0"


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


pytestmark = pytest.mark.skipif(not has_ipv6(), reason="this system has no IPv6")


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
