"""A server tells other machines some seconds late what it does.

Up to the moment, the numbers would tell any stranger when others say something, and how much. A single step would show
in its load, too. Peers on its own machine see all of that anyway, and are told at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

import trio

T = TypeVar("T")


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


class ToldLate(Generic[T]):
    """It keeps what other machines were told last, for `every_s`."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._told: tuple[float, T] | None = None

    def of(self, now: T, *, up_to_now: bool) -> T:
        """That of this moment, or else what was told last."""
        now_s = trio.current_time()
        if up_to_now:
            return now
        if self._told is None or now_s >= self._told[0] + self._every_s:
            self._told = now_s, now
        return self._told[1]
