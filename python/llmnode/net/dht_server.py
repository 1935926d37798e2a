"""Answers requests of the DHT: each has a deadline, a size and a slot, and none takes the event loop for long.

py-libp2p's own handler waits for ever for a request, of 4 MiB, in one of 12 slots for all peers together.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter
from typing import TYPE_CHECKING, cast

import trio
from libp2p.kad_dht.common import format_time_rfc3339
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from llmnode.core.budget import Resource
from llmnode.errors import PeerUnreachable, RemoteProtocolError
from llmnode.net.admission import groups_of
from llmnode.net.circuit_wire import FAILURES, leave, receive, send
from llmnode.net.dht_stores import kept_for
from llmnode.net.turns import Turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from libp2p.abc import INetStream
    from libp2p.kad_dht.kad_dht import KadDHT
    from libp2p.network.stream.net_stream import NetStream

    from llmnode.core.policy import DhtPolicy
    from llmnode.net.dht_client import Table
    from llmnode.net.yamux import YamuxConnection

log = logging.getLogger(__name__)


class DhtServer:
    """Its `take_stream` is the handler of the DHT's streams."""

    def __init__(self, dht: KadDHT, table: Table, policy: DhtPolicy, key_of: Callable[[ID], str]) -> None:
        """`key_of` gives the key of the record that a peer may keep here: its own."""
        self._key_of = key_of
        self._table = table
        self._dht = dht
        self._policy = policy
        self._turns = Turns(policy.requests)
        self._streams: Counter[str] = Counter()  # by peer and by address group; "" is all of them

    async def take_stream(self, stream: INetStream) -> None:
        """libp2p calls this for each stream that a peer opens to ask for something, and again."""
        net_stream, in_order = cast("NetStream", stream), False
        connection = cast("YamuxConnection", stream.muxed_conn)
        group, _ = groups_of(connection)
        try:
            with self._slot(str(connection.peer_id), group):
                await self._table.note(connection.peer_id)
                while (request := await self._next(net_stream)) is not None:
                    await self._turns.wait((group, str(connection.peer_id)))
                    if request.type != Message.MessageType.PING:
                        connection.used_s = trio.current_time()
                    with self._turn(connection):
                        with kept_for(group):
                            answer = self._answer(request, connection.peer_id)
                        if answer is not None:
                            with trio.fail_after(self._policy.answer_s):
                                await send(net_stream.muxed_stream, answer)
            in_order = True
        except FAILURES as error:
            log.debug("DHT request peer=%s ended: %s", connection.peer_id, error)
        finally:
            await leave(net_stream, in_order=in_order)

    @contextlib.contextmanager
    def _slot(self, peer: str, group: str) -> Iterator[None]:
        """Raises PeerUnreachable if the peer, its address group or all peers together have too many streams."""
        policy, keys = self._policy, ("", f"group {group}", f"peer {peer}")
        for key, most in zip(keys, (policy.streams, policy.streams_per_group, policy.streams_per_peer), strict=True):
            if self._streams[key] >= most:
                raise PeerUnreachable("too many streams of the DHT")
        self._streams.update(keys)
        try:
            yield
        finally:
            self._streams.subtract(keys)
            self._streams = +self._streams

    @contextlib.contextmanager
    def _turn(self, connection: YamuxConnection) -> Iterator[None]:
        scope = connection.scope
        if not scope.take(Resource.HEAVY_ANSWERS, 1):
            raise PeerUnreachable("too many answers are being made")
        try:
            yield
        finally:
            scope.release(Resource.HEAVY_ANSWERS, 1)

    async def _next(self, stream: NetStream) -> Message | None:
        """None at the end. Raises one of FAILURES."""
        with trio.fail_after(self._policy.request_s):
            try:
                return await receive(stream.muxed_stream, Message(), self._policy.message_bytes)
            except PeerUnreachable:
                return None

    def _answer(self, request: Message, peer: ID) -> Message | None:
        """None to a request that none is due to. Raises RemoteProtocolError, ValueError."""
        kinds = Message.MessageType
        key = request.record.key if request.type == kinds.PUT_VALUE else request.key
        if request.type != kinds.PING and not 0 < len(key) <= self._policy.key_bytes:
            raise RemoteProtocolError(f"a key of {len(key)} bytes")
        answer = Message(type=request.type, key=key)
        match request.type:
            case kinds.PING:
                return Message(type=kinds.PING)
            case kinds.FIND_NODE:
                self._lead(answer, key, peer, target=ID(key))
            case kinds.GET_PROVIDERS:
                for provider in self._dht.provider_store.get_providers(key):
                    answer.providerPeers.append(self._told(provider.peer_id, provider.addrs))
                self._lead(answer, key, peer)
            case kinds.GET_VALUE:
                if (record := self._dht.value_store.get(key)) is not None:
                    answer.record.CopyFrom(record)
                self._lead(answer, key, peer)
            case kinds.ADD_PROVIDER:
                self._add_provider(request, peer)
                return None  # go-libp2p waits for none, and can crash over one
            case kinds.PUT_VALUE:
                answer.record.CopyFrom(self._put(request, peer))
            case _:
                raise RemoteProtocolError("no request of the DHT")
        return answer

    def _lead(self, answer: Message, key: bytes, asking: ID, target: ID | None = None) -> None:
        """Name the peers that are closest to a key, and the one that is looked for."""
        closest = self._table.find_local_closest_peers(key, self._policy.peers_told)
        if target is not None and target not in closest and (self._addresses(target) or target == self._own):
            closest = [target, *closest]
        for peer in closest:
            if peer != asking:
                answer.closerPeers.append(self._told(peer, self._addresses(peer)))

    @property
    def _own(self) -> ID:
        return self._dht.host.get_id()

    def _addresses(self, peer: ID) -> list[Multiaddr]:
        if peer == self._own:
            return list(self._dht.host.get_addrs())
        with contextlib.suppress(KeyError):  # py-libp2p's error for a peer that it does not know is one
            return list(self._dht.host.get_peerstore().addrs(peer))
        return []

    def _told(self, peer: ID, addresses: Iterable[Multiaddr]) -> Message.Peer:
        told = [each.to_bytes() for each in list(addresses)[: self._policy.addresses]]
        is_connected = bool(self._dht.host.get_network().get_connections(peer))
        connection = Message.ConnectionType.CONNECTED if is_connected else Message.ConnectionType.NOT_CONNECTED
        return Message.Peer(
            id=peer.to_bytes(),
            addrs=[each for each in told if len(each) <= self._policy.address_bytes],
            connection=connection,
        )

    def _add_provider(self, request: Message, peer: ID) -> None:
        """A peer speaks for itself alone."""
        for named in request.providerPeers[: self._policy.peers_told]:
            if named.id != peer.to_bytes():
                continue
            addresses = [
                Multiaddr(each)
                for each in named.addrs[: self._policy.addresses]
                if len(each) <= self._policy.address_bytes
            ]
            if addresses:
                self._dht.provider_store.add_provider(request.key, PeerInfo(peer, addresses))
            return

    def _put(self, request: Message, peer: ID) -> Record:
        """Raises RemoteProtocolError, or ValueError for what the validator refuses.

        A peer speaks for itself alone: the record counts for the address group that brings it. Else a stranger could
        bring those of others, and then fill its share, so that they make way.
        """
        key, value = request.record.key, request.record.value
        if key.decode() != self._key_of(peer):
            raise RemoteProtocolError("the record of another peer")
        if request.key != key or not value or request.record.ByteSize() > self._policy.record_bytes:
            raise RemoteProtocolError("no record that could be kept")
        validator = self._dht.validator
        assert validator is not None
        validator.validate(key.decode(), value)
        held = self._dht.value_store.get(key)
        if held is not None and validator.select(key.decode(), [held.value, value]) == 0:
            raise RemoteProtocolError("a newer record is there")
        record = Record(key=key, value=value, timeReceived=format_time_rfc3339())
        self._dht.value_store.put_record(key, record)
        return record
