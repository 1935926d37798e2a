"""Whether a process that takes long still gets on. Knows no clock and no process."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Effort:
    """The resources of a process that can be seen from outside. One of the two changes whether it reads, computes or
    downloads.
    """

    cpu_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Progress:
    """The last effort that was seen, and since when."""

    effort: Effort
    since_s: float

    def seen(self, effort: Effort, now_s: float) -> Progress:
        return self if effort == self.effort else Progress(effort, now_s)

    def is_stuck(self, now_s: float, patience_s: float) -> bool:
        return now_s - self.since_s >= patience_s
