"""Names a member that must go when places are short: one of the group that holds most, and of its part that does.

A stranger that fills one group crowds out the members of that group alone. A member that is in use stays, and counts.
The time of an operation grows with the logarithm of the number of groups, and not with the number of members.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import count
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    import random
    from collections.abc import Hashable, Sequence

M = TypeVar("M", bound="Hashable")

SPARE_ENTRIES = 64


class FairShares(Generic[M]):
    """Members in nested groups. Each has a path: its group, its part of that group, and so on. All have one length.

    A member holds one place, or another amount that it says.
    """

    def __init__(self) -> None:
        self._root = _Group[M]()
        self._members: dict[M, tuple[Sequence[Hashable], int, bool]] = {}

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, member: Hashable) -> bool:
        return member in self._members

    @property
    def amount(self) -> int:
        """The sum of what all members hold."""
        return self._root.amount

    def put(self, member: M, path: Sequence[Hashable], amount: int = 1, *, stays: bool = False) -> None:
        """Add `member`, or move it to another `path`. One that `stays` counts, and is not named."""
        if self._members.get(member) == (path, amount, stays):
            return
        self.remove(member)
        self._members[member] = path, amount, stays
        self._root.add(member, path, amount, stays=stays)

    def remove(self, member: M) -> bool:
        """Whether it was a member."""
        if (held := self._members.pop(member, None)) is None:
            return False
        path, amount, stays = held
        self._root.remove(member, path, amount, stays=stays)
        return True

    def victim(self, rng: random.Random, within: Sequence[Hashable] = ()) -> M:
        """One of the fullest group, drawn at random, so that nobody can make itself safe. It stays a member.

        Its path begins with `within`. Raises KeyError if there is none that does not stay.
        """
        return self._root.within(within).victim(rng)


class _Group(Generic[M]):
    """The members of one path, or the groups within it. `amount` is what they hold."""

    __slots__ = ("_by_amount", "_groups", "_members", "_numbers", "_places", "_staying", "amount", "may_go")

    def __init__(self) -> None:
        self.amount = 0
        self.may_go = 0
        """The members here and in the groups within that do not stay."""
        self._staying = 0
        self._members: list[M] = []
        self._places: dict[M, int] = {}
        self._groups: dict[Hashable, _Group[M]] = {}
        self._by_amount: list[tuple[int, int, _Group[M]]] = []
        """A heap of groups by what they held at some time, most of it first: one for each time that it changed."""
        self._numbers = count()

    def add(self, member: M, path: Sequence[Hashable], amount: int, *, stays: bool) -> None:
        self.amount += amount
        self.may_go += not stays
        if path:
            group = self._groups.setdefault(path[0], _Group())
            group.add(member, path[1:], amount, stays=stays)
            self._note(group)
        elif stays:
            self._staying += 1
        else:
            self._places[member] = len(self._members)
            self._members.append(member)

    def remove(self, member: M, path: Sequence[Hashable], amount: int, *, stays: bool) -> None:
        self.amount -= amount
        self.may_go -= not stays
        if path:
            group = self._groups[path[0]]
            group.remove(member, path[1:], amount, stays=stays)
            if group.is_empty:
                del self._groups[path[0]]
                group.amount = -1  # it is not found by what it held
            self._note(group)
        elif stays:
            self._staying -= 1
        else:
            place, last = self._places.pop(member), self._members.pop()
            if last != member:
                self._members[place] = last
                self._places[last] = place

    @property
    def is_empty(self) -> bool:
        return not self._members and not self._groups and not self._staying

    def within(self, path: Sequence[Hashable]) -> _Group[M]:
        return self._groups[path[0]].within(path[1:]) if path else self

    def victim(self, rng: random.Random) -> M:
        if self._members:
            return rng.choice(self._members)
        if not self.may_go:
            raise KeyError("nobody is here that may go")
        while (first := self._by_amount[0])[0] != -first[2].amount or not first[2].may_go:
            heappop(self._by_amount)
        return first[2].victim(rng)

    def _note(self, group: _Group[M]) -> None:
        if group.may_go and group.amount >= 0:
            heappush(self._by_amount, (-group.amount, next(self._numbers), group))
        if len(self._by_amount) > 2 * len(self._groups) + SPARE_ENTRIES:
            groups = [each for each in self._groups.values() if each.may_go]
            self._by_amount = [(-each.amount, next(self._numbers), each) for each in groups]
            heapify(self._by_amount)
