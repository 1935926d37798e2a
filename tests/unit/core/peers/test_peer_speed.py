"""The time that a hop took predicts the time that it will take, and never too short a time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.peer_speed import KEPT, Overtime, PeerSpeed, PromisedTime
from llmnode.core.policy import StandingPolicy

STANDING = StandingPolicy()
PROMISED = PromisedTime(position_s=0.01, patience_s=8.0)

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


def test_overtime_is_what_slow_steps_take_beyond_what_was_said() -> None:
    overtime = Overtime(STANDING)
    for _ in range(3):
        overtime.note(PROMISED, 2, 2.0)
    assert (overtime.total_s, overtime.position_s) == (3 * (2.0 - 2 * 0.01), 1.0)
    overtime.note(PROMISED, STANDING.short_step + 1, 100.0)
    assert overtime.total_s == 3 * (2.0 - 2 * 0.01), "a prefill does not show the time of a token"


@given(st.floats(0, 1e6))
def test_one_slow_step_is_never_enough_to_leave_a_hop(took_s: float) -> None:
    overtime = Overtime(STANDING)
    overtime.note(PROMISED, 1, took_s)
    assert overtime.total_s < STANDING.slow_total_s
    overtime.note(PROMISED, 1, 1e6)
    overtime.note(PROMISED, 1, 1e6)
    assert overtime.total_s >= STANDING.slow_total_s


def test_a_slow_step_from_time_to_time_adds_up_to_nothing() -> None:
    overtime = Overtime(STANDING)
    for _ in range(1000):
        overtime.note(PROMISED, 1, 2.0)
        for _ in range(4):
            overtime.note(PROMISED, 1, STANDING.slow_step_s)
    assert overtime.total_s < STANDING.slow_total_s
