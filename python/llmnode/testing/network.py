"""The `Network` port in memory: links that are slow, lossy and cut, and peers that freeze and die, all as told.

One task moves all frames, by an agenda of what is due when: what happens, and in which order, follows from the seed.
Frames are handed over as they are: what a link does to bytes is for tests over real ones.
"""

from __future__ import annotations

import hashlib
import random
import zlib
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

import trio

from llmnode.core.budget import Budget, Resource, Worth
from llmnode.core.ids import PeerId
from llmnode.core.peers.dial_gate import DialGate
from llmnode.core.peers.whereabouts import peer_of
from llmnode.core.policy import LinkPolicy
from llmnode.errors import ConfigError, PeerUnreachable
from llmnode.testing.conditions import Conditions
from llmnode.testing.link import Endpoint, MemoryLink, is_heard
from llmnode.testing.medium import Medium

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Collection, Iterable

ACCEPT_QUEUE = 16
PORTS = 65535


@asynccontextmanager
async def open_internet(
    conditions: Conditions | None = None, *, policy: LinkPolicy | None = None, seed: int = 0
) -> AsyncIterator[MemoryInternet]:
    """Networks that reach each other under `conditions`, for as long as the context lasts."""
    async with trio.open_nursery() as nursery:
        internet = MemoryInternet(conditions or Conditions(), policy or LinkPolicy(), random.Random(seed))
        nursery.start_soon(internet.run)
        yield internet
        nursery.cancel_scope.cancel()


def peer_named(name: str) -> PeerId:
    """The id of the peer whose network has this name."""
    return PeerId(f"peer-{name}")


@dataclass(frozen=True, slots=True)
class Dial:
    """A dial that its dialler's gate has let pass."""

    at_s: float
    dialler: PeerId
    host: str
    port: int


