"""A server tells what it has done since it started.

Up to the moment, these numbers would tell any stranger when others say something, and how much. So peers on other
machines get those of some seconds ago.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from llmnode.core.traffic import Traffic
    from llmnode.node.serve.served_span import ServeStats


@dataclass(frozen=True, slots=True)
class WorkDone:
    """Fields of a `Description`."""

    steps: int
    steps_given_directly: int
    results_pushed: int
    positions: int
    busy_us: int
    sent_bytes: int
    sent_plain_bytes: int
    received_bytes: int
    received_plain_bytes: int


@dataclass(slots=True)
class WorkTotals:
    """Those that were told last. They are told for `every_s`."""

    every_s: float
    _told: WorkDone | None = None
    _told_s: float = 0.0

    def of(self, tally: ServeStats, busy_us: int, traffic: Traffic, *, up_to_now: bool) -> WorkDone:
        """The work of this moment, or else that which was told last."""
        now_s = trio.current_time()
        counts = tally.steps, tally.given_directly, tally.pushed, tally.positions, busy_us
        now = WorkDone(*counts, **asdict(traffic))
        if up_to_now:
            return now
        if self._told is None or now_s >= self._told_s + self.every_s:
            self._told, self._told_s = now, now_s
        return self._told


@dataclass(slots=True)
class LoadTold:
    """The load average that was told last. A single step would show in that of the moment, too."""

    every_s: float
    _told: float = 0.0
    _told_s: float = -math.inf

    def of(self, load: float, *, up_to_now: bool) -> float:
        """The `load` of this moment, or else the one that was told last, to a tenth."""
        now_s = trio.current_time()
        if up_to_now:
            return load
        if now_s >= self._told_s + self.every_s:
            self._told, self._told_s = round(load, 1), now_s
        return self._told
