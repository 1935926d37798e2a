"""Groups share a rate: each has its burst, all together have no more than the rate, and a newcomer waits for little."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import TurnPolicy
from llmnode.core.shared_rate import SharedRate

SECONDS = 20


@given(
    groups=st.integers(1, 40),
    burst=st.integers(1, 20),
    per_s=st.floats(0.1, 5),
    shared_per_s=st.floats(1, 50),
    step_s=st.floats(0.01, 0.5),
)
def test_whatever_the_number_of_groups_they_get_their_bursts_and_one_rate(
    groups: int, burst: int, per_s: float, shared_per_s: float, step_s: float
) -> None:
    """Each group asks for as much as it can get."""
    rate: SharedRate[str] = SharedRate(TurnPolicy(burst, per_s, shared_per_s))
    names = [str(number) for number in range(groups)]
    for name in names:
        for _ in range(2):
            rate.wait([name], name)
    at_once, turns, now_s = Counter[str](), Counter[str](), 0.0
    while now_s < SECONDS:
        for name in names:
            while rate.take([name], now_s):
                at_once[name] += 1
        while (name := rate.next(now_s)) is not None:
            turns[name] += 1
            rate.wait([name], name)
        assert rate.wait_s(now_s) > 0
        now_s += step_s
    for name in names:
        assert burst - 1 <= at_once[name] <= burst + per_s * SECONDS + 1
    assert turns.total() <= shared_per_s * SECONDS + 2
    assert turns.total() >= min(shared_per_s, 1 / step_s) * (SECONDS - step_s) / 2
    assert max(turns[name] for name in names) - min(turns[name] for name in names) <= 1


@given(st.integers(1, 100))
def test_a_newcomer_is_next(groups: int) -> None:
    rate: SharedRate[str] = SharedRate(TurnPolicy(1, 1, 10))
    for number in range(groups):
        for _ in range(3):
            rate.wait([str(number)], str(number))
    for turn in range(2 * groups):
        assert rate.next(turn) is not None
    rate.wait(["new"], "new")
    waits = 0
    while rate.next(1000.0 + waits) != "new":
        waits += 1
    assert waits <= groups, "others have a turn each, as those of the same use come in order"


def test_what_is_given_back_can_be_taken_at_once() -> None:
    rate: SharedRate[str] = SharedRate(TurnPolicy(4, 0.1, 1))
    for _ in range(4):
        assert rate.take(["group"], 0.0)
    assert not rate.take(["group"], 0.0)
    rate.give_back("group", 2.0, 0.0)
    assert [rate.take(["group"], 0.0) for _ in range(3)] == [True, True, False]


def test_one_that_gives_up_waits_no_more() -> None:
    rate: SharedRate[str] = SharedRate(TurnPolicy(1, 1, 1))
    rate.wait(["group"], "first")
    rate.wait(["group"], "second")
    rate.give_up(["group"], "first")
    assert len(rate) == 1
    assert rate.next(0.0) == "second"
    assert rate.next(9.0) is None
