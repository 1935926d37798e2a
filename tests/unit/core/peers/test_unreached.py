"""Inventions that cannot be reached: where several were, others that were never reached cost more."""

from __future__ import annotations

from llmnode.core.peers.unreached import Unreached
from llmnode.core.policy import RoutePolicy

POLICY = RoutePolicy()


def test_one_failure_costs_its_group_nothing_and_more_of_them_cost_it_more_than_others() -> None:
    unreached = Unreached(POLICY)
    unreached.note({"a"}, 0.0)
    assert unreached.cost_s({"a"}, 0.0) == 0
    unreached.note({"a"}, 0.0)
    assert unreached.cost_s({"a"}, 0.0) > 0
    assert unreached.cost_s({"a", "b"}, 0.0) > 0, "it does not help to claim another one beside"
    assert unreached.cost_s({"b"}, 0.0) == 0


def test_failures_in_many_groups_concern_all() -> None:
    unreached = Unreached(POLICY)
    for number in range(10):
        unreached.note({f"{number}"}, 0.0)
    assert unreached.cost_s({"another"}, 0.0) > 1


def test_one_invention_blames_all_groups_that_it_claims_no_more_than_one() -> None:
    unreached, groups = Unreached(POLICY), {f"{number}" for number in range(8)}
    for _ in range(2):
        unreached.note(groups, 0.0)
    assert unreached.cost_s({"0"}, 0.0) == 0
    for _ in range(11):
        unreached.note(groups, 0.0)
    assert unreached.cost_s({"0"}, 0.0) > unreached.cost_s({"another"}, 0.0)


def test_failures_are_forgotten_and_their_cost_has_a_limit() -> None:
    unreached = Unreached(POLICY)
    for _ in range(1000):
        unreached.note({"a"}, 0.0)
    assert unreached.cost_s({"a"}, 0.0) <= 2 * POLICY.most_unreached * POLICY.unreached_cost_s
    assert unreached.cost_s({"a"}, 10 * POLICY.unreached_half_life_s) == 0
