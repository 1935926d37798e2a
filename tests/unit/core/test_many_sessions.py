"""The throughput of many sessions, against a simulation of the servers and of each session."""

from __future__ import annotations

import heapq
import random
import statistics
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.many_sessions import SharedServer, many_sessions_tokens_per_s
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_ERROR, MOST_MEDIAN_ERROR = 0.25, 0.05
TOKENS = 120


def simulated_tokens_per_s(servers: Sequence[SharedServer], sessions: int, away_s: float, rng: random.Random) -> float:
    """Every session visits the servers in order. A server that is free computes all that wait, at once."""
    waiting: list[list[int]] = [[] for _ in servers]
    busy = [False] * len(servers)
    way_s = away_s / (len(servers) + 1)
    # Number of an event, so that equal times are in order; the server; the sessions that come to it, or are done there.
    events: list[tuple[float, int, int, list[int], bool]] = []
    number, times_s = 0, []
    for session in range(sessions):
        heapq.heappush(events, (rng.uniform(0, 0.5), number := number + 1, 0, [session], False))
    while len(times_s) < TOKENS * sessions:
        now_s, _, at, batch, is_done = heapq.heappop(events)
        if is_done:
            busy[at] = False
            is_last = at == len(servers) - 1
            for session in batch:
                then_s, to = (now_s + 2 * way_s, 0) if is_last else (now_s + way_s, at + 1)
                heapq.heappush(events, (then_s, number := number + 1, to, [session], False))
            times_s += [now_s] * (len(batch) * is_last)
        else:
            waiting[at] += batch
        if waiting[at] and not busy[at]:
            busy[at] = True
            done_s = now_s + servers[at].forward_s(len(waiting[at]))
            heapq.heappush(events, (done_s, number := number + 1, at, waiting[at], True))
            waiting[at] = []
    settled_s = times_s[len(times_s) // 2 :]
    return (len(settled_s) - 1) / (settled_s[-1] - settled_s[0])


def drawn(seed: int) -> tuple[list[SharedServer], int, float, random.Random]:
    rng = random.Random(seed)
    number = rng.randint(1, 4)
    alone_s = [rng.uniform(0.02, 0.1) for _ in range(number)]
    ends = [0, *accumulate(1 for _ in alone_s)]
    servers = [
        SharedServer(Span(start, end), each_s, each_s * rng.uniform(0.05, 0.5))
        for (start, end), each_s in zip(pairwise(ends), alone_s, strict=True)
    ]
    return servers, rng.randint(1, 40), rng.uniform(0.0, 0.4), rng


def test_the_forecast_is_near_to_what_the_sessions_of_a_simulation_do() -> None:
    errors = []
    for seed in range(25):
        servers, sessions, away_s, rng = drawn(seed)
        forecast = many_sessions_tokens_per_s(len(servers), servers, sessions, away_s)
        errors.append(abs(forecast / simulated_tokens_per_s(servers, sessions, away_s, rng) - 1))
    assert statistics.median(errors) < MOST_MEDIAN_ERROR
    assert max(errors) < MOST_ERROR


def test_one_session_meets_nobody() -> None:
    servers = [SharedServer(Span(0, 4), 0.03, 0.01), SharedServer(Span(4, 6), 0.02, 0.02)]
    assert many_sessions_tokens_per_s(6, servers, 1, 0.05) == pytest.approx(1 / (0.03 + 0.02 + 0.05))


def test_two_equal_servers_of_the_same_blocks_do_twice_as_much_for_twice_the_sessions() -> None:
    one = SharedServer(Span(0, 4), 0.03, 0.01)
    alone = many_sessions_tokens_per_s(4, [one], 1000, 0.05)
    assert many_sessions_tokens_per_s(4, [one, one], 2000, 0.05) == pytest.approx(2 * alone, rel=0.01)


def test_a_block_without_a_server_lets_nothing_through() -> None:
    assert many_sessions_tokens_per_s(5, [SharedServer(Span(0, 4), 0.03, 0.01)], 8, 0.05) == 0.0


@given(st.integers(1, 200), st.floats(0.001, 1), st.floats(0, 1), st.floats(0, 2))
def test_no_more_than_what_the_slowest_server_can_do_and_more_sessions_are_never_slower(
    sessions: int, alone_s: float, share: float, away_s: float
) -> None:
    servers = [SharedServer(Span(0, 2), alone_s, share * alone_s), SharedServer(Span(2, 3), 0.01, 0.001)]
    fewer, more = (many_sessions_tokens_per_s(3, servers, number, away_s) for number in (sessions, sessions + 1))
    assert fewer <= more * (1 + 1e-6)
    assert more * max(each.further_s for each in servers) <= 1 + 1e-6
    assert fewer <= sessions / (away_s + alone_s + 0.01) * (1 + 1e-6)
