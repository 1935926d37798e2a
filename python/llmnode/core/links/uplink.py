"""How fast a node sends large payloads over all of its links together, and to how many peers at a time that goes well.

Each of them is to get a share that is well above the slowest pace of a link. Knows no clock: times are told.
"""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

SHARE_BYTES_PER_S = 1 << 16
"""Four times the slowest pace of a link, and what a pass and an adapter are given at least."""
AT_FIRST = 4
"""With an uplink of 1 Mbit/s each then has nearly half of its share, and twice the slowest pace of a link."""
LEAST = 2
"""A peer that takes bytes slowly does not hold up all others."""
BUFFERED_BYTES = 1 << 18
"""The system takes about this much of each upload before it is sent, so it does not count."""
LEAST_S = 1e-3
KEPT = 32
RATES_KEPT = 8


class _Upload(NamedTuple):
    sent_bytes: int
    began_s: float
    ended_s: float

    def bytes_within(self, began_s: float, ended_s: float) -> float:
        """The bytes that were sent in this time, if it went evenly."""
        common_s = min(self.ended_s, ended_s) - max(self.began_s, began_s)
        return self.sent_bytes * max(0.0, common_s) / (self.ended_s - self.began_s)


class UplinkRate:
    """The rate of all uploads together, by those that have ended. Small ones tell nothing."""

    def __init__(self) -> None:
        self._uploads: deque[_Upload] = deque(maxlen=KEPT)
        self._rates: deque[float] = deque(maxlen=RATES_KEPT)

    def note(self, size_bytes: int, began_s: float, ended_s: float) -> None:
        """An upload has ended. Others went beside it, or still do, and those then count later."""
        if size_bytes <= BUFFERED_BYTES:
            return
        ended_s = max(ended_s, began_s + LEAST_S)
        self._uploads.append(_Upload(size_bytes - BUFFERED_BYTES, began_s, ended_s))
        together = sum(each.bytes_within(began_s, ended_s) for each in self._uploads)
        self._rates.append(together / (ended_s - began_s))

    @property
    def at_once(self) -> int:
        """The number of peers that large payloads are sent to at a time."""
        if not self._rates:
            return AT_FIRST
        return max(LEAST, 1 + int(max(self._rates) / SHARE_BYTES_PER_S))
