"""How long a client waits for a pass, by its size and by what its peer took before. Knows no clock: times are told.

A pass may be a few positions through one block, or a thousand through eighty blocks and back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.peers.peer_speed import PeerSpeed

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import PassPolicy

PEERS = 256
"""A client remembers the speed of this many. Those that it asked longest ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class PassSize:
    """`cost` is in positions times blocks of a forward. `size_bytes` cross the link, there and back."""

    cost: int
    size_bytes: int


class PassPatience:
    """The peers of one client."""

    def __init__(self, policy: PassPolicy) -> None:
        self._policy = policy
        self._speeds: dict[PeerId, PeerSpeed] = {}

    def note(self, peer: PeerId, size: PassSize, took_s: float) -> None:
        """The peer has answered a pass of this size."""
        speed = self._speeds.pop(peer, None) or PeerSpeed()
        speed.note(size.cost, took_s)
        self._speeds[peer] = speed
        if len(self._speeds) > PEERS:
            del self._speeds[next(iter(self._speeds))]

    def timeout_s(self, peer: PeerId, size: PassSize) -> float:
        """The time for the answer: for the size of the pass, and by what the peer took before, if that is less."""
        policy, speed = self._policy, self._speeds.get(peer)
        for_size_s = policy.base_s + size.cost / policy.cost_per_s + size.size_bytes / policy.bytes_per_s
        most_s = min(policy.longest_s, for_size_s)
        expected_s = speed.expected_s(size.cost) if speed is not None else None
        return most_s if expected_s is None else min(most_s, policy.patience_s + policy.patience_times * expected_s)
