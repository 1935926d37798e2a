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
    """The first ban is short; each further one lasts twice the one before, up to a limit.

    A peer is forgotten if it does not fail for the longest time after its ban.
    """

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._bans: dict[PeerId, _Ban] = {}

    def report(self, peer: PeerId, now_s: float) -> None:
        """`peer` failed. Failures before a ban has ended count once: a dozen sessions may notice one death."""
        forgotten_s = now_s - self._longest_s
        self._bans = {each: ban for each, ban in self._bans.items() if ban.until_s > forgotten_s}
        ban = self._bans.get(peer)
        if ban is None:
            self._bans[peer] = _Ban(now_s + self._first_s, self._first_s)
        elif ban.until_s <= now_s:
            ban.length_s = min(2 * ban.length_s, self._longest_s)
            ban.until_s = now_s + ban.length_s

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