class MemoryInternet(Medium):
    """The medium with the networks that it connects, and the faults that break it. Made by `open_internet`."""

    def __init__(self, conditions: Conditions, policy: LinkPolicy, rng: random.Random) -> None:
        super().__init__(conditions, policy, rng)
        self._networks: dict[PeerId, MemoryNetwork] = {}
        self._no_dial: set[tuple[PeerId, PeerId]] = set()
        self.black_holes: set[str] = set()
        """Addresses from which no answer comes to a dial."""
        self._mended = trio.Event()
        self._hosts: dict[PeerId, str] = {}
        self.dials: list[Dial] = []
        """The dials to peers that are not there, in the order of their ends."""

    def locate(self, peer: PeerId, host: str) -> None:
        """The peer is at this IP address, if it is anywhere."""
        self._hosts[peer] = host

    def network(self, name: str, host: str | None = None) -> MemoryNetwork:
        """A new peer with its network; a name that was used before is its next life, under the same id.

        It is at the IP address `host`; by default at one of its own, in an address group of its own.
        """
        peer = peer_named(name)
        if host is not None:
            self.locate(peer, host)
        network = MemoryNetwork(self, peer, self.host_of(peer))
        self._networks[network.peer] = network
        return network

    # Faults

    def kill(self, peer: PeerId) -> None:
        """The effect of SIGKILL: its system closes its connections, and others notice at once."""
        self.note(f"kill {peer}")
        network = self._networks.pop(peer)
        network.frozen = False
        for link in list(network.links):
            link.die()

    def freeze(self, peer: PeerId) -> None:
        """The effect of SIGSTOP: its links stay, but it neither reads nor writes until thawed; others find it silent.

        Its clocks run on, so what it does meanwhile, as giving up on others, shows when it is thawed.
        """
        self.note(f"freeze {peer}")
        self._networks[peer].frozen = True
        self._notice_silence()

    def thaw(self, peer: PeerId) -> None:
        """It reads what has arrived, and then may find that it has heard nothing for too long."""
        network = self._networks.get(peer)
        if network is not None and network.frozen:
            self.note(f"thaw {peer}")
            network.frozen = False
            for link in list(network.links):
                link.wake()
            self._note_mended()

    def cut(self, one: PeerId, other: PeerId) -> None:
        """Nothing that they send arrives until it is mended; their links end when the silence lasts."""
        self.cut_one_way(one, other)
        self.cut_one_way(other, one)

    def cut_one_way(self, sender: PeerId, receiver: PeerId) -> None:
        """The receiver hears nothing of the sender, which still hears the receiver."""
        self.note(f"cut {sender} -> {receiver}")
        self.cuts.add((sender, receiver))
        self._notice_silence()

    def mend(self, one: PeerId, other: PeerId) -> None:
        """Both ways; they can dial each other too."""
        self.note(f"mend {one} - {other}")
        for pair in ((one, other), (other, one)):
            self.cuts.discard(pair)
            self._no_dial.discard(pair)
        self._note_mended()

    def partition(self, *groups: Collection[PeerId]) -> None:
        """Cut every two peers that are in different groups."""
        for index, group in enumerate(groups):
            for one, other in product(group, [peer for later in groups[index + 1 :] for peer in later]):
                self.cut(one, other)

    def block_dials(self, dialler: PeerId, listener: PeerId) -> None:
        """The dialler's attempts to open links get no answer, as through a NAT; links that there are go on."""
        self.note(f"block dials {dialler} -> {listener}")
        self._no_dial.add((dialler, listener))

    def relay(self, one: PeerId, other: PeerId) -> None:
        """Links between them that are opened from now on say that they go through a relay."""
        self.relayed.add(frozenset((one, other)))

    def punch(self, one: PeerId, other: PeerId) -> None:
        """They do not any more: links that are opened from now on are direct."""
        self.note(f"direct {one} - {other}")
        self.note_direct(one, other)

    def set_conditions(self, sender: PeerId, receiver: PeerId, conditions: Conditions | None) -> None:
        """For frames in this direction, sent from now on; None for those of all others."""
        self.note(f"{sender} -> {receiver}: {conditions}")
        if conditions is None:
            self.special.pop((sender, receiver), None)
        else:
            self.special[sender, receiver] = conditions
        for link in self._links():
            link.keep_alive()

    def mend_all(self) -> None:
        """No cut, no blocked dial, nobody frozen, the same conditions everywhere."""
        self.note("mend all")
        self.cuts.clear()
        self._no_dial.clear()
        self.special.clear()
        for peer in list(self._networks):
            self.thaw(peer)
        self._note_mended()

    # The interface for networks

    def find(self, address: str) -> MemoryNetwork | None:
        """The network that listens at `address`, which may be the IP address of its host."""
        peer = peer_of(address)
        if address.startswith("/ip4/"):
            return self._networks.get(peer) if address.split("/")[2] == self.host_of(peer) else None
        if not address.startswith("/memory/"):
            raise ConfigError(f"{address!r} is no address in memory")
        return self._networks.get(peer)

    def host_of(self, peer: PeerId) -> str:
        """The IP address of a peer, which need not be there."""
        number = len(self._hosts)
        return self._hosts.setdefault(peer, f"8.{number >> 8 & 255}.{number & 255}.1")

    async def until_dialled(self, dialler: MemoryNetwork, listener: MemoryNetwork) -> None:
        """Until a handshake of three ways has succeeded."""
        ways = [(dialler.peer, listener.peer), (listener.peer, dialler.peer), (dialler.peer, listener.peer)]
        patience_s = self.policy.dial_timeout_s
        await trio.sleep(sum(self.between(*way).travel_s(self.rng, patience_s) for way in ways))
        while ways[0] in self._no_dial or not (is_heard(self, dialler, listener) and is_heard(self, listener, dialler)):
            await self._mended.wait()

    def _links(self) -> Iterable[MemoryLink]:
        return [link for network in self._networks.values() for link in network.links]

    def _notice_silence(self) -> None:
        for link in self._links():
            link.notice_silence()

    def _note_mended(self) -> None:
        for link in self._links():
            link.far.flush()
            link.notice_silence()
        self._mended.set()
        self._mended = trio.Event()


