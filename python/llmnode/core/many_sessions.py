"""The throughput of a number of sessions that decode at once: each waits for its own token before it asks for the next.

It is a closed queueing network. Its stations are servers, and the sessions of each route go through their own ones. A
server computes in one forward all decodes that have come during the forward before, and each decode adds a time to the
forward (gated batch service). A session is at the servers of its route or away: on its way, or with its client. Knows
no clock: all times are told.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROUNDS = 400
"""The rates are found by going from the sizes of forwards to rates and back, this often at most."""
NEAR = 1e-12
"""Sizes of forwards that change by no more than this share are found."""


@dataclass(frozen=True, slots=True)
class SharedServer:
    """The time of a server's forwards of decodes, through all blocks of its span."""

    alone_s: float
    """A forward with one decode."""
    further_s: float
    """The time that each further decode adds."""

    def forward_s(self, decodes: float) -> float:
        """The time of a forward with this number of `decodes`."""
        return self.alone_s + (decodes - 1) * self.further_s


@dataclass(frozen=True, slots=True)
class RouteSessions:
    """The `sessions` that take one route."""

    sessions: int
    away_s: float
    """The time of a token in which one of them is at no server."""
    visits: tuple[tuple[int, float], ...]
    """The places of its servers in the list of all, and the part of its span that each computes for the route."""


@dataclass(slots=True)
class _Load:
    """One server, as far as the rates are found."""

    server: SharedServer
    decodes: float = 1.0
    """Those of a forward."""
    rate: float = 0.0
    """The tokens/s that come."""
    part: float = 0.0
    """The part of its span that they go through, in the mean."""

    @property
    def forward_s(self) -> float:
        return self.part * self.server.forward_s(self.decodes)

    def stay_s(self, others: float) -> float:
        """The time of one decode here: it waits for the forward that runs when it comes, and is in the next one.

        `others` is the share of the sessions that it may meet: 0 if it is the only one.
        """
        return self.forward_s * (1 + others * min(1.0, self.rate * self.part * self.server.alone_s) / 2)


def many_sessions_tokens_per_s(servers: Sequence[SharedServer], routes: Sequence[RouteSessions]) -> float:
    """The tokens/s of all sessions of these `routes` together through their `servers`; 0 without any."""
    loads = [_Load(each) for each in servers]
    rates = [float(each.sessions) for each in routes]  # as if a token took a second: the first round finds others
    sessions = sum(each.sessions for each in routes)
    others = 1 - 1 / sessions if sessions else 0.0
    for _ in range(ROUNDS):
        _pass_on(loads, routes, rates)
        before = [each.decodes for each in loads]
        rates = [
            each.sessions / (each.away_s + sum(loads[place].stay_s(others) for place, _ in each.visits))
            for each in routes
        ]
        _pass_on(loads, routes, rates)
        for load in loads:
            came = max(1.0, load.rate * load.forward_s)
            load.decodes = (load.decodes + came) / 2
        if all(abs(load.decodes - each) <= NEAR * each for load, each in zip(loads, before, strict=True)):
            break
    return sum(rates)


def _pass_on(loads: Sequence[_Load], routes: Sequence[RouteSessions], rates: Sequence[float]) -> None:
    """Tell each server what comes to it when the sessions of the routes have these rates."""
    came, through = [0.0] * len(loads), [0.0] * len(loads)
    for route, rate in zip(routes, rates, strict=True):
        for place, part in route.visits:
            came[place] += rate
            through[place] += rate * part
    for load, rate, whole in zip(loads, came, through, strict=True):
        load.rate, load.part = rate, whole / rate if rate else 0.0
