"""Our directory with go-libp2p's and rust-libp2p's Kademlia: each keeps records for the others, and leads to peers.

It is skipped if they cannot be built: Go or Rust is missing, or its packages cannot be had.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgpack
import pytest
from libp2p.peer.id import ID

from bench.transport.steered import PeerFailed, steer
from interop.played import played
from llmnode.core.ids import PeerId
from llmnode.net.directory import _model_key, _peer_key
from llmnode.wire.announcement import sign_announcement
from unit.dht_members import DIGEST, member

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from bench.transport.steered import SteeredPeer
    from llmnode.core.announcement import SignedAnnouncement
    from unit.dht_members import Member

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(700)]

MODEL_KEY = _model_key(DIGEST)


@asynccontextmanager
async def their_member(theirs: list[str], contact: Member | None = None) -> AsyncIterator[SteeredPeer]:
    """A DHT server that has met `contact`."""
    async with steer([*theirs, "dht"]) as peer:
        if contact is not None:
            await peer.tell("connect", address=contact.address)
            await peer.tell("identify", peer=contact.network.peer)
        yield peer


async def announced_by(peer: SteeredPeer, known: Member) -> SignedAnnouncement:
    """An announcement like that of `known`, of their peer and signed by it."""
    announcement = replace(known.announcement().announcement, peer=PeerId(peer.peer), addresses=(peer.address,))
    bodies: list[bytes] = []

    def keep(body: bytes) -> bytes:
        bodies.append(body)
        return bytes(64)

    sign_announcement(announcement, keep)
    signature = (await peer.tell("sign", value=bodies[0].hex()))["value"]
    return sign_announcement(announcement, lambda _: bytes.fromhex(signature))


def peer_key(member: Member) -> str:
    return _peer_key(member.network.peer).encode().hex()


def test_they_keep_what_our_servers_announce_for_our_clients(theirs: list[str]) -> None:
    async def main() -> None:
        async with their_member(theirs) as keeper:
            async with member(keeper.address) as server, member(keeper.address) as other:
                announced = server.announcement(), other.announcement()
                await server.directory.publish(server.announcement(age_s=1))
                await server.directory.publish(announced[0])
                # ADD_PROVIDER has no answer. A peer that leaves at once may do so before it was read: hence twice.
                for _ in range(2):
                    await other.directory.publish(announced[1])
            # The announcing peer is gone, so only the keeper has the record.
            async with member(keeper.address, listens=False) as client:
                found = await client.directory.find(DIGEST)
            assert {each.signed for each in found} == {each.signed for each in announced}

    played(main)


def test_they_find_what_our_servers_announce_in_what_we_keep(theirs: list[str]) -> None:
    async def main() -> None:
        async with member() as keeper:
            async with member(keeper.address) as server:
                signed = server.announcement()
                await server.directory.publish(signed)
            async with their_member(theirs, keeper) as client:
                assert await client.tell("providers", key=MODEL_KEY) == {"peers": [server.network.peer]}
                got = await client.tell("get", key=peer_key(server))
                assert bytes.fromhex(got["value"]) == msgpack.packb((signed.signed.body, signed.signed.signature))

    played(main)


def test_we_keep_what_they_announce_and_they_go_on_over_the_same_stream(theirs: list[str]) -> None:
    async def main() -> None:
        async with member() as keeper:
            async with their_member(theirs, keeper) as server:
                signed = (await announced_by(server, keeper)).signed
                record = msgpack.packb((signed.body, signed.signature))
                for _ in range(2):
                    await server.tell("provide", key=MODEL_KEY)
                    assert (await server.tell("providers", key=MODEL_KEY))["peers"] == [server.peer]
                key = _peer_key(PeerId(server.peer))
                await server.tell("put", key=key.encode().hex(), value=record.hex())
                got = await server.tell("get", key=key.encode().hex())
                assert bytes.fromhex(got["value"]) == record
                others = keeper.announcement().signed
                with suppress(PeerFailed):  # go-libp2p says nothing if we refuse
                    value = msgpack.packb((others.body, others.signature)).hex()
                    await server.tell("put", key=peer_key(keeper), value=value)
                kept = keeper.directory._dht.values
                assert kept.get(key.encode()) is not None
                assert kept.get(bytes.fromhex(peer_key(keeper))) is None, "a peer speaks for itself alone"
            async with member(keeper.address, listens=False) as client:
                dht = client.directory._dht
                await client.directory._meet_connected()
                assert {str(each.peer_id) for each in await dht.find_providers(MODEL_KEY)} == {server.peer}
                assert await dht.get_value(key) == record

    played(main)


def test_peers_are_found_through_theirs_and_by_theirs(theirs: list[str]) -> None:
    async def main() -> None:
        async with member() as known, their_member(theirs, known) as between, member(between.address) as other:
            await known.directory._meet_connected()
            await other.directory._meet_connected()
            found = None
            while found is None:  # their peer needs a moment to recognise a server
                found = await other.directory._dht.find_peer(ID.from_string(known.network.peer))
            assert known.network.addresses[0].startswith(str(found.addrs[0]))
            async with their_member(theirs, other) as stranger:
                assert known.network.peer in (await stranger.tell("find", peer=known.network.peer))["peers"]

    played(main)
