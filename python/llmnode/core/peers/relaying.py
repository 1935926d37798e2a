"""How much may go through relays: steps, and a little of prefills; the rest waits for a direct connection. Knows no
clock.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.policy import RelayedPolicy

CUT_MARGIN = 4
"""A relay with a limit is not given more than such a part of it: other things go the same way."""


class RelayBudget:
    """Bytes of one session's prefills that went through relays lately."""

    def __init__(self, policy: RelayedPolicy) -> None:
        self._policy = policy
        self._spent: deque[tuple[float, int]] = deque()

    def allows(self, positions: int, size_bytes: int, now_s: float) -> bool:
        """Whether it is a step, or little enough; then it counts."""
        if positions <= self._policy.step_positions:
            return True
        while self._spent and self._spent[0][0] <= now_s - self._policy.window_s:
            self._spent.popleft()
        if sum(spent for _, spent in self._spent) + size_bytes > self._policy.prefill_bytes:
            return False
        self._spent.append((now_s, size_bytes))
        return True


def would_cut(limit_bytes: int | None, size_bytes: int) -> bool:
    """Whether a relay that carries at most `limit_bytes` per circuit may end it before `size_bytes` are through."""
    return limit_bytes is not None and CUT_MARGIN * size_bytes > limit_bytes