class MemoryNetwork(Endpoint):
    """The `Network` port of one peer. Made by `MemoryInternet.network`."""

    def __init__(self, internet: MemoryInternet, peer: PeerId, host: str) -> None:
        super().__init__(peer, host, Budget(internet.policy.budget))
        self._gate = DialGate(internet.policy.dials)
        self._internet = internet
        self._opened, self._accepted = trio.open_memory_channel[MemoryLink](ACCEPT_QUEUE)
        self.claimed_hosts: list[str] = []
        """It announces these IP addresses, of which it is at one, if it is reached at all."""

    @property
    def addresses(self) -> list[str]:
        return [f"/ip4/{host}/tcp/1/p2p/{self.peer}" for host in self.claimed_hosts] or [f"/memory/p2p/{self.peer}"]

    @property
    def key(self) -> bytes:
        return hashlib.blake2b(self.peer.encode(), digest_size=32).digest()

    def vouch(self, addresses: Iterable[str]) -> None:
        for address in addresses:
            self._internet.find(address)
            self._gate.vouch(*self._place(address), peer_of(address))

    def _place(self, address: str) -> tuple[str, int]:
        path = address.rpartition("/p2p/")[0]
        return self._internet.host_of(peer_of(address)), 1 + zlib.crc32(path.encode()) % PORTS

    async def dial(self, address: str, *, is_heard: bool = False) -> MemoryLink:
        """Through the gate of real nodes: the address of a peer in memory stands for its IP address."""
        internet = self._internet
        peer = peer_of(address)
        if not is_heard:
            self.vouch([address])
        other, place = internet.find(address), self._place(address)
        if (why := self._gate.why_not(*place, trio.current_time(), peer)) is not None:
            raise PeerUnreachable(f"not dialled: {why}", peer=peer)
        try:
            link = await self._dial(address, peer, other)
        except PeerUnreachable:
            if other is None:
                internet.dials.append(Dial(trio.current_time(), self.peer, *place))
            self._gate.report(*place, trio.current_time(), reached=False, peer=peer)
            raise
        self._gate.report(*place, trio.current_time(), reached=True, peer=peer)
        return link

    async def _dial(self, address: str, peer: PeerId, other: MemoryNetwork | None) -> MemoryLink:
        internet = self._internet
        with trio.move_on_after(internet.policy.dial_timeout_s):
            if address in internet.black_holes:
                await trio.sleep_forever()
            if other is None:
                conditions = internet.between(self.peer, peer)
                await trio.sleep(2 * conditions.delay_s)
            else:
                await internet.until_dialled(self, other)
            if other is not None and internet.find(address) is other:
                return self._link(other)
        raise PeerUnreachable(f"no answer from {address}", peer=peer)

    @asynccontextmanager
    async def accept(self) -> AsyncIterator[MemoryLink]:
        link = await self._accepted.receive()
        try:
            yield link
        finally:
            await link.end("no longer served")

    def sign(self, message: bytes) -> bytes:
        return _signature(self.peer, message)

    def verify(self, peer: PeerId, message: bytes, signature: bytes) -> bool:
        return _signature(peer, message) == signature

    def _link(self, other: MemoryNetwork) -> MemoryLink:
        """Raises PeerUnreachable if too many wait already to be accepted."""
        ours, theirs = MemoryLink(self._internet, self, other), MemoryLink(self._internet, other, self)
        ours.far, theirs.far = theirs, ours
        policy = self._internet.policy
        ours.connection.worth, theirs.connection.worth = Worth.OURS, Worth.LINK
        is_taken = sum(link.peer == self.peer for link in other.links) < policy.links_per_peer
        costs = {Resource.CONNECTIONS: 1, Resource.MEMORY: policy.budget.connection_bytes}
        try:
            if not (ours.connection.take_all(costs) and is_taken):
                raise trio.WouldBlock
            if not theirs.connection.take_all({Resource.INBOUND: 1, Resource.LINKS: 1} | costs):
                raise trio.WouldBlock
            other._opened.send_nowait(theirs)
        except trio.WouldBlock:
            ours.connection.close()
            theirs.connection.close()
            raise PeerUnreachable("takes no more links", peer=other.peer) from None
        self._internet.note(f"link {self.peer} -> {other.peer}")
        for link in (ours, theirs):
            link.own.links.append(link)
            link.keep_alive()
        return ours


def _signature(peer: PeerId, message: bytes) -> bytes:
    """No secret is in it: enough to tell that bytes were changed, and whose they are."""
    return hashlib.blake2b(message, key=peer.encode()[:64], digest_size=64).digest()
