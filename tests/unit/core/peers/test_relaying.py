"""How much of a session's prefills may go through relays."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.peers.relaying import RelayBudget, would_cut
from llmnode.core.policy import RelayedPolicy

POLICY = RelayedPolicy()
PREFILL = POLICY.step_positions + 1


@given(st.lists(st.tuples(st.floats(0.0, 20.0), st.integers(1, POLICY.prefill_bytes)), max_size=50))
def test_within_a_window_no_more_goes_than_the_policy_says(prefills: list[tuple[float, int]]) -> None:
    budget, now_s, gone = RelayBudget(POLICY), 0.0, []
    for pause_s, size_bytes in prefills:
        now_s += pause_s
        if budget.allows(PREFILL, size_bytes, now_s):
            gone.append((now_s, size_bytes))
        assert sum(size for at_s, size in gone if at_s > now_s - POLICY.window_s) <= POLICY.prefill_bytes


def test_steps_are_never_held_and_count_for_nothing() -> None:
    budget = RelayBudget(POLICY)
    assert all(budget.allows(1, 16 << 10, 0.05 * number) for number in range(1000))
    assert budget.allows(PREFILL, POLICY.prefill_bytes, 50.0)


def test_what_was_held_counts_for_nothing() -> None:
    budget = RelayBudget(POLICY)
    assert not budget.allows(PREFILL, POLICY.prefill_bytes + 1, 0.0)
    assert budget.allows(PREFILL, POLICY.prefill_bytes, 0.0)
    assert not budget.allows(PREFILL, 1, POLICY.window_s / 2)
    assert budget.allows(PREFILL, 1, POLICY.window_s)


def test_a_relay_of_the_usual_limit_would_cut_a_prefill_and_ours_would_not() -> None:
    assert would_cut(128 << 10, 256 << 10)
    assert not would_cut(1 << 40, 64 << 20)
    assert not would_cut(None, 1 << 40)
