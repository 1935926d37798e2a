"""The directory over libp2p's Kademlia DHT: provider records name the peers, and each peer's key has its announcement.

A DHT key has one value and not a set, hence the two. An announcement carries its own lifetime, and what is found is as
old as its last publication at most. Our nodes keep records for minutes (`dht_stores.py`). DHT servers of go-libp2p and
rust-libp2p keep both kinds too, if they speak `/ipfs/kad/1.0.0` (py-libp2p has no other) and take values under our
namespace.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from typing import TYPE_CHECKING

import msgpack
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.records.pubkey import PublicKeyValidator
from libp2p.records.validator import NamespacedValidator, Validator
from libp2p.tools.anyio_service import background_trio_service

from llmnode.core.budget import Kind, Resource
from llmnode.core.ids import PeerId
from llmnode.errors import ConfigError, RemoteProtocolError
from llmnode.net.dht_client import Routing, Table
from llmnode.net.dht_server import DhtServer
from llmnode.net.dht_stores import Providers, Values
from llmnode.net.identity import is_signed
from llmnode.wire.announcement import form_in_version_1, is_signed_by_peer, unpack_announcement

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence

    from libp2p.abc import INetStream

    from llmnode.core.announcement import SignedAnnouncement
    from llmnode.core.policy import DhtPolicy, SwarmPolicy
    from llmnode.net.host import Libp2pNetwork

NAMESPACE = "llmnode"
MOST_PROVIDERS = 20
"""Enough to meet a swarm; its members know the others."""
LOOKUPS_AT_ONCE = 4
"""The announcements that are looked for at the same time. For each lookup many peers open streams, in turns of our
address group."""
_DIGEST_CHARACTERS = 40


@contextlib.asynccontextmanager
async def open_directory(network: Libp2pNetwork, policy: SwarmPolicy) -> AsyncIterator[DhtDirectory]:
    """Take part in the DHT of the peers that `network` is connected to, now and later.

    A network that listens keeps records for others as well; one that only dials just asks.
    """
    mode = DHTMode.SERVER if network.addresses else DHTMode.CLIENT
    validator = NamespacedValidator({"pk": PublicKeyValidator(), NAMESPACE: _AnnouncementValidator(policy)})
    dht_policy = policy.dht
    kept = network.budget.process.open(Kind.PEER, "records of the DHT")
    if not kept.take(Resource.MEMORY, dht_policy.value_bytes + dht_policy.provider_bytes):
        raise ConfigError("the memory budget leaves nothing for the DHT: raise BudgetPolicy.memory_bytes")
    dht = _Kademlia(network, mode, validator, dht_policy)
    async with background_trio_service(dht), trio.open_nursery() as nursery:
        try:
            yield DhtDirectory(dht, nursery, policy)
        finally:
            nursery.cancel_scope.cancel()


class DhtDirectory:
    """The `Directory` port. Made by `open_directory`."""

    def __init__(self, dht: _Kademlia, nursery: trio.Nursery, policy: SwarmPolicy) -> None:
        self._dht = dht
        self._nursery = nursery
        self._policy = policy

    async def publish(self, signed: SignedAnnouncement) -> None:
        announcement = signed.announcement
        form = form_in_version_1(signed) or signed.signed  # peers of protocol 1 keep records of the former
        record = msgpack.packb((form.body, form.signature))

        async def publish() -> None:
            await self._meet_connected()
            with contextlib.suppress(ValueError):  # a newer one of ours is there already
                await self._dht.put_value(_peer_key(announcement.peer), record)
            await self._dht.provide(_model_key(announcement.offer.profile.model_digest))

        await self._apart(publish)

    async def find(self, model_digest: bytes) -> Sequence[SignedAnnouncement]:
        key = _model_key(model_digest)
        found: list[SignedAnnouncement] = []

        async def look_up() -> None:
            await self._meet_connected()
            # The library answers from its own store, if that has anything: a provider would find itself alone.
            self._dht.providers.forget(bytes.fromhex(key))
            providers = await self._dht.find_providers(key, MOST_PROVIDERS)
            peers = {PeerId(provider.peer_id.to_base58()) for provider in providers}  # one is listed many times
            async with trio.open_nursery() as nursery:
                waiting = iter(sorted(peers))
                for _ in range(LOOKUPS_AT_ONCE):
                    nursery.start_soon(self._look_up_peers, waiting, found)

        await self._apart(look_up)
        return found

    async def _look_up_peers(self, waiting: Iterator[PeerId], found: list[SignedAnnouncement]) -> None:
        for peer in waiting:
            await self._look_up_peer(peer, found)

    async def _look_up_peer(self, peer: PeerId, found: list[SignedAnnouncement]) -> None:
        key = _peer_key(peer)
        record = None
        with contextlib.suppress(BaseLibp2pError):
            record = await self._dht.get_value(key)
        if record is None:
            return
        with contextlib.suppress(RemoteProtocolError):
            signed = _read_record(record, self._policy)
            if signed.announcement.expires_ms > time.time() * 1000:
                found.append(signed)
                return
        self._dht.values.remove(key.encode())  # what has expired here would hide what others have

    async def _meet_connected(self) -> None:
        for peer in self._dht.host.get_connected_peers():
            await self._dht.add_peer(peer)

    async def _apart(self, work: Callable[[], Awaitable[None]]) -> None:
        """Wait for `work`, but not for ever. It goes on meanwhile, for as long as a record lives: peers of the DHT may
        lead on without end.
        """
        done = trio.Event()

        async def run() -> None:
            try:
                with contextlib.suppress(BaseLibp2pError), trio.move_on_after(self._policy.dht.lifetime_s):
                    await work()
            finally:
                done.set()

        self._nursery.start_soon(run)
        with trio.move_on_after(self._policy.find_timeout_s):
            await done.wait()


class _Kademlia(KadDHT):
    """The library's DHT with our stores, our requests and our answers to others."""

    def __init__(
        self, network: Libp2pNetwork, mode: DHTMode, validator: NamespacedValidator, policy: DhtPolicy
    ) -> None:
        super().__init__(network.host, mode, validator=validator, strict_validation=True)
        table = self.routing_table = Table(network.host, policy)
        self.peer_routing = Routing(network.host, table, policy)
        self.values = self.value_store = Values(network.host, policy)
        self.providers = self.provider_store = Providers(network.host, self.peer_routing, policy)
        self._server = DhtServer(self, table, policy, lambda peer: _peer_key(PeerId(peer.to_base58())))

    async def handle_stream(self, stream: INetStream) -> None:
        await self._server.take_stream(stream)


