"""The scheduler learns the time of a forward, and the part of it that does not depend on the number of decodes."""

from __future__ import annotations

import random

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


def test_a_prompt_alone_is_seen_to_take_what_it_took_whatever_decodes_there_were_before() -> None:
    blocks, start_s, decode_s, position_s = 10, 0.07, 0.01, 0.007
    pace = ForwardCost(BatchPolicy())
    for decodes in (1, 8, 12) * 20:
        took_s = start_s + decodes * decode_s
        pace.note(decodes, 0, 0.0, took_s)
        pace.note_decodes(blocks * decodes, blocks, took_s)
    for _ in range(20):
        pace.note(0, 96 * blocks, 1.0, start_s + 96 * position_s)
    seen = pace.seen
    assert blocks * (seen.decode_s + 96 * seen.prefill_s) == pytest.approx(
        start_s + decode_s + 96 * position_s, rel=0.02
    )


def test_one_decode_takes_what_it_took_alone_however_noisy_the_forwards_of_many_are() -> None:
    rng, pace = random.Random(1), ForwardCost(BatchPolicy())
    for _ in range(20):
        pace.note_decodes(10, 10, 0.08)
    for _ in range(200):
        decodes = rng.randint(6, 14)
        pace.note_decodes(10 * decodes, 10, 0.07 + 0.01 * decodes + rng.uniform(0, 0.1))
    assert pace.seen.decode_s == pytest.approx(0.008)
    for _ in range(2000):
        pace.note_decodes(80, 10, 1.0)
    assert pace.seen.decode_s > 0.02, "it was long ago"
