"""Counts by key that halve with time. The time is told."""

from __future__ import annotations

from collections import OrderedDict
from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from llmnode.core.rates import KEYS

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterator

Key = TypeVar("Key", bound="Hashable")

_FORGOTTEN = 1 / 16
"""A count below it is none."""


class FadingCounts(Generic[Key]):
    """A count halves in `half_life_s`, and is never above `most`. The latest `KEYS` keys are remembered.

    Counts that have faded are forgotten.
    """

    def __init__(self, half_life_s: float, most: float = inf) -> None:
        self._half_life_s = half_life_s
        self._most = most
        self._counts: OrderedDict[Key, tuple[float, float]] = OrderedDict()  # and when each was counted

    def add(self, key: Key, now_s: float, amount: float = 1.0) -> None:
        """One more, or this part of one."""
        self._counts[key] = min(self._most, self.of(key, now_s) + amount), now_s
        self._counts.move_to_end(key)
        while len(self._counts) > KEYS or not self.of(next(iter(self._counts)), now_s):
            self._counts.popitem(last=False)

    def __iter__(self) -> Iterator[Key]:
        """The keys that have been counted, some of which may have faded."""
        return iter([*self._counts])

    def __len__(self) -> int:
        """0 if nothing counts."""
        return len(self._counts)

    def of(self, key: Key, now_s: float) -> float:
        """The part of the count of `key` that is left."""
        counted = self._counts.get(key)
        if counted is None:  # so for nearly all of thousands of servers
            return 0.0
        count, at_s = counted
        left = count * 0.5 ** ((now_s - at_s) / self._half_life_s)
        return float(left) if left >= _FORGOTTEN else 0.0
