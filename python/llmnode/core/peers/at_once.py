"""How many parts of a client's batch are under way at a time: fewer after a server had no memory for one, and later
more again, one by one.

Servers do not say how much memory they have for steps and passes. Knows no clock.
"""

from __future__ import annotations

WORKED = 16
"""After this many parts that servers had memory for, one more is tried."""


class AtOnce:
    """The parts that go to one server, or along one route."""

    def __init__(self, most: int) -> None:
        """There are never more than `most` at once."""
        self.number = self._most = most
        self._worked = 0

    def refused(self, under_way: int) -> None:
        """There was no memory for one of the parts that were `under_way`."""
        self.number = max(1, min(self.number, under_way) - 1)
        self._worked = 0

    def worked(self) -> None:
        """A part is through."""
        self._worked += 1
        if self._worked >= WORKED:
            self.number, self._worked = min(self._most, self.number + 1), 0
