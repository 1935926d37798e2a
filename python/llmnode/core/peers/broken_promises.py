"""Where servers are that took sessions and did not serve them. Knows no clock: the time is told.

Identities are free: a stranger has one more for each that has failed. So after a failure, others of its address group
cost more, and so do all that have computed nothing for this client. Those that have proved themselves are not
concerned. Failures are forgotten, so that newcomers have their turn again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.fading import FadingCounts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.policy import StandingPolicy

_ALL = "all groups"


class BrokenPromises:
    """For one client."""

    def __init__(self, policy: StandingPolicy) -> None:
        self._policy = policy
        self._failures: FadingCounts[str] = FadingCounts(policy.doubt_half_life_s, policy.most_doubts)

    def note(self, group: str | None, now_s: float) -> None:
        """A peer that was reached in this address group has failed; None if it is not known where."""
        if group is not None:
            self._failures.add(group, now_s)
        self._failures.add(_ALL, now_s)

    @property
    def has_any(self) -> bool:
        """Whether anything has failed, and may count still. Otherwise nobody costs more."""
        return len(self._failures) > 0

    def cost_s(self, groups: Iterable[str], now_s: float, *, has_computed: bool) -> float:
        """The extra cost of all blocks at a peer that names addresses in these `groups`, in seconds a token."""
        of = self._failures.of
        worst = max((of(group, now_s) for group in groups), default=0.0)
        return self._policy.doubt_cost_s * (worst + (0.0 if has_computed else of(_ALL, now_s)))
