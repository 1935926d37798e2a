"""Decides whether a batch waits for clients that decode in step. Knows no clock: it is told the time.

Two forwards of decodes take longer than one of both. The difference is the time that waiting saves. If all clients are
usually back within that time, the batch waits for those that are away; otherwise halves of the clients would take
turns, and each half would wait for the other. If they are away for longer, taking turns is better: then the executor
never waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEEPS = 0.8
_PAUSE = 4
"""A longer pause counts as this many times the time that one forward less saves."""
_NEAR = 2
"""A client that is away for less than this many times the saved time is in step with the others, or nearly so."""
_LATE = 2
"""A client that is not back after this many times its usual pause is not waited for."""


@dataclass(slots=True)
class Rhythm:
    """The pauses between the decodes of one session."""

    answered_s: float | None = None
    """When its latest was done; None if a prefill came after."""
    away_s: float = inf
    """The longest usual pause between two decodes."""

    @property
    def late_s(self) -> float:
        """The time until which it may be back as usual, if it is away."""
        return -inf if self.answered_s is None else self.answered_s + _LATE * self.away_s

    def is_near(self, saved_s: float) -> bool:
        """Whether it is nearly in step. `saved_s` is the time that one forward less saves."""
        return self.away_s < _NEAR * saved_s

    def end(self) -> None:
        """A prefill has come."""
        self.answered_s, self.away_s = None, inf

    def note_return(self, now_s: float, saved_s: float) -> None:
        """Its next decode has come."""
        if self.answered_s is not None:
            away_s = min(now_s - self.answered_s, _PAUSE * saved_s)
            before_s = away_s if self.away_s == inf else self.away_s
            self.away_s = max(away_s, _KEEPS * before_s + (1 - _KEEPS) * away_s)


def keep_step(away: Sequence[Rhythm], here: Sequence[Rhythm], saved_s: float, share: float) -> bool:
    """Whether all clients gain if the batch waits for those that are away, at most `share` of the saved time.

    At least one is away. Without waiting, the clients that are here have one forward now and another with the others.
    So the batch does not wait for a client that is away for much longer than those that are here.
    """
    away_s, here_s = (max((each.away_s for each in some), default=0.0) for some in (away, here))
    gain = len(away) / (2 * len(here) + len(away))
    return max(away_s, here_s) <= share * saved_s and away_s - here_s <= gain * saved_s
