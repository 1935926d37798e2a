"""Chooses whose turn it is: a member of the group that has used the least.

A group that wanted no turn has saved nothing up: it begins with what the others have used now. So a group with many
members gets no more than one with a single member. The caller says what a turn has used.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class FairTurns(Generic[T]):
    """Members wait in order within their group."""

    def __init__(self) -> None:
        self._waiting: dict[str, deque[T]] = {}
        self._used: dict[str, float] = {}
        """By group, counted from the start. A group that is not here has used `_now`."""
        self._now = 0.0
        """The use of the group whose turn it was last, when it began."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def wait(self, group: str, member: T) -> None:
        self._waiting.setdefault(group, deque()).append(member)

    def give_up(self, group: str, member: T) -> None:
        """It waits no more."""
        waiting = self._waiting[group]
        waiting.remove(member)
        if not waiting:
            del self._waiting[group]

    def next(self) -> T | None:
        """None if nobody waits."""
        if not self._waiting:
            return None
        group = min(self._waiting, key=self._use)
        self._now = max(self._now, self._use(group))
        member = self._waiting[group].popleft()
        if not self._waiting[group]:
            del self._waiting[group]
        return member

    def note(self, group: str, used: float) -> None:
        """A member of the group has used this much in its turn."""
        self._used[group] = self._use(group) + used
        if len(self._used) > 2 * len(self._waiting) + 64:
            self._used = {each: used for each, used in self._used.items() if used > self._now}

    def _use(self, group: str) -> float:
        return max(self._used.get(group, 0.0), self._now)
