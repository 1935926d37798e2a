"""Where peers could not be reached that strangers announce. Knows no clock: the time is told.

A stranger can announce any number of fast peers that do not exist, at any addresses. A client would try one after the
other, for every session. So after some failures, peers that it has not reached cost more: those of an address group
where several failed, and in the end all of them. Peers that it is connected to, and those that have served it, are not
concerned. Failures are forgotten, so that newcomers have their turn again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.fading import FadingCounts

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmnode.core.policy import RoutePolicy

_ALL = "all groups"


class Unreached:
    """For one client."""

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy
        self._failures: FadingCounts[str] = FadingCounts(policy.unreached_half_life_s, policy.most_unreached)

    def note(self, groups: Collection[str], now_s: float) -> None:
        """A peer in these address groups could not be reached. Each has a share of the failure: they are claims, and
        one announcement could otherwise blame eight groups of others.
        """
        for group in groups:
            self._failures.add(group, now_s, 1 / len(groups))
        self._failures.add(_ALL, now_s)

    @property
    def has_any(self) -> bool:
        """Whether anything has failed, and may count still. Otherwise nobody costs more."""
        return len(self._failures) > 0

    def cost_s(self, groups: Collection[str], now_s: float) -> float:
        """The extra cost of a peer in these groups that was never reached, in seconds a token."""
        policy, of = self._policy, self._failures.of
        above = max(0.0, max(of(group, now_s) for group in groups) - policy.unreached_of_group)
        above += max(0.0, of(_ALL, now_s) - policy.unreached_of_all)
        return policy.unreached_cost_s * above
