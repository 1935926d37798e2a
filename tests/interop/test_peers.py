"""Our transport and those of go-libp2p and rust-libp2p, each dialling the other; programs are built, told what to do.

Skipped where they cannot be built: there is no Go or Rust, or its packages cannot be had.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

import pytest
from libp2p.peer.id import ID

from bench.transport.peers import ECHO
from bench.transport.steered import PeerFailed, python_peer, steer
from interop.played import played
from llmnode.core.policy import LinkPolicy
from llmnode.net.addresses import parse_peer
from llmnode.net.host import open_network

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from libp2p.network.swarm import Swarm

    from bench.transport.steered import SteeredPeer
    from llmnode.net.yamux import YamuxConnection

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

HUNDRED_MB = 100_000_000
DIRECTIONS = pytest.mark.parametrize("we_dial", [True, False], ids=["ours dials", "theirs dials"])


@asynccontextmanager
async def connected(command: list[str], *, we_dial: bool) -> AsyncIterator[tuple[SteeredPeer, SteeredPeer]]:
    """Our peer and theirs, connected: one has dialled the other."""
    async with steer(python_peer("llmnode")) as ours, steer(command) as other:
        dialler, listener = (ours, other) if we_dial else (other, ours)
        await dialler.tell("connect", address=listener.address)
        await ours.tell("identify", peer=other.peer)  # the peer that was dialled knows of it a little later
        yield ours, other


@DIRECTIONS
def test_they_identify_and_ping_each_other(theirs: list[str], *, we_dial: bool) -> None:
    async def main() -> None:
        async with connected(theirs, we_dial=we_dial) as pair:
            for one, other in (pair, pair[::-1]):
                assert 0 < (await one.tell("ping", peer=other.peer))["seconds"] < 1
                protocols: Any = (await one.tell("identify", peer=other.peer))["protocols"]
                assert ECHO in protocols

    played(main)


@DIRECTIONS
def test_bytes_go_both_ways_over_streams_of_either_side(theirs: list[str], *, we_dial: bool) -> None:
    async def main() -> None:
        async with connected(theirs, we_dial=we_dial) as pair:
            for one, other in (pair, pair[::-1]):
                for size in (0, 1, 1 << 16, 1_000_001):
                    await one.tell("echo", peer=other.peer, bytes=size, repeats=3)
                await one.tell("open", peer=other.peer, bytes=100, repeats=50)
                await one.tell("send", peer=other.peer, bytes=HUNDRED_MB, streams=1, check=True)
                await one.tell("receive", peer=other.peer, bytes=HUNDRED_MB, streams=1)
                await one.tell("send", peer=other.peer, bytes=HUNDRED_MB // 8, streams=8, check=True)
            ours, other = pair
            await ours.tell("beside", peer=other.peer, bytes=HUNDRED_MB // 4, small=2304)

    played(main)


def test_who_is_not_who_was_dialled_is_refused_by_either(theirs: list[str]) -> None:
    async def main() -> None:
        async with steer(python_peer("llmnode")) as ours, steer(theirs) as other, steer(theirs) as third:
            for dialler, listener in ((ours, other), (other, ours)):
                with pytest.raises(PeerFailed):
                    await dialler.tell("connect", address=listener.address.replace(listener.peer, third.peer))

    played(main)


@DIRECTIONS
def test_a_connection_that_was_closed_can_be_made_again(theirs: list[str], *, we_dial: bool) -> None:
    async def main() -> None:
        async with connected(theirs, we_dial=we_dial) as (ours, other):
            dialler, listener = (ours, other) if we_dial else (other, ours)
            for _ in range(10):
                await dialler.tell("disconnect", peer=listener.peer)
                await dialler.tell("connect", address=listener.address)
                await dialler.tell("echo", peer=listener.peer, bytes=1000, repeats=2)

    played(main)


def test_the_muxer_is_agreed_on_within_the_handshake_with_go_and_after_it_with_rust(
    theirs: list[str], request: pytest.FixtureRequest
) -> None:
    async def main() -> None:
        async with steer(theirs) as other, open_network([], LinkPolicy()) as network:
            network.vouch([other.address])
            await network.host.connect(parse_peer(other.address))
            (connection,) = cast("Swarm", network.host.get_network()).get_connections(ID.from_string(other.peer))
            secured = cast("YamuxConnection", connection.muxed_conn).secured_conn
            assert secured.has_agreed_on_yamux == request.node.name.endswith("[go]")

    played(main)
