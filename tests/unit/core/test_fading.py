"""Counts that fade: they halve with time, have a limit, and are forgotten."""

from __future__ import annotations

import pytest

from llmnode.core.fading import FadingCounts
from llmnode.core.rates import KEYS


def test_a_count_halves_in_its_time_and_is_forgotten() -> None:
    counts = FadingCounts(10)
    for _ in range(4):
        counts.add("a", 5.0)
    assert [counts.of("a", 5.0 + 10 * times) for times in (0, 1, 2)] == [4, 2, 1]
    assert counts.of("a", 5.0 + 10 * 7) == 0
    assert counts.of("b", 5.0) == 0


def test_a_count_has_a_limit() -> None:
    counts = FadingCounts(10, 3)
    for _ in range(9):
        counts.add("a", 0.0)
    assert counts.of("a", 0.0) == 3


@pytest.mark.parametrize(("apart_s", "most"), [(0.0, KEYS), (10.0, 5)])
def test_few_keys_are_remembered_and_those_that_faded_are_not(apart_s: float, most: int) -> None:
    counts = FadingCounts(10)
    for number in range(2 * KEYS):
        counts.add(number, number * apart_s)
    assert 1 <= len(counts._counts) <= most
    assert counts.of(2 * KEYS - 1, 2 * KEYS * apart_s) > 0
