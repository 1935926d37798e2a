"""Chooses whose turn it is: a member of the group that has used the least, and within it of the part that has.

A group that wanted no turn has saved nothing up: it begins with what the others have used now. So a group with many
members gets no more than one with a single member. The caller says what a turn has used.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")

SPARE_GROUPS = 64


class FairTurns(Generic[T]):
    """Members in nested groups: a path names the group of a member, then its part of that group, and so on.

    Members of one path wait in order.
    """

    def __init__(self) -> None:
        self._root = _Group[T]()

    def __len__(self) -> int:
        return self._root.waiting

    def wait(self, path: Sequence[str], member: T) -> None:
        self._root.wait(path, member)

    def give_up(self, path: Sequence[str], member: T) -> None:
        """It waits no more."""
        self._root.give_up(path, member)

    def next(self) -> T | None:
        """None if nobody waits."""
        return self._root.next() if self._root.waiting else None

    def note(self, path: Sequence[str], used: float) -> None:
        """A member of this path has used this much in its turn."""
        self._root.note(path, used)


class _Group(Generic[T]):
    """The members of one path, or the groups within it."""

    __slots__ = ("_groups", "_members", "_now", "used", "waiting")

    def __init__(self) -> None:
        self.used = 0.0
        """Counted from the start. A group that has used less than `_now` of the one around has used that."""
        self.waiting = 0
        """The members that wait here and in the groups within."""
        self._members: deque[T] = deque()
        self._groups: dict[str, _Group[T]] = {}
        self._now = 0.0
        """The use of the group whose turn it was last, when it began."""

    def wait(self, path: Sequence[str], member: T) -> None:
        self.waiting += 1
        if not path:
            self._members.append(member)
            return
        group = self._group(path[0])
        if not group.waiting:  # of groups that have used the same, the one that waits longest is next
            self._groups[path[0]] = self._groups.pop(path[0])
        group.wait(path[1:], member)

    def give_up(self, path: Sequence[str], member: T) -> None:
        if path:
            self._groups[path[0]].give_up(path[1:], member)
        else:
            self._members.remove(member)
        self.waiting -= 1

    def next(self) -> T:
        self.waiting -= 1
        if self._members:
            return self._members.popleft()
        waiting = (each for each in self._groups.values() if each.waiting)
        group = min(waiting, key=lambda each: max(each.used, self._now))
        self._now = max(self._now, group.used)
        return group.next()

    def note(self, path: Sequence[str], used: float) -> None:
        if path:
            group = self._group(path[0])
            group.used = max(group.used, self._now) + used
            group.note(path[1:], used)

    def _group(self, name: str) -> _Group[T]:
        group = self._groups.get(name)
        if group is None:
            if len(self._groups) > 2 * self.waiting + SPARE_GROUPS:
                kept = {each: known for each, known in self._groups.items() if known.waiting or known.used > self._now}
                self._groups = kept
            group = self._groups[name] = _Group()
        return group
