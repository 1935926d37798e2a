"""The candidates of a search are those of an estimate for each server, whatever moves were made before."""

from __future__ import annotations

import random
from itertools import accumulate
from operator import sub
from typing import TYPE_CHECKING

import pytest

from llmnode.core.ids import PeerId
from llmnode.core.placement.plan import plan_moves
from llmnode.core.placement.policy import PlanPolicy
from llmnode.core.placement.ranks import SpanRanks
from llmnode.core.placement.servers import PlacedServer, one_speed, shared_speed, worthwhile_lengths
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS, MOST_BLOCKS = 12, 5


def drawn(rng: random.Random, number: int) -> PlacedServer:
    length = rng.randint(1, MOST_BLOCKS)
    speed = rng.uniform(1, 100) if rng.random() < 0.5 else float(rng.randint(1, 4))
    kind = rng.choice((one_speed, one_speed, shared_speed))
    return PlacedServer(PeerId(f"{number:04}"), drawn_span(rng, rng.randint(1, length)), kind(speed, length))


def drawn_span(rng: random.Random, length: int) -> Span:
    start = rng.randrange(BLOCKS - length + 1)
    return Span(start, start + length)


def one_by_one(servers: Sequence[PlacedServer], spans: Sequence[Span], upto: Sequence[float], most: int) -> list[int]:
    """The slow twin of `SpanRanks.best`."""
    estimates = []
    for server in map(PlacedServer.at, servers, spans):
        windows = {length: max(map(sub, upto[length:], upto)) for length in worthwhile_lengths(server.speeds)}
        slope = upto[server.span.end] - upto[server.span.start]
        if list(windows) == [len(server.speeds)] == [len(server.span)]:
            estimates.append(server.speed * (windows[len(server.span)] - slope))
        else:
            gained = max(server.speeds[length - 1] * each for length, each in windows.items())
            estimates.append(gained - server.speed * slope)
    return sorted(range(len(servers)), key=lambda number: (-estimates[number], number))[:most]


@pytest.mark.parametrize("seed", range(40))
def test_the_best_candidates_are_those_of_an_estimate_for_each_server(seed: int) -> None:
    rng = random.Random(seed)
    servers = [drawn(rng, number) for number in range(rng.choice((3, 30, 300)))]
    spans = [server.span for server in servers]
    lengths = [worthwhile_lengths(server.speeds) for server in servers]
    ranks = SpanRanks(servers, spans, lengths, range(len(servers)))
    for _move in range(20):
        flat = rng.random() < 0.2  # then all places are equally good
        slopes = [1.0 if flat else float(rng.randint(0, 3)) for _ in range(BLOCKS)]
        upto, most = list(accumulate(slopes, initial=0.0)), rng.choice((1, 10, 400))
        assert ranks.best(upto, most) == one_by_one(servers, spans, upto, most)
        mover = rng.randrange(len(servers))
        former, spans[mover] = spans[mover], drawn_span(rng, rng.choice(lengths[mover]))
        ranks.move(mover, former, spans[mover])


def test_a_server_that_has_measured_nothing_is_no_candidate() -> None:
    """A plan for more servers than are tried failed when one of them had no speed."""
    servers = [
        PlacedServer(PeerId(f"{number:04}"), Span(number % 8, number % 8 + 4), one_speed(10.0 if number else 0.0, 4))
        for number in range(PlanPolicy().candidates + 30)
    ]
    moves = plan_moves(BLOCKS, servers, PlanPolicy()).moves
    assert moves
    assert servers[0].peer not in {move.peer for move in moves}
