"""The peers that a host has heard of, for py-libp2p, which dials them and tells others of them: few bytes for each.

py-libp2p's own list keeps whatever it is told of a peer, for 1,000 peers. A further one has it sort all of them, and
the first that it drops is the node itself, with its key.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING

from libp2p.peer.peerdata import PeerData
from libp2p.peer.peerstore import PeerStore

from llmnode.net.addresses import tcp_address

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from libp2p.peer.envelope import Envelope
    from libp2p.peer.id import ID
    from multiaddr import Multiaddr

    from llmnode.core.policy import BudgetPolicy, PeerstorePolicy


LOOKED_THROUGH = 256


class KnownPeers(PeerStore):
    """Connected peers stay when it is full, and the node itself does; of the others the oldest makes way."""

    def __init__(self, policy: PeerstorePolicy, budget: BudgetPolicy) -> None:
        most_bytes = policy.memory_share * budget.memory_bytes
        peers = int(most_bytes / (policy.peer_bytes + policy.protocols_bytes))
        super().__init__(max_peers=max(1, min(policy.peers, peers)))
        self.policy = policy
        self.most_bytes = (
            self.max_peers * policy.peer_bytes + min(self.max_peers, budget.connections) * policy.protocols_bytes
        )
        """The memory of a full list. It is taken of the budget at once: see `open_host`."""
        self.is_connected: Callable[[ID], bool] = lambda _peer: False
        """The host sets this."""
        self.peer_data_map: OrderedDict[ID, PeerData] = OrderedDict()

    def note(self, peer: ID, places: Iterable[tuple[str, int]], protocols: Sequence[str]) -> None:
        """A peer says this of itself: it counts instead of what was heard before."""
        if addresses := [tcp_address(*each) for each in places]:
            self.clear_addrs(peer)
            self.add_addrs(peer, addresses, self.policy.said_s)
        self.set_protocols(peer, protocols)

    def hear(self, peer: ID, places: Iterable[tuple[str, int]]) -> None:
        """Others say that a peer is there. It counts if nothing else is known."""
        known = self.peer_data_map.get(peer)
        if known is None or not known.addrs or known.is_expired():
            self.add_addrs(peer, [tcp_address(*each) for each in places], self.policy.heard_s)

    def forget_connected(self, peer: ID) -> None:
        """It is not connected any more. Its addresses, if it has any, are still told to others."""
        data = self.peer_data_map.get(peer)
        if data is None or data.privkey is not None:
            return
        data.clear_protocol_data()
        if not data.addrs:
            del self.peer_data_map[peer]

    # py-libp2p calls these

    def peer_ids(self) -> list[ID]:
        """The newest: a lookup in the DHT that knows few peers sorts all of these by their distance."""
        return list(islice(reversed(self.peer_data_map), LOOKED_THROUGH))

    def add_addrs(self, peer_id: ID, addrs: Sequence[Multiaddr], ttl: int = 0) -> None:
        data = self._entry(peer_id)
        if data.is_expired():
            data.clear_addrs()
        small = (each for each in addrs if len(each.to_bytes()) <= self.policy.address_bytes)
        data.addrs = list(dict.fromkeys((*data.addrs, *small)))[: self.policy.addresses]
        data.set_ttl(ttl)
        data.update_last_identified()

    def add_protocols(self, peer_id: ID, protocols: Sequence[str]) -> None:
        self.set_protocols(peer_id, [*self._entry(peer_id).protocols, *protocols[: self.policy.protocols]])

    def set_protocols(self, peer_id: ID, protocols: Sequence[str]) -> None:
        few = protocols[: self.policy.protocols]
        self._entry(peer_id).protocols = [each for each in few if len(each) <= self.policy.protocol_chars]

    def consume_peer_record(self, envelope: Envelope, ttl: int) -> bool:
        """Signed records have the addresses that identify tells as well. They are not kept."""
        return True

    def _entry(self, peer: ID) -> PeerData:
        """The entry of a peer, which is the newest from now on."""
        data = self.peer_data_map.get(peer)
        if data is None:
            if len(self.peer_data_map) >= self.max_peers:
                self._make_way()
            data = self.peer_data_map[peer] = PeerData()
        self.peer_data_map.move_to_end(peer)
        return data

    def _make_way(self) -> None:
        for _ in range(len(self.peer_data_map)):
            oldest, data = next(iter(self.peer_data_map.items()))
            if data.privkey is None and not self.is_connected(oldest):
                del self.peer_data_map[oldest]
                return
            self.peer_data_map.move_to_end(oldest)  # so that it is not looked at each time
        others = (peer for peer, data in self.peer_data_map.items() if data.privkey is None)
        if (oldest_connected := next(others, None)) is not None:
            del self.peer_data_map[oldest_connected]

    def _enforce_peer_limit(self) -> None:
        """Nothing is left to do: see `_entry`."""
