"""A store that strangers fill: bounded in bytes, for minutes, and fair among those that fill it. The time is told.

When it is full, a random entry of the source that holds most makes way (`fair_shares.py`). A source is an address
group: identities are free, addresses are not.
"""

from __future__ import annotations

from itertools import islice, takewhile
from typing import TYPE_CHECKING, Generic, TypeVar

from llmnode.core.fair_shares import FairShares

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from random import Random

K = TypeVar("K", bound="Hashable")
V = TypeVar("V")

ENTRY_BYTES = 200
"""An entry costs this much besides its value."""
DROPPED_AT_ONCE = 500
"""Expired entries that are dropped together, in about a millisecond. The others have their turn later."""


class BoundedStore(Generic[K, V]):
    """An entry takes its size and `ENTRY_BYTES` of the `bytes_max`. `dropped` is told of each that is gone.

    Entries are tuples: Python's garbage collector leaves those out that hold nothing but numbers and strings. Thousands
    of objects would hold up the event loop at each of its full collections.
    """

    def __init__(
        self, bytes_max: int, lifetime_s: float, rng: Random, dropped: Callable[[K], None] = lambda _key: None
    ) -> None:
        self._dropped = dropped
        self._bytes_max = bytes_max
        self._lifetime_s = lifetime_s
        self._rng = rng
        self._entries: dict[K, tuple[V, float]] = {}  # with the time when each expires; the oldest first
        self._shares = FairShares[K]()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(list(self._entries))

    @property
    def size_bytes(self) -> int:
        return self._shares.amount

    def put(self, key: K, value: V, size_bytes: int, source: str, now_s: float) -> bool:
        """Whether it is kept: not if it is larger than the store."""
        size_bytes += ENTRY_BYTES
        if size_bytes > self._bytes_max:
            return False
        self.remove(key)
        while self.size_bytes + size_bytes > self._bytes_max:
            self.remove(self._shares.victim(self._rng))
        self._entries[key] = value, now_s + self._lifetime_s
        self._shares.put(key, (source,), size_bytes)
        return True

    def get(self, key: K, now_s: float) -> V | None:
        """None if it is not there, or too old, and then it is removed."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        value, expires_s = entry
        if expires_s <= now_s:
            self.remove(key)
            return None
        return value

    def remove(self, key: K) -> bool:
        """Whether it was there."""
        self._shares.remove(key)
        if self._entries.pop(key, None) is None:
            return False
        self._dropped(key)
        return True

    def drop_expired(self, now_s: float) -> int:
        """How many were dropped, at most `DROPPED_AT_ONCE`."""
        oldest = islice(self._entries.items(), DROPPED_AT_ONCE)
        expired = [key for key, _ in takewhile(lambda each: each[1][1] <= now_s, oldest)]
        for key in expired:
            self.remove(key)
        return len(expired)


def in_turn(sources: dict[K, str], most: int, rng: Random) -> list[K]:
    """At most `most` of the keys, in an order in which sources take turns, and otherwise at random."""
    of_source: dict[str, list[K]] = {}
    keys = list(sources)
    rng.shuffle(keys)
    for key in keys:
        of_source.setdefault(sources[key], []).append(key)
    chosen: list[K] = []
    while of_source and len(chosen) < most:
        for source in list(of_source):
            chosen.append(of_source[source].pop())
            if not of_source[source]:
                del of_source[source]
    return chosen[:most]
