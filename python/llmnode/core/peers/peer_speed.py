"""How long a peer takes for a step: by its earlier steps and its announced speed. Knows no clock: times are told."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.policy import StandingPolicy

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
        slowest_s = None
        for known, took_s in self._took:
            scaled_s = took_s * positions / known if positions > known else took_s
            if slowest_s is None or scaled_s > slowest_s:
                slowest_s = scaled_s
        return slowest_s

    def usual_s(self, most_positions: int) -> float | None:
        """The median of the known steps of at most this number of positions. None if there are none."""
        took_s = [each_s for positions, each_s in self._took if positions <= most_positions]
        return median(took_s) if took_s else None


@dataclass(frozen=True, slots=True)
class PromisedTime:
    """The time that a peer says it takes for one position, and how long a client waits beyond that at first.

    A peer that says that it is fast has a short deadline. One that says that it is slow gets fewer sessions.
    """

    position_s: float
    patience_s: float


class Overtime:
    """The time that one hop took beyond its promised time, in steps that were much longer than that.

    A step that was not halves it: a long session has a slow step from time to time.
    """

    def __init__(self, policy: StandingPolicy) -> None:
        self._policy = policy
        self.total_s = 0.0
        self.position_s = 0.0
        """The time for a position of the latest of these steps."""

    def note(self, promised: PromisedTime, positions: int, took_s: float) -> None:
        """A step of this number of positions took this long."""
        if positions > self._policy.short_step:
            return
        said_s = promised.position_s * positions
        if took_s <= self._policy.slow_step_s + self._policy.believed_times * said_s:
            self.total_s /= 2
        else:
            self.total_s += min(took_s - said_s, self._policy.slow_total_s / 2)  # one may be our own stall
            self.position_s = took_s / positions

    def forget(self) -> None:
        """Begin anew."""
        self.total_s = 0.0
