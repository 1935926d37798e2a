"""The paper's figure 4 in the simulator, and decisions in large swarms."""

from __future__ import annotations

import math
import random
import statistics
import time
import tracemalloc
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.placement.joining import choose_span
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import PlanPolicy, RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds, most_throughput, one_speed
from llmnode.core.policy import SwarmPolicy
from llmnode.core.span import Span
from llmnode.core.view import Source, View
from llmnode.errors import ConfigError
from llmnode.testing.placement import (
    Host,
    Rule,
    SwarmConditions,
    SwarmFigures,
    Uptime,
    daily_sine,
    read_hosts,
    read_trace,
    simulate_placement,
)
from llmnode.testing.placement.hosts import DAY_S
from llmnode.wire.announcement import sign_announcement

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.kit.options import Options
    from bench.kit.report import Row

BLOCKS = 70
VARIANTS: dict[str, tuple[Rule, float]] = {
    "no balancing": (Rule.RANDOM, 0.0),
    "new servers only": (Rule.NEW_ONLY, 0.0),
    "paper, p = 50 %": (Rule.PAPER, 0.5),
    "paper, p = 20 %": (Rule.PAPER, 0.2),
    "paper, p = 5 %": (Rule.PAPER, 0.05),
    "paper, p = 1 %": (Rule.PAPER, 0.01),
    "the plan": (Rule.PLAN, 0.0),
}
THIN = ("new servers only", "the plan")
THIN_BLOCKS = 16
SEED = 0
SIGNATURE_BYTES = 64
NOW_MS = 1 << 40


@dataclass(frozen=True, slots=True)
class Fleet:
    """Hosts, when they are on, and the model that they serve."""

    hosts: Sequence[Host]
    seconds: float
    blocks: int = BLOCKS
    name: str = "206 servers of uneven speed, 15 to 110 of them on"

    @property
    def conditions(self) -> SwarmConditions:
        return SwarmConditions(blocks=self.blocks)


def fleet_of(options: Options, seed: int = SEED) -> Fleet:
    """The hosts of the user's files; else those of the paper, or some of them in a thin run. Raises ConfigError."""
    if options.hosts is None and options.trace is None:
        if options.thin:
            blocks, days = options.blocks or THIN_BLOCKS, 0.1
            return Fleet(_cut(daily_sine(seed, days, 30, 6, 20), blocks), days * DAY_S, blocks, "6 to 20 servers")
        return Fleet(_cut(daily_sine(seed), options.blocks or BLOCKS), DAY_S, options.blocks or BLOCKS)
    blocks, speeds = options.blocks or BLOCKS, None if options.hosts is None else read_hosts(options.hosts)
    if options.trace is None:
        assert speeds is not None
        hosts = [Host(PeerId(name), own, (Uptime(0.0, DAY_S),)) for name, own in speeds.items()]
    else:
        hosts = read_trace(options.trace, SEED, speeds)
    if (held := sum(min(blocks, len(host.speeds)) for host in hosts)) < blocks:
        raise ConfigError(
            f"{options.trace or options.hosts}: these hosts have memory for {held} blocks together, and the model has "
            f"{blocks}: add hosts, or give --blocks {held} or fewer"
        )
    seconds = max(each.to_s for host in hosts for each in host.uptimes)
    return Fleet(_cut(hosts, blocks), seconds, blocks, f"{len(hosts)} hosts of {options.trace or options.hosts}")


def _cut(hosts: Sequence[Host], blocks: int) -> list[Host]:
    """No host holds more blocks than the model has."""
    return [replace(host, speeds=host.speeds[:blocks]) for host in hosts]


def figure_4(fleet: Fleet, variants: Sequence[str]) -> Iterator[tuple[str, SwarmFigures]]:
    """The outcome of each variant, all with the same hosts and schedules."""
    for name in variants:
        rule, gain = VARIANTS[name]
        policy = replace(RebalancePolicy(), paper_gain=gain)
        yield name, simulate_placement(fleet.hosts, rule, fleet.seconds, SEED, fleet.conditions, policy)


