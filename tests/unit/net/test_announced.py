"""Addresses that a node tells others instead of those it listens at, and which of them are refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import trio

from llmnode.core.policy import LinkPolicy, SwarmPolicy
from llmnode.errors import ConfigError
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer
from llmnode.net.host import open_network
from llmnode.net.invite import Invite
from llmnode.node.app import open_relay
from llmnode.wire.fields import ADDRESS_CHARS

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OTHER = "12D3KooWHatDJpvRfD7CvXhA3hg2Pc115M26JP2Zph8nShom4ESy"
FORWARDED = "/ip4/203.0.113.7/tcp/4001"
LONG_NAME = ".".join(["a" * 60] * 4)


def addresses_of(announce: Sequence[str], identity: Path | None = None) -> tuple[str, list[str], list[str]]:
    """Peer id, what it tells others, and where it listens; what the libp2p host tells is the same."""

    async def open_and_close() -> tuple[str, list[str], list[str]]:
        async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy(), identity, announce) as network:
            told = [str(each) for each in network.host.get_addrs()]
            assert told == network.addresses
            return network.peer, network.addresses, network.listening

    return trio.run(open_and_close)


def test_a_node_tells_where_it_listens_unless_told_otherwise() -> None:
    _, told, listening = addresses_of([])
    assert told == listening
    assert told[0].startswith("/ip4/127.0.0.1/tcp/")


def test_announced_addresses_take_the_place_of_those_it_listens_at() -> None:
    announce = [FORWARDED, "/dns/node.example/tcp/4001", "/dns4/node.example/tcp/1", "/ip6/2001:db8::7/tcp/4001"]
    peer, told, listening = addresses_of(announce)
    assert told == [f"{each}/p2p/{peer}" for each in announce]
    assert {parse_peer(each).peer_id.to_base58() for each in told} == {peer}
    (listens_at,) = listening
    assert listens_at.startswith("/ip4/127.0.0.1/tcp/")
    assert listens_at.endswith(f"/p2p/{peer}")


def test_the_ip_address_of_an_announced_name_is_told_too() -> None:
    """Others dial no names that they have heard from strangers."""
    peer, told, _ = addresses_of(["/dns4/localhost/tcp/4001"])
    assert told == [f"/dns4/localhost/tcp/4001/p2p/{peer}", f"/ip4/127.0.0.1/tcp/4001/p2p/{peer}"]


def test_its_own_peer_id_may_be_in_an_announced_address_and_another_may_not(tmp_path: Path) -> None:
    identity = tmp_path / "node.key"
    peer, _, _ = addresses_of([], identity)
    _, told, _ = addresses_of([f"{FORWARDED}/p2p/{peer}"], identity)
    assert told == [f"{FORWARDED}/p2p/{peer}"]
    with pytest.raises(ConfigError, match=f"this node is {peer}, and not {OTHER}; leave /p2p/{OTHER} out"):
        addresses_of([f"{FORWARDED}/p2p/{OTHER}"], identity)


@pytest.mark.parametrize(
    ("address", "fix"),
    [
        ("here", "is not a multiaddr"),
        ("/ip4/203.0.113.7", "/ip4/ADDRESS/tcp/PORT"),
        ("/ip4/203.0.113.7/udp/4001/quic-v1", "/ip4/ADDRESS/tcp/PORT"),
        ("/ip4/203.0.113.7/tcp/4001/ws", "/ip4/ADDRESS/tcp/PORT"),
        ("/ip4/203.0.113.7/tcp/70000", "is not a multiaddr"),
        ("/tcp/4001", "/ip4/ADDRESS/tcp/PORT"),
        ("", "/ip4/ADDRESS/tcp/PORT"),
        ("/ip4/0.0.0.0/tcp/4001", "nobody can dial 0.0.0.0"),
        ("/ip6/::/tcp/4001", "nobody can dial ::"),
        ("/ip4/203.0.113.7/tcp/0", "nobody can dial port 0"),
        (f"/dns4/{LONG_NAME}/tcp/4001", f"at most {ADDRESS_CHARS} characters"),
    ],
)
def test_an_address_that_nobody_could_dial_is_refused(address: str, fix: str) -> None:
    with pytest.raises(ConfigError, match=r"^--announce ") as caught:
        addresses_of([address])
    assert fix in str(caught.value)


def test_more_addresses_than_an_announcement_holds_are_refused() -> None:
    most = SwarmPolicy().addresses
    announce = [f"/ip4/203.0.113.7/tcp/{4001 + port}" for port in range(most + 1)]

    async def relay(announce: Sequence[str]) -> list[str]:
        async with open_relay([LISTEN_ANY_LOOPBACK], announce, Invite(()), None) as network:
            return network.addresses

    assert len(trio.run(relay, announce[:most])) == most
    with pytest.raises(ConfigError, match=f"{most} addresses are the most"):
        trio.run(relay, announce)
