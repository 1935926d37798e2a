"""The clock of simulations: it jumps to the next deadline as soon as every task waits.

Trio's `MockClock` does that too. It takes a pass of the run loop more for each jump, and asks the system for events in
each pass, which no simulation waits for.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import trio
import trio._core._run

if TYPE_CHECKING:
    from trio._core._run import EventResult

POLL_EVERY = 64
"""The system is asked for events after this number of passes, so that Ctrl-C ends a simulation."""
FOREVER_S = 1e6


class SimulatedClock(trio.abc.Clock):
    """Begins at 0."""

    def __init__(self) -> None:
        self._now_s = 0.0

    def start_clock(self) -> None:
        """Trio calls it when the run begins."""
        self._runner = trio._core._run.GLOBAL_RUN_CONTEXT.runner
        self._runner.io_manager = _SeldomPolled(self._runner.io_manager)  # type: ignore[assignment]  # with all that is used

    def current_time(self) -> float:
        return self._now_s

    def deadline_to_sleep_time(self, deadline: float) -> float:
        """The real time to wait: none before a deadline. Trio calls it when no task can run."""
        if self._runner.waiting_for_idle or deadline == math.inf:
            return FOREVER_S
        self._now_s = max(self._now_s, deadline)
        return 0.0


class Alarm:
    """Wakes the task that waits for it, at a time or before. A cancel scope and an event do the same for more."""

    def __init__(self) -> None:
        self._deadlines = trio._core._run.GLOBAL_RUN_CONTEXT.runner.deadlines
        self._task: trio.lowlevel.Task | None = None
        self._registered_deadline = math.inf  # Trio reads it, and calls `_cancel` at that time

    async def wait_until(self, time_s: float) -> None:
        """Wait until then, or until `ring`."""
        self._task = trio.lowlevel.current_task()
        if time_s < math.inf:
            self._registered_deadline = time_s
            self._deadlines.add(time_s, self)  # type: ignore[arg-type]  # it is what trio knows of a scope there
        await trio.lowlevel.wait_task_rescheduled(self._stop)

    def ring(self) -> None:
        if (task := self._task) is not None:
            self._stop()
            trio.lowlevel.reschedule(task)

    def _cancel(self, _reason: object) -> None:
        self.ring()

    def _stop(self, _raise_cancel: object = None) -> trio.lowlevel.Abort:
        self._task = None
        if self._registered_deadline < math.inf:
            self._deadlines.remove(self._registered_deadline, self)  # type: ignore[arg-type]  # likewise
            self._registered_deadline = math.inf
        return trio.lowlevel.Abort.SUCCEEDED


class _SeldomPolled:
    """The wait for events of the system. While there is no time to wait, it seldom asks for them."""

    def __init__(self, manager: Any) -> None:  # Any: its type depends on the system
        self._manager = manager
        self._passes = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._manager, name)

    def get_events(self, timeout: float) -> EventResult:
        self._passes += 1
        if timeout or self._passes % POLL_EVERY == 0:
            return self._manager.get_events(timeout)  # type: ignore[no-any-return]  # likewise
        return []

    def process_events(self, events: EventResult) -> None:
        if events:
            self._manager.process_events(events)