def bounds_tokens_per_s(fleet: Fleet) -> list[tuple[float, float]]:
    """The bound on all placements of the servers that are on, which need no time to load, from each second on at which
    it changes.
    """
    hosts, seconds = fleet.hosts, fleet.seconds
    changes = sorted(
        [(uptime.from_s, True, host) for host in hosts for uptime in host.uptimes]
        + [(uptime.to_s, False, host) for host in hosts for uptime in host.uptimes],
        key=lambda change: (change[0], change[1], change[2].peer),
    )
    on: dict[PeerId, PlacedServer] = {}
    bounds = list[tuple[float, float]]()
    for time_s, comes, host in changes:
        if comes:
            on[host.peer] = PlacedServer(host.peer, Span(0, 1), host.speeds)
        else:
            on.pop(host.peer, None)
        bounds.append((min(time_s, seconds), most_throughput(fleet.blocks, on.values()) if on else 0.0))
    return bounds


def mean_between(steps: Sequence[tuple[float, float]], from_s: float, to_s: float) -> float:
    """The mean of a value which is 0 at first, and changes at these seconds to these values."""
    begins, ends = [(0.0, 0.0), *steps], [*(time_s for time_s, _ in steps), math.inf]
    parts = ((value, min(to_s, end) - max(from_s, begin)) for (begin, value), end in zip(begins, ends, strict=True))
    return sum(value * part_s for value, part_s in parts if part_s > 0) / (to_s - from_s)


def allowed_gap_s(fleet: Fleet, policy: RebalancePolicy) -> float:
    """The time to hear of a gap, to decide, and to load the blocks of the largest server."""
    conditions, most_blocks = fleet.conditions, max(len(host.speeds) for host in fleet.hosts)
    heard_s = conditions.stale_s + conditions.announce_every_s
    return heard_s + policy.gap_check_every_s * (1 + policy.jitter) + most_blocks * conditions.load_s_per_block


def large_swarm(number: int, seed: int = 1) -> list[PlacedServer]:
    """Servers that have joined one after the other, and a tenth of which have then left."""
    rng = random.Random(seed)
    speeds, servers = [0.0] * BLOCKS, []
    for each in range(number * 10 // 9):
        own = one_speed(rng.uniform(0, 100), rng.randint(1, 10))
        server = PlacedServer(PeerId(f"{each:06}"), choose_span(len(own), speeds), own)
        servers.append(server)
        for block in range(server.span.start, server.span.end):
            speeds[block] += server.speed
    return rng.sample(servers, number)


def scale_row(number: int) -> Row:
    """The processor time of one decision of each kind, and what a view of this many servers costs a node."""
    servers, policy = large_swarm(number), PlanPolicy()
    join_ms = _median_ms(lambda: choose_span(5, block_speeds(BLOCKS, servers)))
    plan_ms = _median_ms(lambda: plan_moves(BLOCKS, servers, policy))
    size_bytes = len(_signed(0).signed.body) + SIGNATURE_BYTES
    tracemalloc.start()
    view = View(SwarmPolicy(view_peers=number))
    for each in range(number):
        view.accept(_signed(each), NOW_MS, Source(PeerId("neighbour"), "203.0.113.0/24"))
    memory_bytes = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert len(view) == number
    return {
        "variant": f"{number} servers",
        "join, ms": join_ms,
        "plan, ms": plan_ms,
        "view, MiB": memory_bytes / 2**20,
        "view, kB/s": number * size_bytes / SwarmPolicy().announce_every_s / 1000,
    }


def _median_ms(decide: object, repeats: int = 5) -> float:
    taken = []
    for _repeat in range(repeats):
        began_s = time.process_time()
        decide()  # type: ignore[operator] # a function without arguments
        taken.append(1000 * (time.process_time() - began_s))
    return statistics.median(taken)


def _signed(number: int) -> SignedAnnouncement:
    offer = Offer("model", Profile(bytes(32), Precision()), BLOCKS, Span(0, 5), PeerState.ONLINE, 250, 4096, 4096)
    peer = PeerId(f"12D3KooW{number:044}")
    address, expires_ms = f"/ip4/203.0.113.7/tcp/4001/p2p/{peer}", NOW_MS + 1000 * int(SwarmPolicy().lifetime_s)
    announcement = Announcement(peer, (address,), NOW_MS, expires_ms, "llmnode/0.1.0", offer)
    return sign_announcement(announcement, lambda _message: bytes(SIGNATURE_BYTES))
