"""The connected peers that a node exchanges views with next, and those that it leaves. The time is told.

Strangers may be most of them, and tell nothing. If one were drawn at random, what the others know would expire here. So
each has its turn before announcements are old, and one that did not answer has to wait.
"""

from __future__ import annotations

from math import ceil, inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy


class Exchanges:
    """For one node."""

    def __init__(self, policy: SwarmPolicy, rng: random.Random) -> None:
        self._policy = policy
        self._rng = rng
        self._asked_s: dict[PeerId, float] = {}
        self._waits_until_s: dict[PeerId, float] = {}

    def take_next(self, connected: Sequence[PeerId], least: int, now_s: float) -> list[PeerId]:
        """The peers to ask now, `least` of those that are `connected`, or more if many are."""
        self._asked_s = {peer: at_s for peer, at_s in self._asked_s.items() if peer in connected}
        self._waits_until_s = {peer: at_s for peer, at_s in self._waits_until_s.items() if at_s > now_s}
        policy, ready = self._policy, [peer for peer in connected if peer not in self._waits_until_s]
        ready = ready or list(connected)  # the network may have failed, and not they
        for_all = ceil(len(connected) * policy.exchange_every_s / policy.announce_every_s)
        shuffled = self._rng.sample(ready, len(ready))
        chosen = sorted(shuffled, key=lambda peer: self._asked_s.get(peer, -inf))
        chosen = chosen[: max(least, min(for_all, policy.exchanges))]
        self._asked_s.update(dict.fromkeys(chosen, now_s))
        return chosen

    def leaving(self, connected: Mapping[PeerId, str]) -> list[PeerId]:
        """The peers whose connections end now, of those that are `connected`, by their address groups.

        At times one makes space for another peer. Nodes connect to those that they measure, too, which strangers may
        name without end. Beyond a number of connections, the oldest of the group that has most of them ends.
        """
        policy = self._policy
        groups: dict[str, list[PeerId]] = {}
        for peer, group in connected.items():
            groups.setdefault(group, []).append(peer)
        gone = [max(groups.values(), key=len).pop(0) for _ in range(len(connected) - policy.connections)]
        left = [peer for peer in connected if peer not in gone]
        if len(left) >= policy.neighbours and self._rng.random() < 1 / len(left):
            gone.append(left[self._rng.randrange(len(left))])
        return gone

    def pause_s(self, peers: int) -> float:
        """The pause after some exchanges, with this number of `peers` in the view.

        So the cost of exchanges in a second hardly grows with the view.
        """
        policy = self._policy
        longest_s = max(policy.news_every_s, policy.exchange_every_s)
        return min(longest_s, policy.news_every_s * max(1.0, peers / policy.news_peers))

    def note_failed(self, peer: PeerId, now_s: float) -> None:
        """The peer did not answer, or in a way that nobody may."""
        self._waits_until_s[peer] = now_s + self._policy.silent_wait_s
