"""Turns are equal among groups, and among the parts of a group, whatever their members and the sizes of the turns."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.fair_turns import FairTurns


@given(
    members=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 30), min_size=2),
    sizes=st.dictionaries(st.sampled_from("abcd"), st.integers(1, 1000)),
)
def test_groups_that_always_want_to_move_move_the_same(members: dict[str, int], sizes: dict[str, int]) -> None:
    turns: FairTurns[tuple[str, int]] = FairTurns()
    for group, count in members.items():
        for number in range(count):
            turns.wait([group], (group, number))
    moved: Counter[str] = Counter()
    for _ in range(400):
        member = turns.next()
        assert member is not None
        size = sizes.get(member[0], 500)
        moved[member[0]] += size
        turns.note([member[0]], size)
        turns.wait([member[0]], member)
    assert max(moved.values()) - min(moved[group] for group in members) <= 1000


@given(st.integers(1, 50))
def test_members_of_a_group_take_turns(count: int) -> None:
    turns: FairTurns[int] = FairTurns()
    for number in range(count):
        turns.wait(["group"], number)
    for _ in range(3):
        order = []
        for _ in range(count):
            member = turns.next()
            assert member is not None
            order.append(member)
            turns.note(["group"], 1)
            turns.wait(["group"], member)
        assert order == list(range(count))


@given(
    sizes=st.dictionaries(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz")), st.integers(1, 1000), min_size=2)
)
def test_the_parts_of_a_group_move_the_same_and_groups_do_whatever_their_parts(
    sizes: dict[tuple[str, str], int],
) -> None:
    turns: FairTurns[tuple[str, str]] = FairTurns()
    for path in sizes:
        turns.wait(path, path)
    moved: Counter[str] = Counter()
    for _ in range(1200):
        path = turns.next()
        assert path is not None
        moved.update({path[0]: sizes[path], "".join(path): sizes[path]})
        turns.note(path, sizes[path])
        turns.wait(path, path)
    groups = {group for group, _ in sizes}
    assert max(moved[each] for each in groups) - min(moved[each] for each in groups) <= 1000
    for group in groups:
        parts = [moved["".join(path)] for path in sizes if path[0] == group]
        assert max(parts) - min(parts) <= 1000


def test_who_did_not_want_to_move_has_saved_nothing_up() -> None:
    turns: FairTurns[str] = FairTurns()
    for _ in range(1000):
        turns.wait(["busy"], "busy")
        turns.next()
        turns.note(["busy"], 10)
    for _ in range(2):
        turns.wait(["busy"], "busy")
        turns.wait(["idle"], "idle")
    order = []
    for _ in range(4):
        member = turns.next()
        assert member is not None
        order.append(member)
        turns.note([member], 10)
    assert sorted(order[:2]) == sorted(order[2:]) == ["busy", "idle"]


def test_a_member_that_gives_up_has_no_turn() -> None:
    turns: FairTurns[str] = FairTurns()
    turns.wait(["group"], "one")
    turns.wait(["group"], "two")
    turns.give_up(["group"], "one")
    assert (turns.next(), turns.next(), len(turns)) == ("two", None, 0)


def test_groups_that_move_no_more_are_forgotten() -> None:
    turns: FairTurns[int] = FairTurns()
    for number in range(10_000):
        turns.wait([f"group {number}"], number)
        turns.next()
        turns.note([f"group {number}"], 1)
        turns.wait(["always"], 0)
        turns.next()
        turns.note(["always"], 1)
    assert len(turns._root._groups) < 200