class _AnnouncementValidator(Validator):
    """The DHT's peers keep only this under our namespace: valid announcements, each by the peer of its key."""

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy

    def validate(self, key: str, value: bytes) -> None:
        """Raises ValueError, as the library expects."""
        try:
            signed = _read_record(value, self._policy)
        except RemoteProtocolError as error:
            raise ValueError(error.message) from error
        announcement = signed.announcement
        now_ms = time.time() * 1000
        if key != _peer_key(announcement.peer):
            raise ValueError("the announcement of another peer")
        if announcement.expires_ms <= now_ms:
            raise ValueError("expired")
        if announcement.expires_ms > now_ms + 1000 * (self._policy.lifetime_s + self._policy.clock_skew_s):
            raise ValueError("from the future")
        if not is_signed_by_peer(signed, is_signed):
            raise ValueError("not signed by the peer that it names")

    def select(self, _key: str, values: list[bytes]) -> int:
        """The index of the newest of some valid values."""
        sequences = [_read_record(value, self._policy).announcement.sequence for value in values]
        return sequences.index(max(sequences))


def _read_record(record: bytes, policy: SwarmPolicy) -> SignedAnnouncement:
    """Raises RemoteProtocolError."""
    most = policy.announcement_bytes
    try:
        if len(record) > most + 100:
            raise ValueError("too large")
        body, signature = msgpack.unpackb(record, max_array_len=2, max_bin_len=most)
        if type(body) is not bytes or type(signature) is not bytes:
            raise ValueError("no pair of bytes")
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise RemoteProtocolError(f"a DHT record is no announcement ({error})") from error
    return unpack_announcement(body, signature)


def _peer_key(peer: PeerId) -> str:
    """The key is a digest, since py-libp2p's servers look for no key of more than 50 bytes."""
    return f"/{NAMESPACE}/{hashlib.sha256(peer.encode()).hexdigest()[:_DIGEST_CHARACTERS]}"


def _model_key(digest: bytes) -> str:
    """A SHA-256 multihash in hex: provider records of libp2p are kept under nothing else."""
    name = f"{NAMESPACE}/model/".encode() + digest
    return (b"\x12\x20" + hashlib.sha256(name).digest()).hex()
