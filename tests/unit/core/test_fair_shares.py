"""Members of nested groups: whatever is put and removed, one of the fullest group is named."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.fair_shares import FairShares

paths = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))
changes = st.lists(st.tuples(st.integers(0, 20), paths | st.none(), st.integers(0, 3)), max_size=200)


@given(changes, st.randoms(use_true_random=False))
def test_the_victim_is_of_the_fullest_part_of_the_fullest_group(
    changes: list[tuple[int, tuple[str, str] | None, int]], rng: random.Random
) -> None:
    shares, members = FairShares[int](), dict[int, tuple[tuple[str, str], int]]()
    for member, path, amount in changes:
        if path is None:
            shares.remove(member)
            members.pop(member, None)
        else:
            shares.put(member, path, amount)
            members[member] = path, amount
        assert len(shares) == len(members)
        assert shares.amount == sum(each for _, each in members.values())
        assert all(each in shares for each in members)
        if members:
            (group, part), _ = members[shares.victim(rng)]
            groups, parts = Counter[str](), Counter[str]()
            for path, amount in members.values():
                groups[path[0]] += amount
                parts[path[1]] += amount if path[0] == group else 0
            assert groups[group] == max(groups.values())
            assert parts[part] == max(parts.values())


def test_every_member_of_the_fullest_group_may_be_named() -> None:
    shares = FairShares[int]()
    for member in range(5):
        shares.put(member, ("group",))
    rng = random.Random(1)
    assert {shares.victim(rng) for _ in range(200)} == set(range(5))


def test_without_members_there_is_nobody_to_name() -> None:
    shares = FairShares[int]()
    shares.put(1, ("group",))
    shares.remove(1)
    with pytest.raises(KeyError):
        shares.victim(random.Random(1))


def test_changes_leave_nothing_behind() -> None:
    shares = FairShares[int]()
    for number in range(10_000):
        shares.put(number % 10, (number % 7,), number % 5)
    assert len(shares._root._by_amount) < 100
