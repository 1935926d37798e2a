"""A failure of one peer makes others of its address group dearer, and all that have computed nothing for the client."""

from __future__ import annotations

from llmnode.core.peers.broken_promises import BrokenPromises
from llmnode.core.policy import StandingPolicy

POLICY = StandingPolicy()


def test_all_groups_are_tried_before_a_second_peer_of_one() -> None:
    broken = BrokenPromises(POLICY)
    for number in range(8):
        broken.note(f"group {number}", 0.0)
        new = broken.cost_s(["another"], 0.0, has_computed=False)
        assert all(broken.cost_s([f"group {each}"], 0.0, has_computed=False) > new for each in range(number + 1))


def test_a_peer_that_has_computed_comes_before_those_that_have_not() -> None:
    broken = BrokenPromises(POLICY)
    assert broken.cost_s(["a"], 0.0, has_computed=False) == 0
    broken.note(None, 0.0)
    assert broken.cost_s(["a"], 0.0, has_computed=True) == 0
    assert broken.cost_s(["a"], 0.0, has_computed=False) == POLICY.doubt_cost_s


def test_a_peer_that_names_addresses_of_others_too_counts_by_the_worst() -> None:
    broken = BrokenPromises(POLICY)
    broken.note("bad", 0.0)
    assert broken.cost_s(["good", "bad"], 0.0, has_computed=True) == broken.cost_s(["bad"], 0.0, has_computed=True) > 0


def test_failures_are_forgotten() -> None:
    broken = BrokenPromises(POLICY)
    for _ in range(1000):
        broken.note("bad", 0.0)
    most_s = 2 * POLICY.most_doubts * POLICY.doubt_cost_s
    assert broken.cost_s(["bad"], 0.0, has_computed=False) <= most_s
    assert broken.cost_s(["bad"], 10 * POLICY.doubt_half_life_s, has_computed=False) == 0
