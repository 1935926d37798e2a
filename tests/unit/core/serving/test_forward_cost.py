"""The scheduler learns the time of a forward, and the part of it that does not depend on the number of decodes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import BatchPolicy
from llmnode.core.serving.forward_cost import ForwardCost


def pace_of(took_s: list[tuple[int, float]]) -> ForwardCost:
    """A ForwardCost after forwards of these numbers of decodes and times."""
    pace = ForwardCost(BatchPolicy())
    for decodes, each_s in took_s:
        pace.note(decodes, 0, 0.0, each_s)
    return pace


@given(st.floats(0.0, 1.0), st.floats(1e-4, 1.0), st.lists(st.integers(1, 16), min_size=1, max_size=40))
def test_what_does_not_depend_on_how_many_decode_is_found(start_s: float, each_s: float, counts: list[int]) -> None:
    pace = pace_of([(count, start_s + each_s * count) for count in [1, 4, 16, *counts]])
    assert pace.forward_s == pytest.approx(start_s, abs=1e-6)


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1e-6, 10.0)), min_size=1, max_size=60))
def test_it_is_never_more_than_what_forwards_took_nor_less_than_nothing(took_s: list[tuple[int, float]]) -> None:
    assert 0 <= pace_of(took_s).forward_s <= max(each_s for _, each_s in took_s) * 1.001


def test_as_long_as_as_many_decode_the_first_is_taken_to_cost_most() -> None:
    assert pace_of([]).forward_s == 0
    assert pace_of([(1, 0.05)] * 5).forward_s == pytest.approx(0.04)
    assert pace_of([(4, 0.08)] * 5).forward_s == pytest.approx(0.04)


def test_what_has_changed_is_seen() -> None:
    before = [(count, 0.1 + 0.01 * count) for count in (1, 8)] * 30
    now = [(count, 0.02 + 0.001 * count) for count in (1, 8)] * 60
    assert pace_of(before + now).forward_s == pytest.approx(0.02, rel=0.05)
