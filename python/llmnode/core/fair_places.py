"""Places of which there are few: the newest member of the fullest group leaves, so that other groups have some too.

The first that come do not keep all places, and identities gain nothing. It knows no clock.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

M = TypeVar("M", bound="Hashable")


class FairPlaces(Generic[M]):
    """Each member holds one of `most` places for its group."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._groups: dict[str, dict[M, None]] = {}
        """The members of each, the oldest first."""
        self._group_of: dict[M, str] = {}

    def __len__(self) -> int:
        return len(self._group_of)

    def __iter__(self) -> Iterator[M]:
        """The members, the oldest first."""
        return iter(self._group_of)

    def held_by(self, group: str) -> int:
        """The places of a group."""
        return len(self._groups.get(group, ()))

    def has_place(self, group: str) -> bool:
        """Whether one more member of this group may have a place: a free one, or that of `victim`."""
        return len(self) < self._most or self.victim(group) is not None

    def victim(self, group: str) -> M | None:
        """The member that has to leave before one of this group comes; None if nobody has to, or ought to.

        The fullest group still holds no less than this one afterwards. So no two groups take places from each other
        again and again.
        """
        if len(self) < self._most or not self._groups:
            return None
        fullest = max(self._groups.values(), key=len)
        return next(reversed(fullest)) if len(fullest) >= self.held_by(group) + 2 else None

    def put(self, member: M, group: str) -> None:
        """The caller has seen to it that there is a place."""
        self._groups.setdefault(group, {})[member] = None
        self._group_of[member] = group

    def leave(self, member: M) -> None:
        """Safe to call for one that has left."""
        if (group := self._group_of.pop(member, None)) is None:
            return
        del self._groups[group][member]
        if not self._groups[group]:
            del self._groups[group]
