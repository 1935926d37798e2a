"""A client keeps connections to servers that could take the place of a lost hop: dialling takes some round trips."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.route import NoRoute, fastest, find_detour

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import RoutePolicy
    from llmnode.core.route import HopCost, Route, Ways
    from llmnode.swarm.pool import ConnectionPool


class Standbys:
    """For one client."""

    def __init__(self, pool: ConnectionPool, policy: RoutePolicy) -> None:
        self._pool = pool
        self._policy = policy
        self._warmed: dict[Route, float] = {}  # routes whose standbys were looked for, and when

    def is_due(self, route: Route) -> bool:
        """Whether those of `route` are to be looked for now: they are wanted, and were not a moment ago."""
        now_s, again_s = trio.current_time(), self._policy.standbys_again_s
        self._warmed = {each: at_s for each, at_s in self._warmed.items() if now_s < at_s + again_s}
        return self._policy.standbys and route not in self._warmed

    def warm(self, route: Route, others: Sequence[Announcement], costs: Mapping[PeerId, HopCost], ways: Ways) -> None:
        """Begin to connect to the best of `others` for each hop of `route`."""
        self._warmed[route] = trio.current_time()
        addresses = {each.peer: each.addresses for each in others}
        held = fastest([(each.peer, each.offer.span) for each in others], costs, ways)
        for hop in route:
            with suppress(NoRoute):
                for standby in find_detour(hop.span, held, costs, ways):
                    self._pool.warm(addresses[standby.peer])
