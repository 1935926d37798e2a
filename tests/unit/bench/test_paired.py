"""Statistics of `tests/bench/run quality`: agreement, and the interval of a paired difference."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.kit.paired import change_percent, compare_choices, equal_prefix

tokens = st.integers(0, 3)
chunks = st.lists(st.floats(1, 1000), min_size=1, max_size=40)


@given(st.lists(st.tuples(tokens, tokens, st.floats(0, 1)), min_size=1))
def test_choices_agree_or_differ_and_some_that_differ_are_near_ties(rows: list[tuple[int, int, float]]) -> None:
    expected, chosen, gaps = zip(*rows, strict=True)
    agreement = compare_choices(expected, chosen, gaps, near_tie=0.5)
    assert agreement.positions == len(rows)
    assert agreement.share == pytest.approx(np.mean(np.array(expected) == np.array(chosen)))
    assert agreement.near_ties == sum(a != b and gap < 0.5 for a, b, gap in rows)
    assert compare_choices(expected, expected, gaps, near_tie=0.5).share == 1


@given(st.lists(st.tuples(tokens, tokens)))
def test_an_equal_prefix_is_equal_and_ends_at_a_difference(pairs: list[tuple[int, int]]) -> None:
    expected, chosen = [a for a, _ in pairs], [b for _, b in pairs]
    length = equal_prefix(expected, chosen)
    assert expected[:length] == chosen[:length]
    assert length == len(pairs) or expected[length] != chosen[length]


@given(chunks, st.floats(-50, 50))
def test_the_same_change_of_every_chunk_is_certain(baseline: list[float], percent: float) -> None:
    change = change_percent(baseline, [value * (1 + percent / 100) for value in baseline])
    assert (change.estimate, change.low, change.high) == pytest.approx((percent,) * 3, abs=1e-6)


def test_an_interval_is_that_of_the_theory_and_comes_again() -> None:
    rng = np.random.default_rng(5)
    baseline = np.full(400, 100.0)
    variant = baseline + rng.normal(0.5, 2, 400)  # in %: 0.5 on average, with a standard error of 2 / 20
    change = change_percent(list(baseline), list(variant))
    assert change.estimate == pytest.approx(variant.mean() - 100)
    assert change.high - change.low == pytest.approx(2 * 1.96 * variant.std() / 20, rel=0.05)
    assert change.low < change.estimate < change.high
    assert change == change_percent(list(baseline), list(variant))


def test_hard_chunks_do_not_widen_a_paired_interval() -> None:
    rng = np.random.default_rng(6)
    baseline = rng.uniform(10, 1000, 50)
    change = change_percent(list(baseline), list(baseline * rng.uniform(1.009, 1.011, 50)))
    assert change.high - change.low < 0.1
    assert change.estimate == pytest.approx(1, abs=0.1)
