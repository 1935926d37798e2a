"""The address groups that have work computed at a server, now or a moment ago. Knows no clock: the time is told."""

from __future__ import annotations

from collections import Counter
from math import inf


class GroupWork:
    """Whether what one group asks for would keep the work of others waiting."""

    def __init__(self, keeps_s: float) -> None:
        """Work counts for `keeps_s` after its end: the next step of its client is on its way."""
        self._keeps_s = keeps_s
        self._under_way = Counter[str]()
        self._all = 0
        self._last, self._last_of_another = ("", -inf), ("", -inf)
        """The group whose work ended last, and when; and the same of the last one before it of another group."""

    def begin(self, group: str) -> None:
        """A step or a pass of this group has begun."""
        self._under_way[group] += 1
        self._all += 1

    def end(self, group: str, now_s: float) -> None:
        """It has ended."""
        self._all -= 1
        self._under_way[group] -= 1
        if not self._under_way[group]:
            del self._under_way[group]
        if self._last[0] != group:
            self._last_of_another = self._last
        self._last = group, now_s

    def is_of_others(self, group: str, now_s: float) -> bool:
        """Whether groups other than this one have some."""
        _, ended_s = self._last_of_another if self._last[0] == group else self._last
        return self._all > self._under_way[group] or now_s < ended_s + self._keeps_s
