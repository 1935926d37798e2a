"""The load average of a worker: how many calls it computes, or has waiting, at a time. It knows no clock.

By Little's law that is the time which calls have spent here, for each second. Old times halve again and again, as in
the load average of Unix.
"""

from __future__ import annotations

from math import log

HALF_LIFE_S = 10.0
"""Announcements are some 15 s apart, so a longer one would tell of what is over."""


class LoadAverage:
    """Holds the time that the calls of one worker have spent there."""

    def __init__(self) -> None:
        self._spent_s = 0.0
        self._at_s = 0.0

    def note(self, spent_s: float, now_s: float) -> None:
        """Calls have ended that were here for `spent_s` together."""
        self._spent_s = self._left_s(now_s) + spent_s
        self._at_s = now_s

    def at(self, now_s: float) -> float:
        """The number of calls at a time, lately."""
        return self._left_s(now_s) * log(2) / HALF_LIFE_S

    def _left_s(self, now_s: float) -> float:
        return float(self._spent_s * 0.5 ** ((now_s - self._at_s) / HALF_LIFE_S))
