"""The physical limit of a swarm: how fast its work can be at best, if sending and computing are all that takes time.

A unit of work is a step, or a row of a batch. It takes the same `Leg`s each time, one after the other. Knows no swarm.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Leg:
    """A part of the way of one unit. It takes a resource for `busy_s`, and then `delay_s` that hinders no other unit.

    A resource serves one unit at a time, of whichever client; or each client has one of its own. A leg that computes
    takes a core too.
    """

    resource: str
    busy_s: float
    delay_s: float = 0.0
    computes: bool = False
    is_own: bool = False

    @property
    def all_s(self) -> float:
        return self.busy_s + self.delay_s


def path_s(legs: Sequence[Leg]) -> float:
    """The least time of one unit alone."""
    return sum(leg.all_s for leg in legs)


def batch_s(legs: Sequence[Leg], units: int, cores: float = inf) -> float:
    """The least time until `units` of one client, which begin together, are all done.

    Each resource waits until the first unit can have reached it, works on all, and the last one still has the rest of
    the way. All computing together has `cores`.
    """
    bounds = [path_s(legs)]
    for resource in {leg.resource for leg in legs}:
        bounds.append(_around(legs, [leg.resource == resource for leg in legs], units))
    computing = [leg.computes for leg in legs]
    if any(computing):
        bounds.append(_around(legs, computing, units / cores))
    return max(bounds)


def units_per_s(legs: Sequence[Leg], clients: int, cores: float = inf) -> float:
    """The most units a second of each of `clients`, all at work, that send a unit when they have the one before."""
    shared = {leg.resource for leg in legs if not leg.is_own}
    busy_s = [sum(leg.busy_s for leg in legs if leg.resource == each) for each in shared]
    computing_s = sum(leg.busy_s for leg in legs if leg.computes)
    return 1 / max(path_s(legs), clients * max(busy_s, default=0.0), clients * computing_s / cores)


def _around(legs: Sequence[Leg], own: Sequence[bool], times: float) -> float:
    """`times` the work of the legs that are `own`, after the way to the first of them, and before that from the last.

    The delay of an own leg is over before the next one of the same unit, but hinders no other unit: it does not count,
    unless it is the last one's.
    """
    first, last = own.index(True), len(own) - 1 - own[::-1].index(True)
    before = sum(leg.all_s for leg in legs[:first])
    after = legs[last].delay_s + sum(leg.all_s for leg in legs[last + 1 :])
    work = times * sum(leg.busy_s for leg, is_own in zip(legs, own, strict=True) if is_own)
    return before + work + after
