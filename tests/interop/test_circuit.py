"""Circuits with go-libp2p and rust-libp2p: each is the relay, the node that reserves, and the node that dials; we play
the other parts.

Skipped where they cannot be built: there is no Go or Rust, or its packages cannot be had.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest
from libp2p.peer.id import ID

from bench.transport.peers import DIGEST, ECHO, Libp2pNode, _echo, _open_served, _send_all
from bench.transport.steered import PeerFailed, SteeredPeer, steer
from interop.played import played
from llmnode.core.peers.nat import Nat, Reached
from llmnode.core.policy import LinkPolicy, ReachPolicy, RelayPolicy
from llmnode.errors import PeerUnreachable
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK, parse_peer, relay_of
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.identity import fresh_identity

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

TEN_MB = 10_000_000


@asynccontextmanager
async def our_relay() -> AsyncIterator[str]:
    async with open_network([LISTEN_ANY_LOOPBACK], LinkPolicy(), relay_policy=RelayPolicy()) as network:
        yield network.addresses[0]


@asynccontextmanager
async def their_relay(theirs: list[str]) -> AsyncIterator[str]:
    async with steer([*theirs, "relay"]) as relay:
        yield relay.address


def through(relay: str, peer: str) -> str:
    return f"{relay}/p2p-circuit/p2p/{peer}"


async def check_they_dial(dialler: SteeredPeer, relay: str, peer: str) -> None:
    await dialler.tell("connect", address=through(relay, peer))
    await dialler.tell("ping", peer=peer)
    await dialler.tell("echo", peer=peer, bytes=1_000_001, repeats=3)
    await dialler.tell("send", peer=peer, bytes=TEN_MB, streams=1, check=True)
    await dialler.tell("receive", peer=peer, bytes=TEN_MB, streams=1)


async def check_we_dial(network: Libp2pNetwork, node: Libp2pNode, relay: str, peer: str) -> None:
    info = parse_peer(through(relay, peer))
    over = relay_of(info)
    assert over is not None
    network.vouch([through(relay, peer)])
    await network._circuits.connect(over, info.peer_id)
    await _echo(await node.open(peer, ECHO), 1_000_001)
    await _send_all([await _open_served(node, peer, DIGEST)], TEN_MB, DIGEST)
    (connection,) = network.host.get_network().get_connections(ID.from_string(peer))
    assert connection.get_connection_type().value == "relayed"


@pytest.mark.parametrize("whose", ["our relay", "their relay"])
def test_they_reserve_and_we_dial_them(theirs: list[str], whose: str) -> None:
    async def main() -> None:
        async with (
            our_relay() if whose == "our relay" else their_relay(theirs) as relay,
            steer(theirs) as server,
            open_network([], LinkPolicy()) as network,
        ):
            granted = await server.tell("reserve", address=relay)
            assert granted.get("lifetime_s", 3600) > 1000  # rust-libp2p keeps to itself for how long
            await check_we_dial(network, served(network), relay, server.peer)
            missing = through(relay, nobody())
            with pytest.raises(PeerUnreachable, match="no reservation at the relay"):
                await network.dial(missing)

    played(main)


@pytest.mark.parametrize("whose", ["our relay", "their relay"])
def test_we_reserve_and_they_dial_us(theirs: list[str], whose: str) -> None:
    async def main() -> None:
        async with (
            our_relay() if whose == "our relay" else their_relay(theirs) as relay,
            open_network([], LinkPolicy(), relays=[relay]) as network,
            steer(theirs) as dialler,
        ):
            served(network)
            assert network.addresses == [through(relay, network.peer)]
            await check_they_dial(dialler, relay, network.peer)
            await dialler.tell("disconnect", peer=network.peer)
            with pytest.raises(PeerFailed, match=r"NO_RESERVATION|no reservation for destination"):
                await dialler.tell("connect", address=through(relay, nobody()))

    played(main)


def test_they_reserve_and_dial_through_our_relay(theirs: list[str]) -> None:
    async def main() -> None:
        async with our_relay() as relay, steer(theirs) as server, steer(theirs) as dialler:
            granted = await server.tell("reserve", address=relay)
            assert relay in granted["addresses"]
            await check_they_dial(dialler, relay, server.peer)

    played(main)


def test_we_reserve_and_dial_through_their_relay(theirs: list[str]) -> None:
    async def main() -> None:
        async with (
            their_relay(theirs) as relay,
            open_network([], LinkPolicy(), relays=[relay]) as network,
            open_network([], LinkPolicy()) as dialler,
        ):
            link = await dialler.dial(network.addresses[0])
            assert (link.peer, link.relayed) == (network.peer, True)

    played(main)


def served(network: Libp2pNetwork) -> Libp2pNode:
    """Serves the protocols that these tests use."""
    return Libp2pNode(network.host)


def nobody() -> str:
    """The id of a peer that has reserved nowhere."""
    return ID.from_pubkey(fresh_identity().public_key).to_base58()


@pytest.mark.parametrize("theirs", ["go"], indirect=True)
def test_go_libp2p_says_how_it_sees_us(theirs: list[str]) -> None:
    async def main() -> None:
        async with their_relay(theirs) as relay, open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()) as network:
            reach = await network.look([relay], ReachPolicy())
            assert reach is not None
            # It dials no loopback address for anybody, and says so.
            assert (reach.nat, reach.host, reach.reached) == (Nat.NONE, "127.0.0.1", Reached.NOT_TRIED)

    played(main)
