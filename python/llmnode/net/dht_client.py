"""Asks other nodes of the DHT. An answer is cut to what one of ours would say, before anything works on it.

py-libp2p's own requests work on a whole answer in one step of the event loop: thousands of peers, whose records it
verifies, and whose addresses it keeps and dials.
"""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, cast

import trio
from libp2p.kad_dht.common import PROTOCOL_ID
from libp2p.kad_dht.pb.kademlia_pb2 import Message
from libp2p.kad_dht.peer_routing import PeerRouting
from libp2p.kad_dht.routing_table import RoutingTable
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo

from llmnode.errors import RemoteProtocolError
from llmnode.net.addresses import place_in, tcp_address
from llmnode.net.circuit_wire import FAILURES, leave, receive, send

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from libp2p.abc import IHost
    from libp2p.kad_dht.routing_table import KBucket
    from libp2p.network.stream.net_stream import NetStream

    from llmnode.core.policy import DhtPolicy
    from llmnode.net.peerstore import KnownPeers

log = logging.getLogger(__name__)

PEER_ID_BYTES = 64
"""Those of Ed25519 have 38."""


class DhtClient:
    """For one host, which must be ours."""

    def __init__(self, host: IHost, policy: DhtPolicy) -> None:
        self._host = host
        self._policy = policy
        self._known = cast("KnownPeers", host.get_peerstore())

    async def ask(self, peer: ID, request: Message) -> Message:
        """The answer to a request of the same type. Raises one of FAILURES."""
        async with self._sent(peer, request, is_answered=True) as stream:
            answer = await receive(stream.muxed_stream, Message(), self._policy.message_bytes)
        if answer.type != request.type:
            raise RemoteProtocolError("the answer to another request of the DHT")
        return answer

    async def tell(self, peer: ID, request: Message) -> None:
        """Send a request that is not answered. Raises one of FAILURES."""
        async with self._sent(peer, request, is_answered=False):
            pass

    @contextlib.asynccontextmanager
    async def _sent(self, peer: ID, request: Message, *, is_answered: bool) -> AsyncIterator[NetStream]:
        """After an answer the stream is reset: its peer could keep it open, and fill it, for a minute."""
        with trio.fail_after(self._policy.answer_s):
            stream, in_order = cast("NetStream", await self._host.new_stream(peer, [PROTOCOL_ID])), False
            try:
                await send(stream.muxed_stream, request)
                yield stream
                in_order = not is_answered
            finally:
                await leave(stream, in_order=in_order)

    def led_to(self, answer: Message) -> list[ID]:
        """The peers that an answer leads to. They can be dialled from now on."""
        found = []
        for peer, places in self._named(answer.closerPeers):
            if peer != self._host.get_id():
                found.append(peer)
                if places:
                    self._known.hear(peer, places)
        return found

    def providers(self, answer: Message) -> list[PeerInfo]:
        named = self._named(answer.providerPeers)
        return [PeerInfo(peer, [tcp_address(*each) for each in places]) for peer, places in named]

    def _named(self, peers: Sequence[Message.Peer]) -> Iterator[tuple[ID, list[tuple[str, int]]]]:
        policy = self._policy
        for each in peers[: policy.peers_told]:
            if 0 < len(each.id) <= PEER_ID_BYTES:
                places = [place for raw in each.addrs[: policy.looked_at] if (place := place_in(raw)) is not None]
                yield ID(each.id), places[: policy.addresses]


class Table(RoutingTable):
    """The peers that are asked first. Requests look through all of them."""

    def __init__(self, host: IHost, policy: DhtPolicy) -> None:
        super().__init__(host.get_id(), host)
        self._most_buckets = policy.buckets

    async def note(self, peer: ID) -> None:
        """This peer of the DHT may be led to. But not if its bucket is full: py-libp2p would dial another and wait."""
        bucket = self.find_bucket(peer)
        if bucket.has_peer(peer) or bucket.size() < bucket.bucket_size or self._should_split_bucket(bucket):
            await self.add_peer(peer, skip_server_mode_check=True)

    def _should_split_bucket(self, bucket: KBucket) -> bool:
        return len(self.buckets) < self._most_buckets and super()._should_split_bucket(bucket)


class Routing(PeerRouting):
    """Peers are noted once they have answered, and not because others name them."""

    def __init__(self, host: IHost, table: Table, policy: DhtPolicy) -> None:
        super().__init__(host, table)
        self._table = table
        self._client = DhtClient(host, policy)

    async def _query_peer_for_closest(self, peer: ID, target_key: bytes) -> list[ID]:
        if peer == self.host.get_id():
            return []
        try:
            answer = await self._client.ask(peer, Message(type=Message.FIND_NODE, key=target_key))
        except FAILURES as error:
            log.debug("DHT peer=%s does not answer: %s", peer, error)
            if not self._has_only_reset(peer, error):
                self._table.remove_peer(peer)
            return []
        await self._table.note(peer)
        return self._client.led_to(answer)

    def _has_only_reset(self, peer: ID, error: Exception) -> bool:
        """Whether a stream was reset, over a connection that stands: others at our address may have had the turns."""
        if isinstance(error, (RemoteProtocolError, trio.TooSlowError)):
            return False
        return any(not each.is_closed for each in self.host.get_network().get_connections(peer))
