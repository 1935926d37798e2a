"""A worker's load average is the number of calls that are there at a time, and fades when they end."""

from __future__ import annotations

import pytest

from llmnode.core.serving.load_average import HALF_LIFE_S, LoadAverage


@pytest.mark.parametrize(("present", "stay_s"), [(0.25, 0.01), (3.0, 0.05), (40.0, 2.0)])
def test_it_is_the_number_of_calls_that_are_there_at_a_time(present: float, stay_s: float) -> None:
    load, every_s = LoadAverage(), stay_s / present
    for number in range(1, int(20 * HALF_LIFE_S / every_s)):
        load.note(stay_s, 1000 + number * every_s)
    assert load.at(1000 + 20 * HALF_LIFE_S) == pytest.approx(present, rel=0.05)


def test_it_halves_while_nothing_comes() -> None:
    load = LoadAverage()
    assert load.at(5.0) == 0
    load.note(1.0, 100.0)
    at_first = load.at(100.0)
    assert 0 < load.at(100.0 + HALF_LIFE_S) == pytest.approx(at_first / 2)
