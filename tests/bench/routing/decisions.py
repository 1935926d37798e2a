"""How long a client takes to choose a route in a large swarm, out of the announcements that it knows."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from bench.placement.swarms import BLOCKS, large_swarm
from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.model import ModelInfo
from llmnode.core.peers.standing import Standing, candidate_of
from llmnode.core.peers.ways import believed_ways
from llmnode.core.policy import ProbePolicy, RoutePolicy, StandingPolicy
from llmnode.core.route import Hop, find_route
from llmnode.core.speed import AnnouncedSpeed

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.kit.report import Row
    from llmnode.core.ids import PeerId
    from llmnode.core.placement.servers import PlacedServer

MODEL = ModelInfo("m", bytes(32), BLOCKS, hidden_size=1024, context_tokens=4096)
REPEATS = 7


def decision_row(number: int) -> Row:
    """The processor time of a choice among this `number` of servers, of which the client has measured some."""
    rng = random.Random(number)
    servers = large_swarm(number)
    announcements = [_announced(each, servers, rng) for each in servers]
    measured = rng.sample(servers, min(number, RoutePolicy().round_trips))
    trips: dict[PeerId, float] = {each.peer: rng.uniform(0, 0.4) for each in measured}
    standing, row_bytes = Standing(StandingPolicy()), MODEL.row_bytes

    def weigh() -> None:
        standing.costs([candidate_of(each, row_bytes, trips.get(each.peer)) for each in announcements], 0.0)

    def search() -> None:
        find_route(BLOCKS, [Hop(each.peer, each.offer.span) for each in announcements], costs, ways)

    candidates = [candidate_of(each, row_bytes, trips.get(each.peer)) for each in announcements]
    costs, ways = standing.costs(candidates, 0.0), believed_ways(announcements, trips)
    parts = {
        "the search, ms": _least_ms(search),
        "costs of all servers, ms": _least_ms(weigh),
        "ways between them, ms": _least_ms(lambda: believed_ways(announcements, trips)),
    }
    return {"topology": f"{number} servers", "a decision, ms": sum(parts.values()), **parts}


def _announced(server: PlacedServer, servers: list[PlacedServer], rng: random.Random) -> Announcement:
    nexts = rng.sample(servers, ProbePolicy().next_peers)
    round_trips = tuple((each.peer, rng.randint(1000, 400_000)) for each in nexts)
    speed = AnnouncedSpeed(round(1000 * server.speed), 100_000, rng.randint(100, 10_000), round_trips)
    block_us = max(1, round(1e6 / max(1.0, server.speed * len(server.span))))
    offer = Offer("m", MODEL.profile, BLOCKS, server.span, PeerState.ONLINE, block_us, 4096, 4096, speed)
    return Announcement(server.peer, (), 1, 2, "llmnode/1", offer)


def _least_ms(decide: Callable[[], object]) -> float:
    taken_ms = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        decide()
        taken_ms.append(1e3 * (time.process_time() - began_s))
    return min(taken_ms)
