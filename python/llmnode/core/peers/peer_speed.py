"""How long a peer takes for a step, judged by what it took before. Knows no clock: what it took is told."""

from __future__ import annotations

from collections import deque

KEPT = 32


class PeerSpeed:
    """The latest steps of one hop: how many positions, how many seconds."""

    def __init__(self) -> None:
        self._took: deque[tuple[int, float]] = deque(maxlen=KEPT)

    def note(self, positions: int, took_s: float) -> None:
        self._took.append((positions, took_s))

    def expected_s(self, positions: int) -> float | None:
        """The slowest of the known steps, scaled up if there are more positions now. None if nothing is known.

        Not shorter for fewer: most of a short step may be the way there.
        """
        return max((took_s * max(1.0, positions / known) for known, took_s in self._took), default=None)
