"""A client knows which of its positions were at a peer beside those of a step."""

from __future__ import annotations

import random

import pytest

from llmnode.core.peers.company import Company


def test_steps_that_come_and_go_together_have_all_others_beside_them() -> None:
    company = Company()
    marks = [company.come(1, 5.0) for _ in range(8)]
    assert [company.go(1, mark, 5.0, 6.0) for mark in marks] == pytest.approx([7.0] * 8)


def test_a_step_alone_has_nothing_beside_it_whatever_was_there_before() -> None:
    company = Company()
    company.go(8, company.come(8, 0.0), 0.0, 3.0)
    assert company.go(1, company.come(1, 3.0), 3.0, 4.0) == 0.0
    assert company.go(1, company.come(1, 7.0), 7.0, 7.0) == 0.0, "it took no time that the clock can tell"


def test_it_is_the_average_over_the_time_of_the_step() -> None:
    rng, company = random.Random(1), Company()
    steps = [(began_s := rng.uniform(0, 10), began_s + rng.uniform(0, 3), rng.randint(1, 8)) for _ in range(100)]
    events = sorted([*((step[0], 0, step) for step in steps), *((step[1], 1, step) for step in steps)])
    marks = {}
    for now_s, is_end, step in events:
        if not is_end:
            marks[step] = company.come(step[2], now_s)
            continue
        overlaps = [
            max(0.0, min(step[1], other[1]) - max(step[0], other[0])) * other[2] for other in steps if other is not step
        ]
        beside = company.go(step[2], marks[step], step[0], now_s)
        assert beside == pytest.approx(sum(overlaps) / (step[1] - step[0]), abs=1e-6)
