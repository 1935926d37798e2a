"""The figures of `tests/bench/run pipeline` between two moments of a run."""

from __future__ import annotations

import pytest

from bench.pipeline.pipeline import Moment


def test_what_a_token_takes_is_what_the_busiest_stage_has_worked_for_each_that_came_since_then() -> None:
    began, ended = Moment(2.0, 10, 1.0, [4.0, 1.0]), Moment(4.0, 50, 2.0, [4.8, 2.6])
    assert ended.speed(began) == pytest.approx(20.0)
    assert ended.stage_s(began) == pytest.approx(1.6 / 40), "the second stage, which has worked less in all"
    assert ended.ends_s(began) == pytest.approx(1.0 / 40)
