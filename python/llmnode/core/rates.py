"""Limits how often something may happen, by key: a burst at once, and then a rate. The time is told."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable

KEYS = 4096
"""The keys that are remembered at most. One that was forgotten starts afresh: it was not used for the longest time."""
FORGOTTEN_AT_ONCE = 2
"""The oldest keys that each use of one looks at. They are forgotten if they have their whole burst again."""


class Rates:
    """A token bucket for each key."""

    def __init__(self, burst: float, per_s: float) -> None:
        self._burst = burst
        self._per_s = per_s
        self._buckets: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # tokens, and when they were counted

    def wait_s(self, key: Hashable, now_s: float) -> float:
        """The time until the next one is allowed; 0 if it is allowed now."""
        return max(0.0, (1 - self._tokens(key, now_s)) / self._per_s)

    def count(self, key: Hashable, now_s: float, amount: float = 1.0) -> None:
        """One has happened, or one that counts as an `amount`. Several may have been allowed at the same time."""
        self._buckets[key] = max(-self._burst, self._tokens(key, now_s) - amount), now_s
        self._buckets.move_to_end(key)
        if len(self._buckets) > KEYS:
            self._buckets.popitem(last=False)
        for _ in range(FORGOTTEN_AT_ONCE):
            oldest = next(iter(self._buckets))
            if oldest == key or self._tokens(oldest, now_s) < self._burst:
                return
            del self._buckets[oldest]  # as below

    def give_back(self, key: Hashable, now_s: float, amount: float = 1.0) -> None:
        """An `amount` that was counted is not to count."""
        if key not in self._buckets:
            return
        tokens = self._tokens(key, now_s) + amount
        if tokens < self._burst:
            self._buckets[key] = tokens, now_s
        else:
            del self._buckets[key]  # a full one is like one that was never used

    def take(self, key: Hashable, now_s: float, amount: float = 1.0) -> bool:
        """Whether one is allowed now; then it counts, as `amount`."""
        if self.wait_s(key, now_s) > 0:
            return False
        self.count(key, now_s, amount)
        return True

    def _tokens(self, key: Hashable, now_s: float) -> float:
        tokens, counted_s = self._buckets.get(key, (self._burst, now_s))
        return min(self._burst, tokens + max(0.0, now_s - counted_s) * self._per_s)  # a clock may be set back
