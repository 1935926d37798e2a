"""When a worker process that has ended is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import WorkerPolicy
from llmnode.core.serving.restarts import Restarts

POLICY = WorkerPolicy(pause_s=1.0, longest_pause_s=60.0, steady_s=300.0, failed_starts=4)
SERVED = st.one_of(st.none(), st.floats(0, 1000))


def after(served: list[float | None]) -> Restarts:
    restarts = Restarts()
    for each in served:
        restarts = restarts.after_crash(each, POLICY)
    return restarts


def test_the_first_start_waits_for_nothing_and_each_further_one_twice_as_long() -> None:
    assert [after([1.0] * crashes).pause_s(POLICY) for crashes in range(9)] == [0, 1, 2, 4, 8, 16, 32, 60, 60]


@given(st.lists(SERVED, max_size=100))
def test_a_pause_is_within_its_limits_however_often_it_crashed(served: list[float | None]) -> None:
    assert POLICY.pause_s <= after([*served, 1.0]).pause_s(POLICY) <= POLICY.longest_pause_s


@given(st.lists(SERVED, max_size=20))
def test_who_served_for_long_is_started_again_as_at_the_first_crash(served: list[float | None]) -> None:
    assert after([*served, POLICY.steady_s]).pause_s(POLICY) == POLICY.pause_s


@given(st.lists(SERVED, max_size=30))
def test_it_is_hopeless_after_so_many_starts_in_a_row_that_never_served(served: list[float | None]) -> None:
    never = [each is None for each in served]
    assert after(served).is_hopeless(POLICY) == (len(never) >= 4 and all(never[-4:]))
