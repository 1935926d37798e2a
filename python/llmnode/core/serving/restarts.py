"""When a worker process that has ended is started again. Knows no clock and no process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.policy import WorkerPolicy


@dataclass(frozen=True, slots=True)
class Restarts:
    """`crashes` are those in a row, each soon after a start; `failed_starts`, in a row, those before it had served."""

    crashes: int = 0
    failed_starts: int = 0

    def after_crash(self, served_s: float | None, policy: WorkerPolicy) -> Restarts:
        """`served_s` is how long it had served, None if it never did."""
        if served_s is None:
            return Restarts(self.crashes + 1, self.failed_starts + 1)
        return Restarts(1 if served_s >= policy.steady_s else self.crashes + 1)

    def pause_s(self, policy: WorkerPolicy) -> float:
        """Before the next start; 0 before the first of all."""
        if not self.crashes:
            return 0.0
        doublings = min(self.crashes - 1, 30)  # more would be beyond any longest pause
        return min(policy.longest_pause_s, policy.pause_s * 2.0**doublings)

    def is_hopeless(self, policy: WorkerPolicy) -> bool:
        return self.failed_starts >= policy.failed_starts
