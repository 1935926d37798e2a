"""How much one server may push to a session of another: what the receiver has granted, and what the sender has used.

A grant is for one epoch of a session. It is in bytes of frames since the epoch began. The receiver reserves memory for
all that it has granted and is not done with, so no push ever waits for memory. Knows neither links nor scopes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.ids import Epoch

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(slots=True)
class PushGrant:
    """The receiver's side, for one epoch."""

    most_bytes: int
    """The session has no use for more in one epoch."""
    window_bytes: int
    """The sender may be this much ahead, without asking for more."""
    limit_bytes: int = 0
    received_bytes: int = 0
    wanted_bytes: int = 0
    """The limit that the sender has asked for."""

    @property
    def left_bytes(self) -> int:
        """The part that may still come."""
        return self.limit_bytes - self.received_bytes

    @property
    def is_short(self) -> bool:
        """Whether the sender may have to wait for more."""
        return self.limit_bytes < min(self.most_bytes, max(self.wanted_bytes, self._ahead(self.window_bytes // 2)))

    def extend(self, window_bytes: int, reserve: Callable[[int], bool]) -> bool:
        """Grant what is wanted, and up to `window_bytes` ahead. Without memory for all of it, less than that ahead.

        Returns whether the limit has risen. `reserve` takes bytes, or nothing.
        """
        limit_bytes = max(self.wanted_bytes, self._ahead(window_bytes))
        while not self._raise_to(limit_bytes, reserve):
            if window_bytes < self.window_bytes // 2:
                return False
            limit_bytes = self._ahead(window_bytes)  # never a part of what is wanted: others may need it
            window_bytes //= 2
        return True

    def take(self, size_bytes: int) -> bool:
        """Whether a push of this size was granted. Then it counts."""
        if size_bytes > self.left_bytes:
            return False
        self.received_bytes += size_bytes
        return True

    def _ahead(self, window_bytes: int) -> int:
        return self.received_bytes + window_bytes

    def _raise_to(self, limit_bytes: int, reserve: Callable[[int], bool]) -> bool:
        more_bytes = min(limit_bytes, self.most_bytes) - self.limit_bytes
        if more_bytes <= 0 or not reserve(more_bytes):
            return False
        self.limit_bytes += more_bytes
        return True


@dataclass(slots=True)
class PushCredit:
    """The sender's side. It has no right until it has heard of one."""

    epoch: Epoch = Epoch(-1)
    limit_bytes: int = 0
    sent_bytes: int = 0

    def hear(self, epoch: Epoch, limit_bytes: int) -> None:
        """A grant has arrived. The last one of an epoch counts; it may take the right away."""
        if epoch > self.epoch:
            self.epoch, self.sent_bytes = epoch, 0
        if epoch == self.epoch:
            self.limit_bytes = limit_bytes

    def allows(self, epoch: Epoch, size_bytes: int) -> bool | None:
        """Whether a push of this size may be made. None: it may be allowed in a moment, or if more is asked for."""
        if epoch < self.epoch or (epoch == self.epoch and not self.limit_bytes):
            return False
        return True if epoch == self.epoch and self.sent_bytes + size_bytes <= self.limit_bytes else None

    def spend(self, size_bytes: int) -> None:
        """A push that is allowed is made."""
        self.sent_bytes += size_bytes


class ReplayBudget:
    """How much of one session's log is pushed again: a request is small, and has one server send much to another."""

    def __init__(self, times: float, every_s: float) -> None:
        """The whole log may go out `times` at once, and then once `every_s`. The time is told."""
        self._times = times
        self._every_s = every_s
        self._spent = 0.0  # in logs
        self._noted_s = 0.0

    def allows(self, size_bytes: int, log_bytes: int, now_s: float) -> bool:
        """Whether that much of a log of `log_bytes` may go out. Then it counts."""
        spent = max(0.0, self._spent - (now_s - self._noted_s) / self._every_s)
        more = size_bytes / max(size_bytes, log_bytes)
        if spent + more > self._times:
            return False
        self._spent, self._noted_s = spent + more, now_s
        return True
