"""Names a member that must go when places are short: one of the fullest group, and of the fullest part of that.

A stranger that fills one group crowds out the members of that group alone. The number of
members makes no operation slower.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Sequence


class FairShares:
    """Members in nested groups. Each has a path: its group, its part of that group, and so on. All have one length."""

    def __init__(self) -> None:
        self._root = _Group()
        self._paths: dict[Hashable, Sequence[Hashable]] = {}

    def __len__(self) -> int:
        return len(self._paths)

    def __contains__(self, member: Hashable) -> bool:
        return member in self._paths

    def put(self, member: Hashable, path: Sequence[Hashable]) -> None:
        """Add `member`, or move it to another `path`."""
        if self._paths.get(member) == path:
            return
        self.remove(member)
        self._paths[member] = path
        self._root.add(member, path)

    def remove(self, member: Hashable) -> None:
        """Does nothing if it is no member."""
        if (path := self._paths.pop(member, None)) is not None:
            self._root.remove(member, path)

    def victim(self, rng: random.Random) -> Hashable:
        """One of the fullest group, drawn at random, so that nobody can make itself safe. It stays a member."""
        return self._root.victim(rng)


class _Group:
    """The members of one path, or the groups within it, which are also kept by their sizes."""

    __slots__ = ("_by_size", "_fullest", "_groups", "_members", "_places", "size")

    def __init__(self) -> None:
        self.size = 0
        self._members: list[Hashable] = []
        self._places: dict[Hashable, int] = {}
        self._groups: dict[Hashable, _Group] = {}
        self._by_size: dict[int, dict[_Group, None]] = {}
        self._fullest = 0

    def add(self, member: Hashable, path: Sequence[Hashable]) -> None:
        self.size += 1
        if not path:
            self._places[member] = len(self._members)
            self._members.append(member)
            return
        group = self._groups.setdefault(path[0], _Group())
        self._unlist(group)
        group.add(member, path[1:])
        self._list(group)

    def remove(self, member: Hashable, path: Sequence[Hashable]) -> None:
        self.size -= 1
        if not path:
            place, last = self._places.pop(member), self._members.pop()
            if last != member:
                self._members[place] = last
                self._places[last] = place
            return
        group = self._groups[path[0]]
        self._unlist(group)
        group.remove(member, path[1:])
        self._list(group)
        if not group.size:
            del self._groups[path[0]]

    def victim(self, rng: random.Random) -> Hashable:
        if self._members:
            return rng.choice(self._members)
        return next(iter(self._by_size[self._fullest])).victim(rng)

    def _list(self, group: _Group) -> None:
        if group.size:
            self._by_size.setdefault(group.size, {})[group] = None
        self._fullest = max(self._fullest, group.size)
        while self._fullest and self._fullest not in self._by_size:
            self._fullest -= 1  # by one at most: a size changes by one

    def _unlist(self, group: _Group) -> None:
        if of_size := self._by_size.get(group.size):
            del of_size[group]
            if not of_size:
                del self._by_size[group.size]
