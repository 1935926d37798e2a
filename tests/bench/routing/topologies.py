"""Random swarms: servers with spans that overlap, of uneven speed, at random places. And every route through them."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

from bench.plan.fleet import PacedServer
from llmnode.core.ids import PeerId
from llmnode.core.route import Hop, covers
from llmnode.core.span import Span, split_evenly

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.kit.proxy import Proxies
    from llmnode.core.route import Route

SERVERS = 6
BLOCKS = 30
LEAST_BLOCKS, MOST_BLOCKS = 8, 20
FEWEST_ROUTES, MOST_ROUTES = 6, 14
"""Fewer routes are no choice, and more take too long to be tried."""
BLOCK_US = (1000, 8000)
SIDE_S, MOST_ACCESS_S = 0.1, 0.03
"""Nodes are in a square of this side. Each has a line of its own beside that. So one way takes 0 to 200 ms."""
UPLOAD_BYTES_PER_S = (60e3, 2e6)
CLIENT_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Place:
    """Where a node is, in seconds of one way."""

    x_s: float
    y_s: float
    access_s: float
    upload_bytes_per_s: float

    def one_way_s(self, other: Place) -> float:
        return math.hypot(self.x_s - other.x_s, self.y_s - other.y_s) + self.access_s + other.access_s


@dataclass(frozen=True, slots=True)
class Topology:
    """The servers of a swarm, their places, and that of the client."""

    seed: int
    fleet: tuple[PacedServer, ...]
    places: tuple[Place, ...]
    client: Place

    def shape(self, proxies: Proxies) -> None:
        """Give the links their delays and rates, before there are any."""
        hosts = [(CLIENT_HOST, self.client)]
        hosts += [(server.host, place) for server, place in zip(self.fleet, self.places, strict=True)]
        for host, source in hosts:
            for index, place in enumerate(self.places):
                one_way_s, upload = source.one_way_s(place), source.upload_bytes_per_s
                back = place.upload_bytes_per_s
                proxies.shape_from(host, index, one_way_s=one_way_s, bytes_per_s=upload, back_bytes_per_s=back)


def draw_topology(seed: int) -> Topology:
    """The topology of a `seed`."""
    rng = random.Random(seed)
    while True:
        spans = [_draw_span(rng) for _ in range(SERVERS)]
        held = [Hop(PeerId(str(number)), span) for number, span in enumerate(spans)]
        if FEWEST_ROUTES <= len([*islice(all_routes(BLOCKS, held), MOST_ROUTES + 1)]) <= MOST_ROUTES:
            break
    fleet = tuple(
        PacedServer(span, round(_log_uniform(rng, *BLOCK_US)), f"127.0.1.{number + 1}")
        for number, span in enumerate(spans)
    )
    client, *places = (_draw_place(rng) for _ in range(SERVERS + 1))
    return Topology(seed, fleet, tuple(places), client)


def _draw_span(rng: random.Random) -> Span:
    length = rng.randint(LEAST_BLOCKS, MOST_BLOCKS)
    start = rng.randint(0, BLOCKS - length)
    return Span(start, start + length)


def _draw_place(rng: random.Random) -> Place:
    x_s, y_s, access_s = rng.uniform(0, SIDE_S), rng.uniform(0, SIDE_S), rng.uniform(0, MOST_ACCESS_S)
    return Place(x_s, y_s, access_s, _log_uniform(rng, *UPLOAD_BYTES_PER_S))


def _log_uniform(rng: random.Random, least: float, most: float) -> float:
    return math.exp(rng.uniform(math.log(least), math.log(most)))


def all_routes(blocks: int, held: Sequence[Hop], start: int = 0) -> Iterator[Route]:
    """Every sequence of servers that covers the blocks from `start`. One hands over to the next at an end of their
    overlap.

    The time of a route is linear in each such place. So no place between the ends is faster than both.
    """
    if start >= blocks:
        yield ()
    elif not covers([hop.span for hop in held], Span(start, blocks)):
        return
    for hop in held:
        if hop.span.start <= start < hop.span.end:
            others = [each for each in held if each != hop]
            end = min(hop.span.end, blocks)
            for until in sorted({end, *(each.span.start for each in others if start < each.span.start < end)}):
                for rest in all_routes(blocks, others, until):
                    yield (Hop(hop.peer, Span(start, until)), *rest)


def thin_topology() -> Topology:
    """Few servers, short ways: for tests. The second of two equal servers of the first half is farther."""
    first, second = split_evenly(BLOCKS, 2)
    spans = ((first, 1000, 0.001), (first, 1000, 0.03), (second, 1000, 0.001))
    fleet = tuple(
        PacedServer(span, block_us, f"127.0.1.{number + 1}") for number, (span, block_us, _) in enumerate(spans)
    )
    places = tuple(Place(x_s, 0.0, 0.001, 1e6) for _, _, x_s in spans)
    return Topology(-1, fleet, places, Place(0.0, 0.0, 0.001, 1e6))
