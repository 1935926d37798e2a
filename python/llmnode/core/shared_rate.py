"""How often groups of strangers may have something done: each has a burst of its own, and all share a rate.

Identities are free, and addresses are not: members are named by a path that begins with their address group. A group
that has used its burst waits for turns at the shared rate. The group that has had the fewest turns is next
(`fair_turns.py`). So a newcomer waits for a moment, and the work is bounded, whatever the number of groups that ask.
The time is told.
"""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING, Generic, TypeVar

from llmnode.core.fair_turns import FairTurns
from llmnode.core.rates import Rates

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.policy import TurnPolicy

T = TypeVar("T")


class SharedRate(Generic[T]):
    """Members of type T wait. The caller wakes each when it is its turn."""

    def __init__(self, policy: TurnPolicy) -> None:
        self._own = Rates(policy.burst, policy.per_s)
        self._pause_s = 1 / policy.shared_per_s
        self._turns: FairTurns[tuple[Sequence[str], float, T]] = FairTurns()
        self._next_s = -inf
        """When the next turn may be given."""

    def __len__(self) -> int:
        """The members that wait."""
        return len(self._turns)

    def take(self, path: Sequence[str], now_s: float, amount: float = 1.0) -> bool:
        """Whether the group may go on at once. Then it counts, as `amount` of its burst."""
        return self._own.take(path[0], now_s, amount)

    def give_back(self, group: str, amount: float, now_s: float) -> None:
        """The group has done something useful: it may have this much more done."""
        self._own.give_back(group, now_s, amount)

    def wait(self, path: Sequence[str], member: T, amount: float = 1.0) -> None:
        """Its turn counts as an `amount` of them."""
        self._turns.wait(path, (path, amount, member))

    def give_up(self, path: Sequence[str], member: T, amount: float = 1.0) -> None:
        """It waits no more."""
        self._turns.give_up(path, (path, amount, member))

    def wait_s(self, now_s: float) -> float:
        """The time until the next turn may be given; 0 if it may be given now."""
        return max(0.0, self._next_s - now_s)

    def next(self, now_s: float) -> T | None:
        """The member whose turn it is, which waits no more. None if none waits, or it is too soon."""
        if self.wait_s(now_s) or (found := self._turns.next()) is None:
            return None
        path, amount, member = found
        self._turns.note(path, amount)
        self._next_s = max(self._next_s, now_s - self._pause_s) + amount * self._pause_s
        return member
