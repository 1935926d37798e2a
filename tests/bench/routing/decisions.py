"""How long a client takes to choose a route in a large swarm, out of the announcements that it knows."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import trio

from bench.kit.report import spread
from bench.placement.swarms import BLOCKS, large_swarm
from llmnode.core.announcement import Announcement, Offer, PeerState, SignedAnnouncement, SignedBody
from llmnode.core.ids import PeerId
from llmnode.core.model import ModelInfo
from llmnode.core.policy import ClientPolicy, ProbePolicy, SwarmPolicy
from llmnode.core.route import find_route
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed
from llmnode.core.view import Source, View
from llmnode.session.pass_routes import PassRoutes
from llmnode.session.peer_finder import PeerFinder, _held
from llmnode.session.reaching import RoundTrip

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.kit.report import Row, Spread
    from llmnode.core.placement.servers import PlacedServer
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

MODEL = ModelInfo("m", bytes(32), BLOCKS, hidden_size=1024, context_tokens=4096)
REPEATS = 15
POSITIONS = 64
WEIGHT = 256
"""That of a pass of this number of positions."""


def decision_row(number: int) -> Row:
    """The processor time of a choice among this `number` of servers, of which the client has measured some."""
    rng = random.Random(number)
    servers = large_swarm(number)
    announcements = [_announced(each, servers, rng) for each in servers]
    finder = _finder(announcements, rng)
    usable = finder._candidates(POSITIONS)
    costs, ways = finder.records.costs(usable, POSITIONS), finder._ways(usable)
    routes = PassRoutes(finder)
    parts: dict[str, Callable[[], object]] = {
        "a decision, ms": lambda: finder._route(finder._candidates(POSITIONS), {}, POSITIONS, ()),
        "those that may be used, ms": lambda: finder._candidates(POSITIONS),
        "costs of all servers, ms": lambda: finder.records.costs(usable, POSITIONS),
        "the search, ms": lambda: find_route(BLOCKS, _held(usable), costs, ways),
        "those kept for microbatches, ms": lambda: routes._look(WEIGHT, trio.current_time()),
        "a microbatch, ms": lambda: routes._best(Span(0, BLOCKS), (), WEIGHT),
    }
    return {"topology": f"{number} servers", **{name: _times_ms(part) for name, part in parts.items()}}


def _finder(announcements: list[Announcement], rng: random.Random) -> PeerFinder:
    """That of a client which knows the announcements, is connected to nobody, and has measured some round trips."""
    policy = SwarmPolicy(view_peers=len(announcements))
    view, source = View(policy), Source(PeerId("neighbour"), "its group")
    for each in announcements:
        view.accept(SignedAnnouncement(each, SignedBody(b"", b"")), 0, source)
    pool = SimpleNamespace(living=lambda: ())
    swarm = SimpleNamespace(view=view, age_s=lambda _: 0.0, met_in=lambda: view.met_in)
    finder = PeerFinder(MODEL, cast("ConnectionPool", pool), cast("Swarm", swarm), ClientPolicy(), rng)
    measured = rng.sample(announcements, min(len(announcements), finder.policy.route.round_trips))
    finder.reaching._measured = {each.peer: RoundTrip(rng.uniform(0, 0.4), 0.0) for each in measured}
    return finder


def _announced(server: PlacedServer, servers: list[PlacedServer], rng: random.Random) -> Announcement:
    nexts = rng.sample(servers, ProbePolicy().next_peers)
    round_trips = tuple((each.peer, rng.randint(1000, 400_000)) for each in nexts)
    speed = AnnouncedSpeed(round(1000 * server.speed), 100_000, rng.randint(100, 10_000), round_trips)
    block_us = max(1, round(1e6 / max(1.0, server.speed * len(server.span))))
    offer = Offer("m", MODEL.profile, BLOCKS, server.span, PeerState.ONLINE, block_us, 4096, 4096, speed)
    address = f"/ip4/{'.'.join(str(rng.randint(1, 223)) for _ in range(4))}/tcp/4001/p2p/{server.peer}"
    return Announcement(server.peer, (address,), 0, 45_000, "llmnode/1", offer)


def _times_ms(decide: Callable[[], object]) -> Spread:
    """The processor time of several decisions."""
    taken_ms = []
    for _ in range(REPEATS):
        began_s = time.process_time()
        decide()
        taken_ms.append(1e3 * (time.process_time() - began_s))
    return spread(taken_ms)
