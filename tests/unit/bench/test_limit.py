"""The physical limit of a swarm: by hand, and against pipelines that lose no time."""

from __future__ import annotations

from heapq import heappop, heappush
from itertools import accumulate, count, pairwise
from math import inf
from random import Random
from typing import TYPE_CHECKING

import pytest

from bench.table2.charged import ENDS, decode_s, positions_s, resource_of
from bench.table2.forms import PAPERS
from bench.table2.limit import Leg, batch_s, path_s, units_per_s
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

TWO_STAGES = (
    Leg("in", 1.0, delay_s=10.0, is_own=True),
    Leg("a", 5.0, computes=True),
    Leg("between", 1.0, delay_s=10.0),
    Leg("b", 2.0, computes=True),
    Leg("out", 1.0, delay_s=10.0, is_own=True),
)


def test_one_unit_takes_its_whole_way() -> None:
    assert path_s(TWO_STAGES) == batch_s(TWO_STAGES, 1) == 40.0
    assert units_per_s(TWO_STAGES, 1) == 1 / 40


def test_a_batch_takes_the_slowest_resource_for_all_its_units_and_the_rest_of_the_way_once() -> None:
    assert batch_s(TWO_STAGES, 9) == 11 + 9 * 5 + 11 + 2 + 11
    narrow = (Leg("in", 8.0, delay_s=10.0, is_own=True), *TWO_STAGES[1:])
    assert batch_s(narrow, 9) == 9 * 8 + 10 + 5 + 11 + 2 + 11


def test_stages_of_one_resource_share_it_and_the_way_between_them_hinders_nobody() -> None:
    shared = (TWO_STAGES[0], Leg("a", 5.0), TWO_STAGES[2], Leg("a", 2.0), TWO_STAGES[4])
    assert batch_s(shared, 9) == 11 + 9 * 7 + 11
    assert units_per_s(shared, 9) == pytest.approx(1 / (9 * 7))
    assert units_per_s(shared, 2) == 1 / 40, "the way is longer than the work of two"


def test_all_computing_shares_the_cores() -> None:
    assert batch_s(TWO_STAGES, 100, cores=1) == 11 + 100 * 7 + 11
    assert units_per_s(TWO_STAGES, 100, cores=1) == pytest.approx(1 / 700)
    assert units_per_s(TWO_STAGES, 100, cores=4) == pytest.approx(1 / 500), "one stage does one at a time"


def test_each_client_has_its_own_links() -> None:
    narrow = (Leg("in", 30.0, is_own=True), Leg("a", 1.0))
    assert units_per_s(narrow, 10) == 1 / 31
    assert units_per_s((Leg("in", 30.0), Leg("a", 1.0)), 10) == 1 / 300


@pytest.mark.parametrize("seed", range(60))
def test_no_pipeline_is_faster(seed: int) -> None:
    rng = Random(seed)
    legs = [
        Leg(rng.choice("abcdef"), rng.uniform(0, 3), delay_s=rng.choice((0.0, rng.uniform(0, 9))))
        for _ in range(rng.randint(1, 8))
    ]
    clients, rounds = rng.randint(1, 6), rng.randint(1, 5)
    ends = _run(legs, clients, rounds)
    assert ends[-1] >= batch_s(legs, clients) - 1e-9, "as many units at once as clients, or more"
    assert clients * rounds / ends[-1] <= clients * units_per_s(legs, clients) * (1 + 1e-9)
    if clients == rounds == 1:
        assert ends[-1] == pytest.approx(path_s(legs))


def _run(legs: Sequence[Leg], clients: int, rounds: int) -> list[float]:
    """When each unit is done, if every client sends one after the other, and a resource first does what came first."""
    free_s: dict[str, float] = {}
    order = count()
    ready = [(0.0, next(order), 0) for _ in range(clients)]  # when, in which order, and the leg, of all rounds
    ends: list[float] = []
    while ready:
        at_s, _, done = heappop(ready)
        leg = legs[done % len(legs)]
        over_s = max(at_s, free_s.get(leg.resource, -inf)) + leg.busy_s
        free_s[leg.resource] = over_s
        done += 1
        if done % len(legs) == 0:
            ends.append(over_s + leg.delay_s)
        if done < rounds * len(legs):
            heappush(ready, (over_s + leg.delay_s, next(order), done))
    return sorted(ends)


@pytest.mark.parametrize("servers", PAPERS)
def test_each_of_blooms_servers_is_on_one_resource_and_a_step_takes_the_papers_time(servers: int) -> None:
    starts = [*accumulate(PAPERS[servers], initial=0)]
    spans = [Span(start, end) for start, end in pairwise(starts)]
    assert spans[-1].end == ENDS[-1]
    assert all(span.end <= ENDS[resource_of(span)] for span in spans)
    assert {resource_of(span) for span in spans} == {0, 1, 2}
    assert sum(decode_s(128, len(span)) for span in spans) == pytest.approx(1 / 1.35)
    assert sum(decode_s(2048, len(span)) for span in spans) == pytest.approx(1 / 1.23)
    assert sum(positions_s(8192, len(span)) for span in spans) == pytest.approx(3 * 8192 / 286.6)
