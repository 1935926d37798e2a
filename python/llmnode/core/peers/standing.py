"""The standing of peers with a client: what it has seen of them, and how far it believes what they say.

A peer's word costs it nothing: a liar says that it is the fastest, and gets every session. So a peer that has served us
counts as fast as we have seen, or as slow as it says. Another peer counts as slow as it says, but hardly faster than
those that we know. A small share of new sessions believes such peers, so that fast ones are found. Knows no clock: the
time is told.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING

from llmnode.core.route import HopCost

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import StandingPolicy

PEERS = 4096
"""A client remembers this many. Those that served it longest ago are forgotten first."""


@dataclass(slots=True)
class _Known:
    positions: int = 0
    """Those of short steps, since it last failed."""
    failures: int = 0
    """Sessions that it took, and then did not serve, since it last served one."""
    short_steps: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=16))
    """The latest ones: the number of blocks, and the time that each took."""
    at_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A peer that could get a session, and what it says."""

    peer: PeerId
    said_block_s: float
    sessions: int
    """The sessions that this client has there now."""


class Standing:
    """The peers of one client."""

    def __init__(self, policy: StandingPolicy) -> None:
        self._policy = policy
        self._known: dict[PeerId, _Known] = {}

    def note_served(self, peer: PeerId, blocks: int, positions: int, took_s: float, now_s: float) -> None:
        """A step of ours went through the peer, and everything that we can check was right."""
        known = self._remember(peer, now_s)
        if positions > self._policy.short_step:
            return
        known.short_steps.append((blocks, took_s))
        known.positions += positions
        if known.positions >= self._policy.proven_positions:
            known.failures = 0

    def note_failed(self, peer: PeerId, now_s: float) -> None:
        """The peer took a session of ours, and did not serve it: it refused, hung, or answered nonsense.

        It has to prove itself anew.
        """
        known = self._remember(peer, now_s)
        known.positions = 0
        known.failures += 1

    def is_proven(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer has served us enough, not too long ago."""
        known = self._known.get(peer)
        if known is None or known.at_s + self._policy.keeps_s < now_s:
            return False
        return known.positions >= self._policy.proven_positions

    def costs(
        self, candidates: Sequence[Candidate], now_s: float, *, explores: bool = False
    ) -> Mapping[PeerId, HopCost]:
        """The cost of a token at each peer. `explores`: fast newcomers are to be believed more than usual."""
        default, policy = HopCost(), self._policy
        costs = {each.peer: self._measured(each) for each in candidates if self.is_proven(each.peer, now_s)}
        proven = set(costs)
        seen_s = [seen for each in candidates if each.peer in proven and (seen := self._seen_block_s(each)) is not None]
        if seen_s and not explores:
            least_s = median(seen_s) * policy.unproven_cost
        else:
            least_s = median(seen_s or [each.said_block_s for each in candidates] or [0.0]) / policy.believed_times
        for each in candidates:
            if each.peer not in proven:
                times = self._distrust(each, now_s)
                costs[each.peer] = HopCost(times * default.hop_s, times * max(each.said_block_s, least_s))
        return costs

    def _measured(self, candidate: Candidate) -> HopCost:
        """The time beyond what the peer says is the way there, or a lie: it is paid for at each visit."""
        default, said_s = HopCost(), candidate.said_block_s
        excess = [took_s - blocks * said_s for blocks, took_s in self._known[candidate.peer].short_steps]
        return HopCost(max(default.hop_s, median(excess)), said_s)

    def _seen_block_s(self, candidate: Candidate) -> float | None:
        """The time of a token for each block, with the way there. None if the peer is much slower than it says.

        Such a peer says nothing about what others can do.
        """
        steps, said_s, policy = self._known[candidate.peer].short_steps, candidate.said_block_s, self._policy
        excess_s = median(took_s - policy.believed_times * blocks * said_s for blocks, took_s in steps)
        return max(said_s, median(took_s / blocks for blocks, took_s in steps)) if excess_s < policy.way_s else None

    def _distrust(self, candidate: Candidate, now_s: float) -> float:
        """The factor for the cost of a peer that has not served us."""
        known, policy = self._known.get(candidate.peer), self._policy
        failures = known.failures if known is not None and now_s < known.at_s + policy.keeps_s else 0
        times = 2.0 ** min(failures, policy.most_failures)
        return times * policy.entrusted_cost if candidate.sessions >= policy.unproven_sessions else times

    def _remember(self, peer: PeerId, now_s: float) -> _Known:
        known = self._known.pop(peer, None)
        if known is None or known.at_s + self._policy.keeps_s < now_s:
            known = _Known()
        known.at_s = now_s
        self._known[peer] = known
        if len(self._known) > PEERS:
            del self._known[next(iter(self._known))]
        return known
