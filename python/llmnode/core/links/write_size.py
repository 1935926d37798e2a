"""How much of a bulk may be given away at once, to a link or its socket: a small frame that comes next waits for it.

On a fast line as much as makes few calls, on a slow one no more than passes in a moment. Knows no clock.
"""

from __future__ import annotations

import math

SMALL_BYTES = 3 << 13
"""A write of at most this size goes out before all that waits for the socket. 16 KiB of hidden states with their
headers are such a write."""
GENTLE_S = 1.0
"""For this long after a small write amid a bulk, the bulk is sent gently: no more of it is on the way than the other
side soon takes in."""
OPENING_WRITES = 4
"""A stream's first messages are of no conversation: two name its protocol, and others may say what bulk it will be."""
AMID_S = 0.5
"""A bulk is over when nothing of it was written for this long."""
MOMENT_S = 0.004
"""The time that sending one part may take. Less, and the socket would run dry whenever the event loop is late by a
little."""
LEAST_BYTES = 1 << 13
"""However slow the connection is: each part is a call, and a piece of a frame has a header."""
COUNTED_S = 0.1
"""The rate of a socket is measured over about this time."""


def part_bytes(bytes_per_s: float | None, most: int) -> int:
    """The size of a write that the socket sends in a moment: a power of two, or `most` if the rate is not known."""
    if bytes_per_s is None:
        return most
    passing = max(LEAST_BYTES, int(MOMENT_S * bytes_per_s))
    return min(most, 1 << passing.bit_length() - 1)


class Amid:
    """Whether something small came amid a bulk of a connection lately: more may come, and would wait behind it."""

    def __init__(self) -> None:
        self._bulk_s = self._gentle_until_s = -math.inf

    def counts(self, size_bytes: int) -> bool:
        """Whether a write of this size is to be noted: all large ones are, and small ones until the bulk is over."""
        return size_bytes > SMALL_BYTES or self._bulk_s > -math.inf

    def note(self, size_bytes: int, writes: int, now_s: float) -> bool:
        """A stream writes `size_bytes` after `writes` earlier writes. Returns whether it is to go gently."""
        if size_bytes > SMALL_BYTES:
            self._bulk_s = now_s
            return now_s < self._gentle_until_s
        if now_s >= self._bulk_s + AMID_S:
            self._bulk_s = -math.inf
        elif writes >= OPENING_WRITES:
            self._gentle_until_s = now_s + GENTLE_S
        return False


class DrainRate:
    """How fast a socket takes bytes, by when it is full: from then on it takes as many as it sends."""

    def __init__(self) -> None:
        self._bytes = 0.0
        self._seconds = 0.0
        self._full_s: float | None = None
        self._latest_s = 0.0
        self._taken_bytes = 0  # since it was full
        self._is_full = False

    @property
    def bytes_per_s(self) -> float | None:
        """None as long as it was not full twice."""
        return self._bytes / self._seconds if self._seconds else None

    @property
    def is_counting(self) -> bool:
        """Whether it was full, and may have had something to send since then. Else only a full one need be noted."""
        return self._full_s is not None

    def note(self, taken_bytes: int, now_s: float, *, is_full: bool) -> None:
        """The socket took `taken_bytes` now. `is_full` says that there was more, which it did not take."""
        if not self._is_full and now_s > self._latest_s + MOMENT_S:
            self._full_s = None  # it had nothing to send, perhaps
        self._taken_bytes += taken_bytes
        self._latest_s = now_s
        self._is_full = is_full
        if is_full and now_s != self._full_s:
            if self._full_s is not None:
                self._add(now_s - self._full_s)
            self._full_s, self._taken_bytes = now_s, 0

    def _add(self, seconds: float) -> None:
        keeps = COUNTED_S / (COUNTED_S + seconds)
        self._bytes = keeps * self._bytes + self._taken_bytes
        self._seconds = keeps * self._seconds + seconds
