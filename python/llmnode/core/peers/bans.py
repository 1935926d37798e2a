"""Peers that failed us lately, and until when others are preferred to them. Knows no clock: the time is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId


@dataclass(slots=True)
class _Ban:
    until_s: float
    length_s: float


class Bans:
    """The first ban is short, unless the failure cost much time. Each further one lasts twice the one before.

    There is a limit for the bans of failures that cost little, and one for the others. A peer is forgotten if it does
    not fail for the longest time after its ban, or for as long as the ban was, if that is more.
    """

    def __init__(
        self, first_s: float, longest_s: float, times: float = 0.0, longest_costly_s: float | None = None
    ) -> None:
        """A ban lasts at least this number of `times` what the failure cost. Without `longest_costly_s` that limit is
        `longest_s`, too.
        """
        self._first_s = first_s
        self._longest_s = longest_s
        self._times = times
        self._longest_costly_s = longest_s if longest_costly_s is None else max(longest_s, longest_costly_s)
        self._bans: dict[PeerId, _Ban] = {}

    def report(self, peer: PeerId, now_s: float, cost_s: float = 0.0) -> None:
        """`peer` failed, for which we had waited `cost_s`.

        Failures before a ban has ended count once: a dozen sessions may notice one death. One that cost more time than
        those before it makes the ban longer.
        """
        self._bans = {each: ban for each, ban in self._bans.items() if self._remembered_until_s(ban) > now_s}
        ban, least_s = self._bans.get(peer), min(self._times * cost_s, self._longest_costly_s)
        if ban is None:
            ban = self._bans[peer] = _Ban(now_s, max(self._first_s, least_s))
        elif now_s < ban.until_s:
            ban.until_s, ban.length_s = max(ban.until_s, now_s + least_s), max(ban.length_s, least_s)
            return
        else:
            ban.length_s = self._longer_s(ban.length_s, least_s)
        ban.until_s = now_s + ban.length_s

    def _longer_s(self, before_s: float, least_s: float) -> float:
        """The length of the ban after one of `before_s`. It is longer than `longest_s` only if this failure, for which
        it is to last `least_s`, cost much.
        """
        longest_s = self._longest_costly_s if least_s > self._first_s else self._longest_s
        return max(least_s, min(2 * before_s, longest_s))

    def _remembered_until_s(self, ban: _Ban) -> float:
        return ban.until_s + max(self._longest_s, ban.length_s)

    def banned(self, now_s: float) -> set[PeerId]:
        """All peers that are banned now."""
        return {peer for peer in self._bans if self.is_banned(peer, now_s)}

    def left_s(self, peer: PeerId, now_s: float) -> float:
        """How much longer it is banned; 0 if it is not."""
        ban = self._bans.get(peer)
        return 0.0 if ban is None else max(0.0, ban.until_s - now_s)

    def is_banned(self, peer: PeerId, now_s: float) -> bool:
        ban = self._bans.get(peer)
        return ban is not None and now_s < ban.until_s
