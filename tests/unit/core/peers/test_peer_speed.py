"""The time that a hop took predicts the time that it will take, and never too short a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.peer_speed import KEPT, PeerSpeed

steps = st.lists(st.tuples(st.integers(1, 10_000), st.floats(0, 1e6)), min_size=1, max_size=2 * KEPT)


def paced(taken: list[tuple[int, float]]) -> PeerSpeed:
    pace = PeerSpeed()
    for positions, took_s in taken:
        pace.note(positions, took_s)
    return pace


def test_of_a_stranger_nothing_is_expected() -> None:
    assert PeerSpeed().expected_s(1) is None


@given(steps, st.integers(1, 10_000))
def test_a_step_may_take_what_any_late_one_took_and_more_for_more_positions(
    taken: list[tuple[int, float]], positions: int
) -> None:
    expected_s = paced(taken).expected_s(positions)
    assert expected_s is not None
    for known, took_s in taken[-KEPT:]:
        assert expected_s >= took_s
        assert expected_s >= took_s / known * positions * (1 - 1e-9)


@given(steps)
def test_what_was_long_ago_is_forgotten(taken: list[tuple[int, float]]) -> None:
    pace = paced(taken)
    for _ in range(KEPT):
        pace.note(1, 0.5)
    assert pace.expected_s(1) == 0.5
