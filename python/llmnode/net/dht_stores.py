"""The records that a node keeps for others in the DHT: for minutes, within a number of bytes, fair among addresses.

py-libp2p's own stores keep records for one or two days, providers without a limit in bytes, and read through all of
them to drop one for a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from random import SystemRandom
from typing import TYPE_CHECKING, Any

import trio
from libp2p.kad_dht.common import format_time_rfc3339
from libp2p.kad_dht.pb.kademlia_pb2 import Message, Record
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.kad_dht.value_store import ValueStore
from libp2p.peer.id import ID
from libp2p.peer.peerinfo import PeerInfo
from multiaddr import Multiaddr

from llmnode.core.bounded_store import ENTRY_BYTES, BoundedStore, in_turn
from llmnode.net.dht_client import DhtClient

if TYPE_CHECKING:
    from libp2p.abc import IHost

    from llmnode.core.policy import DhtPolicy

OURSELVES = "ourselves"
_SOURCE: ContextVar[str] = ContextVar("_SOURCE", default=OURSELVES)


@contextmanager
def kept_for(source: str) -> Iterator[None]:
    """Records that are stored meanwhile come from this address group."""
    token = _SOURCE.set(source)
    try:
        yield
    finally:
        _SOURCE.reset(token)


class Values(ValueStore):
    """Announcements by the key of their peer."""

    def __init__(self, host: IHost, policy: DhtPolicy) -> None:
        super().__init__(host, host.get_id())
        self._client = DhtClient(host, policy)
        self._record_bytes = policy.record_bytes
        self._records: BoundedStore[bytes, Record] = BoundedStore(policy.value_bytes, policy.lifetime_s, SystemRandom())

    @property
    def size_bytes(self) -> int:
        return self._records.size_bytes

    def put(self, key: bytes, value: bytes, validity: float = 0.0) -> None:
        """py-libp2p calls this for our own record. Its `validity` is longer than we keep anything."""
        self.put_record(key, self._signed(key, value))

    def _signed(self, key: bytes, value: bytes) -> Record:
        from libp2p.records.record import make_signed_put_record

        record = make_signed_put_record(key, value, self.host.get_private_key())
        record.timeReceived = format_time_rfc3339()
        return record

    def put_record(self, key: bytes, record: Record) -> None:
        self._records.put(key, record, len(key) + record.ByteSize(), _SOURCE.get(), trio.current_time())

    def get(self, key: bytes) -> Record | None:
        return self._records.get(key, trio.current_time())

    def remove(self, key: bytes) -> bool:
        return self._records.remove(key)

    def has(self, key: bytes) -> bool:
        return self.get(key) is not None

    def cleanup_expired(self) -> int:
        return self._records.drop_expired(trio.current_time())

    def get_keys(self) -> list[bytes]:
        self.cleanup_expired()
        return list(self._records)

    def size(self) -> int:
        return len(self._records)

    async def _get_from_peer(
        self, peer_id: ID, key: bytes, return_record: bool = False, return_closer_peers: bool = False
    ) -> Any:  # Any: py-libp2p's result depends on the last two
        """Raises one of `circuit_wire.FAILURES`."""
        record, closer = self.get(key), list[ID]()
        if peer_id != self.local_peer_id:
            record, closer = await self._asked(peer_id, key)
        found = record if return_record or record is None else record.value
        return (found, closer) if return_closer_peers else found

    async def _asked(self, peer: ID, key: bytes) -> tuple[Record | None, list[ID]]:
        """The record without all that is not used of it, and the peers that may have it too."""
        answer = await self._client.ask(peer, Message(type=Message.GET_VALUE, key=key))
        value, record = answer.record.value, None
        if 0 < len(value) <= self._record_bytes:
            record = Record(key=key, value=value, timeReceived=format_time_rfc3339())
        return record, self._client.led_to(answer)

    async def _store_at_peer(self, peer_id: ID, key: bytes, value: bytes, record: Record | None = None) -> bool:
        """Raises one of `circuit_wire.FAILURES`."""
        if peer_id == self.local_peer_id:
            return True
        sent = Message(type=Message.PUT_VALUE, key=key)
        sent.record.CopyFrom(record or self.get(key) or self._signed(key, value))
        sent.record.ClearField("timeReceived")
        return (await self._client.ask(peer_id, sent)).key == key

    async def _republish_records(self, peer_routing: Any = None) -> None:
        """Nodes publish more often than py-libp2p would."""


class Providers(ProviderStore):
    """The peers that have announced a model, under its key."""

    def __init__(self, host: IHost, peer_routing: Any, policy: DhtPolicy) -> None:
        super().__init__(host, peer_routing)
        self._client = DhtClient(host, policy)
        self._policy = policy
        self._rng = SystemRandom()
        self._records: BoundedStore[tuple[bytes, bytes], tuple[bytes, ...]] = BoundedStore(
            policy.provider_bytes, policy.lifetime_s, self._rng, self._note_dropped
        )
        self._of_key: dict[bytes, dict[bytes, str]] = {}  # the sources of the records, by key and peer

    @property
    def size_bytes(self) -> int:
        return self._records.size_bytes

    def add_provider(self, key: bytes, provider: PeerInfo) -> None:
        """When a key has all the providers that it may have, the newcomer takes a place of the fullest source."""
        source, peer = _SOURCE.get(), provider.peer_id.to_bytes()
        if len(key) > self._policy.key_bytes:
            return
        addresses = _told(provider.addrs, self._policy)  # bytes, see `BoundedStore`
        places = self._living(key)
        if peer not in places and len(places) >= self._policy.providers_per_key:
            self._drop(key, self._to_make_way(places, source))
        size_bytes = len(key) + len(peer) + ENTRY_BYTES * (1 + len(addresses)) + sum(map(len, addresses))
        if self._records.put((key, peer), addresses, size_bytes, source, now()):
            self._of_key.setdefault(key, {})[peer] = source

    def get_providers(self, key: bytes) -> list[PeerInfo]:
        """A few of them, at random, from many sources."""
        chosen = in_turn(self._living(key), self._policy.providers_told, self._rng)
        found = ((peer, self._records.get((key, peer), now())) for peer in chosen)
        return [PeerInfo(ID(peer), list(map(Multiaddr, each))) for peer, each in found if each is not None]

    def forget(self, key: bytes) -> None:
        for peer in list(self._of_key.get(key, ())):
            self._drop(key, peer)

    def cleanup_expired(self) -> None:
        self._records.drop_expired(now())

    def get_provided_keys(self, peer_id: ID) -> list[bytes]:
        peer = peer_id.to_bytes()
        return [key for key in list(self._of_key) if peer in self._living(key)]

    async def _get_providers_from_peer_with_closers(self, peer_id: ID, key: bytes) -> tuple[list[PeerInfo], list[ID]]:
        """Raises one of `circuit_wire.FAILURES`."""
        answer = await self._client.ask(peer_id, Message(type=Message.GET_PROVIDERS, key=key))
        return self._client.providers(answer), self._client.led_to(answer)

    async def _send_add_provider(self, peer_id: ID, key: bytes) -> bool:
        """Raises one of `circuit_wire.FAILURES`."""
        assert self.host is not None
        addresses = [each.to_bytes() for each in self.host.get_addrs()]
        ourselves = Message.Peer(id=self.host.get_id().to_bytes(), addrs=addresses)
        await self._client.tell(peer_id, Message(type=Message.ADD_PROVIDER, key=key, providerPeers=[ourselves]))
        return True

    async def _republish_provider_records(self) -> None:
        """See `Values._republish_records`."""

    def _living(self, key: bytes) -> dict[bytes, str]:
        """The providers of a key that the store still has, with their sources."""
        for peer in list(self._of_key.get(key, ())):
            self._records.get((key, peer), now())  # drops it if it is too old
        return self._of_key.get(key, {})

    def _note_dropped(self, place: tuple[bytes, bytes]) -> None:
        key, peer = place
        del self._of_key[key][peer]
        if not self._of_key[key]:
            del self._of_key[key]

    def _to_make_way(self, places: dict[bytes, str], source: str) -> bytes:
        counts: dict[str, int] = {source: 1}
        for each in places.values():
            counts[each] = counts.get(each, 0) + 1
        most = max(counts.values())
        return self._rng.choice([peer for peer, each in places.items() if counts[each] == most] or list(places))

    def _drop(self, key: bytes, peer: bytes) -> None:
        self._records.remove((key, peer))


def now() -> float:
    return trio.current_time()


def _told(addresses: list[Multiaddr], policy: DhtPolicy) -> tuple[bytes, ...]:
    told = (each.to_bytes() for each in addresses[: policy.addresses])
    return tuple(each for each in told if len(each) <= policy.address_bytes)
