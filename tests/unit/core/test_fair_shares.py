"""Members of nested groups: whatever is put and removed, one of the fullest group is named."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.fair_shares import FairShares

paths = st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"))
changes = st.lists(st.tuples(st.integers(0, 20), paths | st.none()), max_size=60)


@given(changes, st.randoms(use_true_random=False))
def test_the_victim_is_of_the_fullest_part_of_the_fullest_group(
    changes: list[tuple[int, tuple[str, str] | None]], rng: random.Random
) -> None:
    shares, members = FairShares(), dict[int, tuple[str, str]]()
    for member, path in changes:
        if path is None:
            shares.remove(member)
            members.pop(member, None)
        else:
            shares.put(member, path)
            members[member] = path
        assert len(shares) == len(members)
        assert all(each in shares for each in members)
        if members:
            group, part = members[shares.victim(rng)]  # type: ignore[index]
            groups = Counter(each[0] for each in members.values())
            parts = Counter(each[1] for each in members.values() if each[0] == group)
            assert groups[group] == max(groups.values())
            assert parts[part] == max(parts.values())


def test_every_member_of_the_fullest_group_may_be_named() -> None:
    shares = FairShares()
    for member in range(5):
        shares.put(member, ("group",))
    rng = random.Random(1)
    assert {shares.victim(rng) for _ in range(200)} == set(range(5))


def test_without_members_there_is_nobody_to_name() -> None:
    shares = FairShares()
    shares.put(1, ("group",))
    shares.remove(1)
    with pytest.raises(KeyError):
        shares.victim(random.Random(1))
