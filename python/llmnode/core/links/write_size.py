"""How much of a bulk may be given away at once, to a link or its socket: a small frame that comes next waits for it.

On a fast line as much as makes few calls, on a slow one no more than passes in a moment. Knows no clock.
"""

from __future__ import annotations

import math

SMALL_BYTES = 3 << 13
"""What is no larger, as 16 KiB of hidden states with their headers, goes out before all that waits for the socket."""
GENTLE_S = 1.0
"""After something small amid a bulk, so long no more of the bulk is on its way than the other side takes in soon."""
OPENING_WRITES = 4
"""A stream's first messages are of no conversation: two name its protocol, and others may say what bulk it will be."""
AMID_S = 0.5
"""A bulk of which nothing was written for so long is over."""
MOMENT_S = 0.004
"""What a part may take. Less, and the socket would run dry whenever the event loop is late by a little."""
LEAST_BYTES = 1 << 13
"""However slow the line is: each part is a call, and a piece of a frame has a header."""
COUNTED_S = 0.1
"""The rate of a socket is that of about so long."""


def part_bytes(bytes_per_s: float | None, most: int) -> int:
    """As much as passes in a moment: a power of two, and `most` if nobody knows how fast it is."""
    if bytes_per_s is None:
        return most
    passing = max(LEAST_BYTES, int(MOMENT_S * bytes_per_s))
    return min(most, 1 << passing.bit_length() - 1)


class Amid:
    """Whether something small came amid a bulk of a connection lately: more may come, and would wait behind it."""

    def __init__(self) -> None:
        self._bulk_s = self._gentle_until_s = -math.inf

    def note(self, size_bytes: int, writes: int, now_s: float) -> bool:
        """So much is written now, by a stream that wrote so often before. Returns whether it is to go gently."""
        if size_bytes > SMALL_BYTES:
            self._bulk_s = now_s
            return now_s < self._gentle_until_s
        if writes >= OPENING_WRITES and now_s < self._bulk_s + AMID_S:
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

    def note(self, taken_bytes: int, now_s: float, *, is_full: bool) -> None:
        """It took so many bytes now; `is_full`: and not more, though there were more."""
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
