"""The hosts of a simulated swarm: what each can do, and when it is on. All of these schedules are synthetic.

Hosts and a measured trace can be read from files instead: `host_files.py`.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from llmnode.core.ids import PeerId
from llmnode.core.placement.servers import one_speed

if TYPE_CHECKING:
    from collections.abc import Sequence

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Uptime:
    """A host is on from `from_s` to `to_s`. It leaves with a farewell, or without one if `crashes`."""

    from_s: float
    to_s: float
    crashes: bool = False


@dataclass(frozen=True, slots=True)
class Host:
    """A machine that serves while it is on. Its speeds are as in `PlacedServer`."""

    peer: PeerId
    speeds: tuple[float, ...]
    uptimes: Sequence[Uptime]
    boast: float = 1.0
    """It claims to be this many times faster than it is."""
    ghost: bool = False
    """It announces blocks, and neither serves them nor answers."""


def uneven(number: int, rng: random.Random, most_speed: float = 100.0, most_blocks: int = 10) -> Host:
    """A host of the paper's appendix E: t ~ U[0, 100] tokens/s, b ~ U[1, 10] blocks."""
    speed, length = rng.uniform(0, most_speed), rng.randint(1, most_blocks)
    return Host(PeerId(f"host-{number:05}"), one_speed(speed, length), ())


def daily_sine(
    seed: int, days: float = 1.0, hosts: int = 206, least: int = 15, most: int = 110, crashes: float = 0.0
) -> list[Host]:
    """The paper's figure 4: the number of hosts that are on follows a sine wave, with other hosts at each peak.

    The wave begins at its lowest point. `crashes` is the share of the departures without a farewell.
    """
    rng = random.Random(seed)
    fleet = [uneven(number, rng) for number in range(hosts)]
    on: dict[int, float] = {}
    off, uptimes = list(range(hosts)), [list[Uptime]() for _ in fleet]
    for minute in range(int(days * 1440)):
        wave = (least + most) / 2 - (most - least) / 2 * math.cos(math.tau * minute / 1440)
        second = 60.0 * minute
        while len(on) < round(wave):
            on[off.pop(rng.randrange(len(off)))] = second + (rng.uniform(0, 60) if minute else 0.0)
        while len(on) > round(wave):
            number = rng.choice(list(on))
            uptimes[number].append(Uptime(on.pop(number), second + rng.uniform(60, 120), rng.random() < crashes))
            off.append(number)
    for number, from_s in on.items():
        uptimes[number].append(Uptime(from_s, days * DAY_S))
    return [replace(host, uptimes=apart(own)) for host, own in zip(fleet, uptimes, strict=True)]


def two_classes(
    seed: int,
    hosts: int,
    days: float = 1.0,
    daily: float = 0.6,
    outages_per_day: float = 1.0,
    joins_over_s: float = 0.0,
    most_blocks: int = 10,
) -> list[Host]:
    """Synthetic churn: a share of `daily` hosts that are on in the evening of their time zone, and others always.

    Always-on hosts restart now and then. Each belongs to one of four providers, all of which have outages. Those that
    are on at first come one after the other, within `joins_over_s`.
    """
    rng = random.Random(seed)
    outages = [
        [Uptime(start, start + rng.uniform(300, 3600)) for start in _arrivals(rng, outages_per_day / DAY_S, days)]
        for _provider in range(4)
    ]
    fleet = []
    for number in range(hosts):
        host = uneven(number, rng, most_blocks=most_blocks)
        joins_s = rng.uniform(0, joins_over_s) if joins_over_s else 0.0
        if rng.random() < daily:
            zone_s, own = rng.choice((0, 6, 8, 15)) * 3600.0, []
            for day in range(-1, math.ceil(days) + 1):
                from_s = day * DAY_S + zone_s + rng.gauss(18 * 3600, 5400)
                own.append(Uptime(from_s, from_s + max(600.0, rng.gauss(5 * 3600, 3600)), rng.random() < 0.3))
        else:
            starts = [0.0, *_arrivals(rng, 1 / (5 * DAY_S), days), days * DAY_S]
            own = [Uptime(start + 120.0, end, True) for start, end in pairwise(starts)]
            own[0] = replace(own[0], from_s=0.0)
            for outage in rng.choice(outages):
                own = [piece for uptime in own for piece in _without(uptime, outage)]
        fleet.append(replace(host, uptimes=apart(_within(own, joins_s, days * DAY_S))))
    return fleet


def _arrivals(rng: random.Random, per_s: float, days: float) -> list[float]:
    times, now_s = [], rng.expovariate(per_s) if per_s else math.inf
    while now_s < days * DAY_S:
        times.append(now_s)
        now_s += rng.expovariate(per_s)
    return times


def _without(uptime: Uptime, outage: Uptime) -> list[Uptime]:
    """The parts of an uptime outside of an outage. The host crashes when the outage begins."""
    if outage.to_s <= uptime.from_s or uptime.to_s <= outage.from_s:
        return [uptime]
    parts = [Uptime(uptime.from_s, outage.from_s, crashes=True), replace(uptime, from_s=outage.to_s)]
    return [part for part in parts if part.to_s - part.from_s >= 1.0]


def _within(uptimes: Sequence[Uptime], begin_s: float, end_s: float) -> list[Uptime]:
    cut = (replace(each, from_s=max(begin_s, each.from_s), to_s=min(each.to_s, end_s)) for each in uptimes)
    return [each for each in cut if each.to_s > each.from_s]


def apart(uptimes: Sequence[Uptime]) -> list[Uptime]:
    """In order, and each with a second between it and the one before."""
    ordered: list[Uptime] = []
    for uptime in sorted(uptimes, key=lambda each: each.from_s):
        from_s = max(uptime.from_s, ordered[-1].to_s + 1.0) if ordered else uptime.from_s
        if uptime.to_s > from_s:
            ordered.append(replace(uptime, from_s=from_s))
    return ordered
