"""Peers that may have lied, and those that have. Knows no clock: the time is told.

If one hop's output is not the next hop's input, and no proof says which of them lied, both are suspected. Neither is
banned for its neighbour's lie. Suspicion makes a peer dearer and is forgotten; only proof convicts. A peer whose result
differs from those of two others is distrusted. That proves nothing to anybody else, but we avoid it for the same time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.fading import FadingCounts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import TrustPolicy


class Suspicion:
    """An honest peer is suspected only while it stands beside a liar; a liar is suspected beside any peer."""

    def __init__(self, policy: TrustPolicy) -> None:
        self._policy = policy
        self._breaks: FadingCounts[PeerId] = FadingCounts(policy.suspicion_half_life_s, policy.most_suspicion)
        self._convicted_until_s: dict[PeerId, float] = {}
        self._distrusted_until_s: dict[PeerId, float] = {}

    def suspect(self, peers: Iterable[PeerId], now_s: float) -> None:
        """One break that each of `peers` may have caused."""
        for peer in peers:
            self._breaks.add(peer, now_s)

    def convict(self, peer: PeerId, now_s: float) -> None:
        """`peer` is proved a liar: it must not be used for a long time, even if there is nobody else."""
        self._forget(now_s)
        self._convicted_until_s[peer] = now_s + self._policy.conviction_s

    def is_convicted(self, peer: PeerId, now_s: float) -> bool:
        return now_s < self._convicted_until_s.get(peer, now_s)

    def distrust(self, peer: PeerId, now_s: float) -> None:
        """We judge `peer` to compute wrongly: as `convict`, but no verdict."""
        self._forget(now_s)
        self._distrusted_until_s[peer] = now_s + self._policy.conviction_s

    def is_excluded(self, peer: PeerId, now_s: float) -> bool:
        """Whether it must not be used: convicted or distrusted."""
        return self.is_convicted(peer, now_s) or now_s < self._distrusted_until_s.get(peer, now_s)

    def penalty(self, peer: PeerId, now_s: float) -> float:
        """The factor for a peer's cost on a route: 1 without suspicion, more with it."""
        return 1 + self._policy.suspicion_cost * self._breaks.of(peer, now_s)

    def penalties(self, now_s: float) -> dict[PeerId, float]:
        """The penalty of each peer that is suspected. A swarm may have thousands of others."""
        return {peer: self.penalty(peer, now_s) for peer in self._breaks}

    def excluded(self, now_s: float) -> set[PeerId]:
        """All peers that `is_excluded`."""
        return {each for each in (*self._convicted_until_s, *self._distrusted_until_s) if self.is_excluded(each, now_s)}

    def _forget(self, now_s: float) -> None:
        self._convicted_until_s = _still(self._convicted_until_s, now_s)
        self._distrusted_until_s = _still(self._distrusted_until_s, now_s)


def _still(until_s: dict[PeerId, float], now_s: float) -> dict[PeerId, float]:
    return {peer: end_s for peer, end_s in until_s.items() if now_s < end_s}
