"""The draws of `tests/bench/run table1`, and the cost of restarts from scratch by them."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.table1.failing import Draws, count_restarts, typical_seed

STAGES = 4


@given(st.text(max_size=5), st.integers(0, 2000), st.integers(0, 50), st.floats(0, 1), st.floats(0, 1))
def test_what_fails_at_one_rate_fails_at_every_higher_one(
    seed: str, step: int, attempt: int, one: float, other: float
) -> None:
    lower, higher = (Draws(seed, rate, STAGES).failing(step, attempt) for rate in sorted((one, other)))
    assert set(lower) <= set(higher) <= set(range(STAGES))
    assert lower == sorted(lower)


def test_sends_fail_as_often_as_the_rate_says() -> None:
    draws = Draws("often", 0.1, STAGES)
    failed = sum(len(draws.failing(step, attempt)) for step in range(1000) for attempt in range(5))
    assert failed == pytest.approx(0.1 * STAGES * 5000, rel=0.1)


@pytest.mark.parametrize(("rate", "steps"), [(0.01, 128), (0.01, 256), (0.5, 3)])
def test_a_typical_seed_fails_as_often_as_is_expected(rate: float, steps: int) -> None:
    seed = typical_seed("any", rate, STAGES, range(steps))
    draws = Draws(seed, rate, STAGES)
    assert sum(len(draws.failing(step, 0)) for step in range(steps)) == round(rate * STAGES * steps)
    assert seed == typical_seed("any", rate, STAGES, range(steps))


def test_without_failures_restarts_cost_what_the_steps_do() -> None:
    restarts = count_restarts(Draws("none", 0.0, STAGES), [0.5, 1, 2], open_s=7, most_steps=3)
    assert restarts is not None
    assert (restarts.steps, restarts.failures, restarts.seconds) == (3, 0, 3.5)


def test_restarts_take_as_many_steps_as_the_theory_says() -> None:
    tokens, rate = 10, 0.02
    reached = (1 - rate) ** STAGES
    expected = (reached**-tokens - 1) / (1 - reached)
    runs = [count_restarts(Draws(str(seed), rate, STAGES), [1] * tokens, 0, 10_000) for seed in range(3000)]
    assert statistics.mean(run.steps for run in runs if run) == pytest.approx(expected, rel=0.04)
    assert all(run and run.steps - run.failures <= run.seconds <= run.steps for run in runs)
    assert all(run and (run.steps == tokens) == (run.failures == 0) for run in runs)


def test_restarts_that_take_too_many_steps_are_given_up() -> None:
    assert count_restarts(Draws("many", 0.5, STAGES), [1] * 1024, 0, 5000) is None
