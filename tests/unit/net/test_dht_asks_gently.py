"""A node asks the DHT little at once, and keeps peers of it that only had no turn for a stream of ours."""

from __future__ import annotations

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any

import pytest
import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from llmnode.core.policy import LinkPolicy
from llmnode.net.addresses import LISTEN_ANY_LOOPBACK
from llmnode.net.circuit_wire import receive, send
from llmnode.net.directory import LOOKUPS_AT_ONCE, MOST_PROVIDERS, DhtDirectory
from llmnode.net.host import Libp2pNetwork, open_network
from llmnode.net.identity import fresh_identity
from unit.dht_members import DIGEST, POLICY, member
from unit.in_trio import in_trio

if TYPE_CHECKING:
    from collections.abc import Sequence

    from libp2p.abc import INetStream


class Dht:
    """It knows many providers. Each lookup takes a while."""

    def __init__(self) -> None:
        self.host = self.providers = self.values = self
        self.looking = self.most = self.looked_up = 0

    def get_connected_peers(self) -> Sequence[ID]:
        return []

    def forget(self, _key: bytes) -> None: ...

    async def find_providers(self, _key: str, _most: int) -> list[PeerInfo]:
        return [PeerInfo(ID.from_pubkey(fresh_identity().public_key), []) for _ in range(MOST_PROVIDERS)]

    async def get_value(self, _key: str) -> None:
        self.looking += 1
        self.most = max(self.most, self.looking)
        await trio.sleep(0.01)
        self.looking -= 1
        self.looked_up += 1


@in_trio
async def test_few_announcements_are_looked_for_at_once_and_all_in_the_end() -> None:
    dht: Any = Dht()
    async with trio.open_nursery() as nursery:
        assert await DhtDirectory(dht, nursery, POLICY).find(DIGEST) == []
    assert dht.looked_up == MOST_PROVIDERS
    assert dht.most == LOOKUPS_AT_ONCE <= 4


async def reset(stream: INetStream) -> None:
    await stream.reset()


async def lie(stream: INetStream) -> None:
    request: Any = await receive(stream.muxed_stream, Message(), 1 << 20)  # type: ignore[attr-defined]
    await send(stream.muxed_stream, Message(type=1 - request.type))  # type: ignore[attr-defined]
    await stream.close()


@pytest.mark.parametrize(("answer", "stays"), [(reset, True), (lie, False), (None, False)])
@in_trio
async def test_a_peer_that_resets_a_stream_stays_in_the_table(answer: Any, stays: bool) -> None:
    """It does so when our address has no turns left. One that lies, or is not there, goes."""
    async with AsyncExitStack() as stack:
        other: Libp2pNetwork = await stack.enter_async_context(open_network([LISTEN_ANY_LOOPBACK], LinkPolicy()))
        asks = await stack.enter_async_context(member(other.addresses[0]))
        other.host.set_stream_handler(PROTOCOL_ID, answer or reset)
        dht, peer = asks.directory._dht, ID.from_string(other.peer)
        await dht.routing_table.add_peer(peer, skip_server_mode_check=True)
        assert dht.routing_table.peer_in_table(peer)
        if answer is None:
            await asks.network.host.get_network().close_peer(peer)
            asks.network.host.get_peerstore().clear_addrs(peer)
        assert await dht.peer_routing._query_peer_for_closest(peer, b"key") == []
        assert dht.routing_table.peer_in_table(peer) == stays
