"""How many parts of a batch go at once: fewer after a refusal, then more again, within bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.at_once import WORKED, AtOnce

MOST = 8


def test_a_refusal_takes_one_of_those_that_were_under_way_and_parts_that_work_bring_it_back() -> None:
    at_once = AtOnce(MOST)
    at_once.refused(5)
    assert at_once.number == 4
    for number in (5, 6):
        for _ in range(WORKED - 1):
            at_once.worked()
        assert at_once.number == number - 1
        at_once.worked()
        assert at_once.number == number


def test_a_refusal_begins_the_count_anew() -> None:
    at_once = AtOnce(MOST)
    at_once.refused(5)
    for _ in range(WORKED - 1):
        at_once.worked()
    at_once.refused(4)
    at_once.worked()
    assert at_once.number == 3


@given(st.lists(st.one_of(st.none(), st.integers(0, 2 * MOST))))
def test_it_stays_within_its_bounds(events: list[int | None]) -> None:
    at_once = AtOnce(MOST)
    for each in events:
        if each is None:
            at_once.worked()
        else:
            at_once.refused(each)
        assert 1 <= at_once.number <= MOST
