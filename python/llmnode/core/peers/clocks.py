"""How far the clocks of other peers are from ours, and whose is wrong. Told by them, and no proof of anything.

An announcement holds for a time that begins by its peer's clock, so a wrong clock makes a peer invisible to others, or
others to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.policy import SwarmPolicy

OF_GROUP = 2
"""Peers of one address group that count: identities are free, and most of them could say that our clock is wrong."""
CLOCK_FIX = "set the clock by NTP (`timedatectl set-ntp true` where there is systemd)"


@dataclass(frozen=True, slots=True)
class ClockVerdict:
    """`wrong` are the peers whose clocks are too far from ours, of `told` that have told theirs."""

    wrong: tuple[PeerId, ...]
    told: int
    offset_s: float
    """How far these are ahead of ours: the median."""
    tolerated_s: float

    @property
    def is_ours(self) -> bool:
        """It is ours that is wrong if most say so."""
        return 2 * len(self.wrong) > self.told

    @property
    def text(self) -> str:
        """A sentence for the operator of this machine, if `is_ours`."""
        apart = (
            f"{abs(self.offset_s):.1f} s {'behind' if self.offset_s > 0 else 'ahead of'} that of peer {self.wrong[0]}"
        )
        limit = f"announcements tolerate {self.tolerated_s:g} s"
        return f"this machine's clock is {apart}, and too far off for {len(self.wrong)} of {self.told}: {limit}"

    @property
    def fix(self) -> str:
        return f"{CLOCK_FIX}, or the peers' if this one is right"


def judge_clocks(offsets_ms: Mapping[PeerId, int], tolerated_s: float) -> ClockVerdict:
    """`offsets_ms` says for each peer how far its clock is ahead of ours."""
    wrong = {peer: offset_ms for peer, offset_ms in offsets_ms.items() if abs(offset_ms) > 1000 * tolerated_s}
    offset_s = median(wrong.values()) / 1000 if wrong else 0.0
    return ClockVerdict(tuple(wrong), len(offsets_ms), offset_s, tolerated_s)


@dataclass(frozen=True, slots=True)
class _Told:
    at_s: float
    asked: bool
    offset_ms: int
    group: str


class Clocks:
    """The latest clock offsets of peers, at most `policy.clocks` of them; the time is told.

    A peer that we have asked is known to a part of the time that its answer took; one that has asked us, to the time
    that its question was under way, so the former counts.
    """

    def __init__(self, policy: SwarmPolicy) -> None:
        self._policy = policy
        self._told: dict[PeerId, _Told] = {}

    def note(self, peer: PeerId, offset_ms: int, now_s: float, group: str, *, asked: bool) -> None:
        """A peer of this address group has told its time. The latest two of a group count."""
        known = self._told.get(peer)
        if known is not None and known.asked and not asked and self._is_fresh(known, now_s):
            return
        self._told.pop(peer, None)  # to the end: the oldest answer is forgotten first
        self._told[peer] = _Told(now_s, asked, offset_ms, group)
        of_group = [each for each, told in self._told.items() if told.group == group]
        if len(of_group) > OF_GROUP:
            del self._told[next((each for each in of_group if not self._told[each].asked), of_group[0])]
        if len(self._told) > self._policy.clocks:
            del self._told[next(iter(self._told))]

    def offsets_ms(self, now_s: float) -> dict[PeerId, int]:
        return {peer: told.offset_ms for peer, told in self._told.items() if self._is_fresh(told, now_s)}

    def judge(self, now_s: float) -> ClockVerdict:
        return judge_clocks(self.offsets_ms(now_s), self._policy.clock_skew_s)

    def _is_fresh(self, told: _Told, now_s: float) -> bool:
        return now_s - told.at_s < self._policy.clock_keeps_s
