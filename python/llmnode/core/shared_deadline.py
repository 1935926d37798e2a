"""The deadline that several hops have together. The time in which they have nothing to do does not count.

Several waits go on at once, so a moment may be excused by some of them, and worked in by others. It is excused once,
and only if no hop is waited for. The time is told, and never goes back.
"""

from __future__ import annotations

from bisect import bisect_left
from math import inf
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Iterable

Stretch: TypeAlias = "tuple[float, float]"
"""From a time to another one."""


class SharedDeadline:
    """Ends at `until_s`, at first and after what was excused."""

    def __init__(self, until_s: float = inf) -> None:
        self.until_s = until_s
        self._began_s: list[float] = []
        """When the waits for hops began that have not ended."""
        self._worked = _Stretches()
        self._excused = _Stretches()

    def begin(self, since_s: float) -> None:
        """A hop is waited for from now on."""
        self._began_s.append(since_s)

    def end(self, since_s: float, now_s: float) -> None:
        """The hop that was waited for since then has answered, or not in time."""
        self._began_s.remove(since_s)
        self._worked.add(since_s, now_s)

    def excuse_idle(self, since_s: float, now_s: float) -> None:
        """The hops were given nothing to do since then, as far as one wait tells."""
        for each in self._worked.outside(since_s, min(now_s, *self._began_s, inf)):
            self._excuse(each)

    def excuse(self, stretches: Iterable[Stretch]) -> None:
        """The hops that were waited for then were not to blame."""
        for each in stretches:
            self._excuse(each)

    def until_with_s(self, stretches: Iterable[Stretch]) -> float:
        """Its end if these were excused, too."""
        left = (part for each in stretches for part in self._excused.outside(*each))
        return self.until_s + sum(end_s - since_s for since_s, end_s in left)

    def _excuse(self, stretch: Stretch) -> None:
        self.until_s += sum(end_s - since_s for since_s, end_s in self._excused.outside(*stretch))
        self._excused.add(*stretch)


class _Stretches:
    """Stretches of time that neither meet nor touch, in their order."""

    def __init__(self) -> None:
        self._since_s: list[float] = []
        self._until_s: list[float] = []

    def add(self, since_s: float, until_s: float) -> None:
        if until_s <= since_s:
            return
        first, end = self._touching(since_s, until_s)
        if first < end:
            since_s, until_s = min(since_s, self._since_s[first]), max(until_s, self._until_s[end - 1])
        self._since_s[first:end], self._until_s[first:end] = [since_s], [until_s]

    def outside(self, since_s: float, until_s: float) -> list[Stretch]:
        """The parts of this stretch that are in none of them."""
        first, end = self._touching(since_s, until_s)
        edges_s = [since_s]
        for each in range(first, end):
            edges_s += self._since_s[each], self._until_s[each]
        edges_s.append(until_s)
        pairs = zip(edges_s[::2], edges_s[1::2], strict=True)
        return [(start_s, end_s) for start_s, end_s in pairs if start_s < end_s]

    def _touching(self, since_s: float, until_s: float) -> tuple[int, int]:
        """The range of those that end no sooner than `since_s`, and begin no later than `until_s`."""
        first = bisect_left(self._until_s, since_s)
        end = first
        while end < len(self._since_s) and self._since_s[end] <= until_s:
            end += 1
        return first, end
