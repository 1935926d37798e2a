"""How many frames a peer may send which nobody waits for, as late answers and grants. The time is told.

Each costs the event loop some 0.05 ms, and strangers can have a server connect to them.
"""

from __future__ import annotations

from typing import Final

BURST: Final = 2048
"""The frames that a peer may send at once."""
EACH: Final = 8
"""Each frame that we send, and each answer that we expect, allows for this many more."""
PER_S: Final = 16.0
"""Beyond that, it may send this many."""


class UnaskedFrames:
    """Those of one link."""

    def __init__(self, now_s: float) -> None:
        self._left = float(BURST)
        self._counted_s = now_s

    def allow(self) -> None:
        """We have sent a frame, or expect an answer."""
        self._left = min(BURST, self._left + EACH)

    def count(self, now_s: float) -> bool:
        """One has come. Whether it is one too many."""
        self._left = min(BURST, self._left + PER_S * (now_s - self._counted_s)) - 1
        self._counted_s = now_s
        return self._left < 0
