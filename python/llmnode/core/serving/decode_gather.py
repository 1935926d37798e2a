"""Which clients decode in step, and so are waited for before a forward. Knows no clock: it is told the time.

Before a batch those are waited for who decode in step with the others, if all of them are usually back sooner than one
forward less saves: else halves of the clients would take turns, and each would wait for the other. If they are away for
longer, halves that take turns are better, as the executor waits for neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_KEEPS = 0.8
_PAUSE = 4
"""A longer one counts as so many times what a forward less saves."""
_NEAR = 2
"""Who is away for less than so many times that is in step with the others, or is nearly so."""
_LATE = 2
"""Who is not back after so many times what is usual is not waited for."""


@dataclass(slots=True)
class Rhythm:
    """Of the decodes of one session."""

    answered_s: float | None = None
    """When its latest was done; None if a prefill came after."""
    away_s: float = inf
    """From one to the next, at most as a rule."""

    @property
    def late_s(self) -> float:
        """Until when it may be back as usual, if it is away."""
        return -inf if self.answered_s is None else self.answered_s + _LATE * self.away_s

    def is_near(self, saved_s: float) -> bool:
        """Whether it is nearly in step. `saved_s` is what a forward less saves."""
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
    """Whether all do better if those who are away, one at least, are waited for: `share` of what that saves at most.

    Who is here has a forward while others are away, and another one with them: so who is away for much longer than
    those who are here is not waited for.
    """
    away_s, here_s = (max((each.away_s for each in some), default=0.0) for some in (away, here))
    gain = len(away) / (2 * len(here) + len(away))
    return max(away_s, here_s) <= share * saved_s and away_s - here_s <= gain * saved_s
