"""The throughput of many sessions, against a simulation of the servers and of each session."""

from __future__ import annotations

import heapq
import random
import statistics
from typing import TYPE_CHECKING, TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.many_sessions import RouteSessions, SharedServer, many_sessions_tokens_per_s

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

MOST_ERROR, MOST_MEDIAN_ERROR = 0.25, 0.05
TOKENS = 120


Drawn: TypeAlias = "tuple[list[SharedServer], tuple[RouteSessions, ...]]"


def chain(servers: Sequence[SharedServer], sessions: int, away_s: float) -> tuple[RouteSessions, ...]:
    """All sessions go through all servers, one after the other."""
    return (RouteSessions(sessions, away_s, tuple((place, 1.0) for place in range(len(servers)))),)


def simulated_tokens_per_s(
    servers: Sequence[SharedServer], routes: Sequence[RouteSessions], rng: random.Random
) -> float:
    """Every session visits the servers of its route in order. A server that is free computes all that wait, at once."""
    waiting: list[list[tuple[int, int]]] = [[] for _ in servers]  # a session, and the number of its visit
    busy = [False] * len(servers)
    route_of = [route for route in routes for _ in range(route.sessions)]
    # Number of an event, so that equal times are in order; the server; those that come to it, or are done there.
    events: list[tuple[float, int, int, list[tuple[int, int]], bool]] = []
    number, times_s = 0, []
    for session, route in enumerate(route_of):
        heapq.heappush(events, (rng.uniform(0, 0.5), number := number + 1, route.visits[0][0], [(session, 0)], False))
    while len(times_s) < TOKENS * len(route_of):
        now_s, _, at, batch, is_done = heapq.heappop(events)
        if is_done:
            busy[at] = False
            for session, visit in batch:
                route = route_of[session]
                way_s, is_last = route.away_s / (len(route.visits) + 1), visit == len(route.visits) - 1
                then_s, to = (now_s + 2 * way_s, 0) if is_last else (now_s + way_s, visit + 1)
                coming = [(session, to)]
                heapq.heappush(events, (then_s, number := number + 1, route.visits[to][0], coming, False))
                times_s += [now_s] * is_last
        else:
            waiting[at] += batch
        if waiting[at] and not busy[at]:
            busy[at] = True
            parts = [route_of[session].visits[visit][1] for session, visit in waiting[at]]
            forward_s = statistics.mean(parts) * servers[at].forward_s(len(parts))
            heapq.heappush(events, (now_s + forward_s, number := number + 1, at, waiting[at], True))
            waiting[at] = []
    settled_s = times_s[len(times_s) // 2 :]
    return (len(settled_s) - 1) / (settled_s[-1] - settled_s[0])


def drawn_servers(rng: random.Random, number: int) -> list[SharedServer]:
    alone_s = [rng.uniform(0.02, 0.1) for _ in range(number)]
    return [SharedServer(each_s, each_s * rng.uniform(0.05, 0.5)) for each_s in alone_s]


def drawn_chain(rng: random.Random) -> Drawn:
    servers = drawn_servers(rng, rng.randint(1, 4))
    return servers, chain(servers, rng.randint(1, 40), rng.uniform(0.0, 0.4))


def drawn_routes(rng: random.Random) -> Drawn:
    """Some share a server, and others have the one beside it. Each has its own number of sessions, and its own way."""
    servers = drawn_servers(rng, 4)
    routes = []
    for places in ((0, 1), (0, 2), (3,)):
        visits = tuple((place, rng.uniform(0.3, 1.0)) for place in places)
        routes.append(RouteSessions(rng.randint(1, 20), rng.uniform(0.0, 0.4), visits))
    return servers, tuple(routes)


@pytest.mark.parametrize("drawn", [drawn_chain, drawn_routes])
def test_the_forecast_is_near_to_what_the_sessions_of_a_simulation_do(drawn: Callable[[random.Random], Drawn]) -> None:
    errors = []
    for seed in range(25):
        rng = random.Random(seed)
        servers, routes = drawn(rng)
        simulated = simulated_tokens_per_s(servers, routes, rng)
        errors.append(abs(many_sessions_tokens_per_s(servers, routes) / simulated - 1))
    assert statistics.median(errors) < MOST_MEDIAN_ERROR
    assert max(errors) < MOST_ERROR


def test_one_session_meets_nobody() -> None:
    servers = [SharedServer(0.03, 0.01), SharedServer(0.02, 0.02)]
    assert many_sessions_tokens_per_s(servers, chain(servers, 1, 0.05)) == pytest.approx(1 / (0.03 + 0.02 + 0.05))


def test_two_equal_servers_do_twice_as_much_for_twice_the_sessions() -> None:
    one = SharedServer(0.03, 0.01)
    alone = many_sessions_tokens_per_s([one], chain([one], 1000, 0.05))
    apart = [RouteSessions(1000, 0.05, ((place, 1.0),)) for place in range(2)]
    assert many_sessions_tokens_per_s([one, one], apart) == pytest.approx(2 * alone, rel=0.01)


def test_a_part_of_a_span_takes_that_part_of_the_time() -> None:
    half, whole = (
        many_sessions_tokens_per_s([SharedServer(0.06 * times, 0.02 * times)], [RouteSessions(8, 0.05, ((0, part),))])
        for times, part in ((1.0, 0.5), (0.5, 1.0))
    )
    assert half == pytest.approx(whole)
    assert many_sessions_tokens_per_s([], []) == 0.0


@given(st.integers(1, 200), st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 2))
def test_no_more_than_what_the_slowest_server_can_do_and_more_sessions_are_never_slower(
    sessions: int, alone_s: float, share: float, away_s: float
) -> None:
    servers = [SharedServer(alone_s, share * alone_s), SharedServer(0.01, 0.001)]
    fewer, more = (
        many_sessions_tokens_per_s(servers, chain(servers, number, away_s)) for number in (sessions, sessions + 1)
    )
    assert fewer <= more * (1 + 1e-6)
    assert more * max(each.further_s for each in servers) <= 1 + 1e-6
    assert fewer <= sessions / (away_s + alone_s + 0.01) * (1 + 1e-6)
