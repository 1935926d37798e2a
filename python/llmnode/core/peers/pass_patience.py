"""How long a client waits for a pass, by its size and by what its peer took before. Knows no clock: times are told.

A pass may be a few positions through one block, or a thousand through eighty blocks and back. A peer that has answered
none is held to what other peers of its blocks take, if these are known. It may be slower than they and honest. So it is
not banned if its time is over: it rests, and has twice the time after that.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median_low
from typing import TYPE_CHECKING

from llmnode.core.peers.peer_speed import PeerSpeed

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import PassPolicy

PEERS = 256
"""A client remembers the speed of this many. Those that it asked longest ago are forgotten first."""


@dataclass(frozen=True, slots=True)
class PassSize:
    """`cost` is in positions times blocks of a forward. `size_bytes` cross the link, there and back."""

    cost: int
    size_bytes: int


@dataclass(slots=True)
class _Rest:
    until_s: float
    times: int
    """The number of times that it has begun."""


class PassPatience:
    """The peers of one client."""

    def __init__(self, policy: PassPolicy) -> None:
        self._policy = policy
        self._speeds: dict[PeerId, PeerSpeed] = {}
        self._parts: dict[PeerId, PeerSpeed] = {}
        """How long those of `_speeds` took to take parts of adapters, by their bytes."""
        self._rests: dict[PeerId, _Rest] = {}

    def note(self, peer: PeerId, size: PassSize, took_s: float, parts: PeerSpeed | None = None) -> None:
        """The peer has answered a pass of this size, in this time from when we began to send it. `parts` says how long
        it took to take adapters, by their bytes.
        """
        self._rests.pop(peer, None)
        speed = self._speeds.pop(peer, None) or PeerSpeed()
        speed.note(size.cost, took_s)
        self._speeds[peer] = speed
        if parts is not None:
            self._parts[peer] = parts
        if len(self._speeds) > PEERS:
            forgotten = next(iter(self._speeds))
            del self._speeds[forgotten]
            self._parts.pop(forgotten, None)

    def is_known(self, peer: PeerId) -> bool:
        """Whether it has answered a pass."""
        return peer in self._speeds

    def timeout_s(self, peer: PeerId, size: PassSize) -> float:
        """The time for the answer from when the pass was written, which may take long over a slow uplink: for the size
        of the pass, and by what the peer took before, if that is less.
        """
        policy, speed = self._policy, self._speeds.get(peer)
        for_size_s = policy.base_s + size.cost / policy.cost_per_s + size.size_bytes / policy.bytes_per_s
        most_s = min(policy.longest_s, for_size_s)
        expected_s = speed.expected_s(size.cost) if speed is not None else None
        return most_s if expected_s is None else min(most_s, policy.patience_s + policy.patience_times * expected_s)

    def stranger_s(self, peer: PeerId, size: PassSize, others: Iterable[PeerId]) -> float | None:
        """The time for a peer that has answered no pass, if some of `others`, which could take its place, have. Else
        None. It begins when the pass is sent, so it may be longer than `timeout_s`.

        It is held to the one in the middle: one slow peer does not buy all strangers its time, and one fast peer does
        not cost them theirs.
        """
        if self.is_known(peer):
            return None
        known = [speed for other in others if (speed := self._speeds.get(other)) is not None]
        usual_s = [took_s for each in known if (took_s := each.expected_s(size.cost)) is not None]
        if not usual_s:
            return None
        policy = self._policy
        first_s = policy.first_patience_s + policy.first_patience_times * median_low(usual_s)
        return first_s * self._times(peer)

    def stranger_parts_s(self, peer: PeerId, size_bytes: int, others: Iterable[PeerId]) -> float:
        """The time in which such a peer takes parts of an adapter with this number of bytes.

        It is held to the one of `others` in the middle, too. So it is not blamed for a slow upload of the client, which
        these have as well. If they have taken none, it has the time of the slowest upload that is waited for.
        """
        policy, known = self._policy, [speed for other in others if (speed := self._parts.get(other)) is not None]
        usual_s = [took_s for each in known if (took_s := each.expected_s(size_bytes)) is not None]
        first_s = policy.first_patience_times * median_low(usual_s) if usual_s else size_bytes / policy.bytes_per_s
        return first_s * self._times(peer)

    def _times(self, peer: PeerId) -> float:
        """The factor for its time, after it was too short."""
        rest = self._rests.get(peer)
        return 1.0 if rest is None else 2.0**rest.times

    def note_overdue(self, peer: PeerId, waited_s: float, now_s: float) -> None:
        """A stranger has not answered in time: it rests. Several passes that were there together count once."""
        rest = self._rests.pop(peer, None) or _Rest(now_s, 0)
        if rest.until_s <= now_s:
            rest.until_s, rest.times = now_s + self._policy.rest_times * waited_s, rest.times + 1
        self._rests[peer] = rest
        if len(self._rests) > PEERS:
            del self._rests[next(iter(self._rests))]

    def resting(self, now_s: float) -> set[PeerId]:
        """The strangers that are to have no passes now, if others can take them."""
        return {peer for peer, rest in self._rests.items() if now_s < rest.until_s}
