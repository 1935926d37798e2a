"""The steps that a client has at one peer at a time, so that none of them makes the peer seem slow to the others.

Knows no clock: the time is told.
"""

from __future__ import annotations


class Company:
    """Holds the positions of one client that are at one peer. They come and go with the steps that have them."""

    def __init__(self) -> None:
        self._here = 0
        self._spent_s = 0.0
        """The times of all positions until `_at_s`, together."""
        self._at_s = 0.0

    def come(self, positions: int, now_s: float) -> float:
        """A step of this number of `positions` comes. Returns its mark, which `go` needs."""
        self._spent_s += self._here * (now_s - self._at_s)
        self._at_s = now_s
        self._here += positions
        return self._spent_s

    def go(self, positions: int, mark: float, came_s: float, now_s: float) -> float:
        """The step that came at `came_s` goes. Returns the positions that were here beside its own, on average."""
        self._spent_s += self._here * (now_s - self._at_s)
        self._at_s = now_s
        self._here -= positions
        if now_s <= came_s:
            return float(self._here)
        return max(0.0, (self._spent_s - mark) / (now_s - came_s) - positions)
