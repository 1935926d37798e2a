"""A deadline that hops share moves by the time in which they had nothing to do, once, and by no more than the clock."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.shared_deadline import SharedDeadline

UNTIL_S = 100.0


@dataclass(frozen=True)
class Wait:
    since_s: int
    end_s: int

    @property
    def seconds(self) -> set[int]:
        return set(range(self.since_s, self.end_s))


waits = st.lists(st.builds(lambda since, took: Wait(since, since + took), st.integers(0, 30), st.integers(0, 10)))


def moved_s(idle: list[Wait], worked: list[Wait], excused: list[Wait]) -> float:
    """By how much it moves if these waits begin and end in their order in time."""
    deadline = SharedDeadline(UNTIL_S)
    for now_s in range(50):
        for each in idle:
            if each.end_s == now_s:
                deadline.excuse_idle(each.since_s, now_s)
        for each in worked:
            if each.since_s == now_s:
                deadline.begin(now_s)
            if each.end_s == now_s:
                deadline.end(each.since_s, now_s)
    stretches = [(float(each.since_s), float(each.end_s)) for each in excused]
    alone_s = [deadline.until_with_s([each]) for each in stretches]
    for stretch, until_s in zip(stretches[:1], alone_s, strict=False):
        deadline.excuse([stretch])
        assert deadline.until_s == until_s == deadline.until_with_s([stretch])
    deadline.excuse(stretches)
    return deadline.until_s - UNTIL_S


@given(waits, waits, waits)
def test_it_moves_by_all_moments_that_are_excused_and_by_each_of_them_once(
    idle: list[Wait], worked: list[Wait], excused: list[Wait]
) -> None:
    had_nothing, had_work, not_to_blame = (
        set().union(*(each.seconds for each in of)) for of in (idle, worked, excused)
    )
    assert moved_s(idle, worked, excused) == len((had_nothing - had_work) | not_to_blame)


def test_a_wait_within_another_one_is_excused_once() -> None:
    assert moved_s([Wait(8, 10), Wait(0, 12)], [], []) == 12
    assert moved_s([Wait(0, 10), Wait(5, 12)], [], []) == 12


def test_hops_that_are_waited_for_have_something_to_do() -> None:
    assert moved_s([Wait(5, 12)], [Wait(0, 15)], []) == 0, "it is waited for still"
    assert moved_s([Wait(5, 12)], [Wait(0, 10)], []) == 2


def test_two_pushes_that_did_not_come_at_the_same_time_are_excused_once() -> None:
    assert moved_s([], [Wait(0, 10), Wait(2, 12)], [Wait(0, 10), Wait(2, 12)]) == 12


def test_without_a_deadline_nothing_moves() -> None:
    deadline = SharedDeadline()
    deadline.excuse_idle(0.0, 5.0)
    assert deadline.until_s == float("inf")
