"""Few places: no group keeps others out that hold less, and no two groups push each other out again and again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.fair_places import FairPlaces


def _come(places: FairPlaces[int], member: int, group: str) -> bool:
    """Whether it got a place."""
    if not places.has_place(group):
        return False
    if (victim := places.victim(group)) is not None:
        places.leave(victim)
    places.put(member, group)
    return True


def test_the_newest_of_the_fullest_group_makes_way_for_a_newcomer_of_another() -> None:
    places = FairPlaces[int](8)
    for member, group in enumerate("aaaaabbb"):
        assert _come(places, member, group)
    assert list(places) == [*range(8)]
    assert places.victim("c") == 4
    assert places.victim("b") == 4, "then both have four"
    assert places.victim("a") is None and not places.has_place("a")
    assert _come(places, 8, "b")
    assert places.victim("b") is None and places.victim("a") is None


def test_nobody_makes_way_while_there_are_places() -> None:
    places = FairPlaces[int](3)
    assert _come(places, 0, "a") and _come(places, 1, "a")
    assert places.has_place("b") and places.victim("b") is None
    assert FairPlaces[int](0).victim("a") is None and not FairPlaces[int](0).has_place("a")


EVENTS = st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60)


@given(EVENTS, st.integers(1, 9))
def test_a_newcomer_is_refused_only_if_no_group_holds_two_more(events: list[tuple[bool, int]], most: int) -> None:
    """Members come and leave. The twin has a list of those inside, in the order in which they came."""
    places, inside = FairPlaces[int](most), list[tuple[int, int]]()
    for member, (comes, number) in enumerate(events):
        held = Counter(group for _, group in inside)
        if not comes:
            if inside:
                gone = inside.pop(number % len(inside))[0]
                places.leave(gone)
                places.leave(gone)
            continue
        before = places.victim(str(number))
        got = _come(places, member, str(number))
        assert got == (len(inside) < most or max(held.values()) >= held[number] + 2)
        assert (before is not None) == (got and len(inside) == most)
        if before is not None:
            fullest = next(group for each, group in inside if each == before)
            assert held[fullest] == max(held.values())
            assert before == [each for each, group in inside if group == fullest][-1], "the newest"
            inside = [each for each in inside if each[0] != before]
        if got:
            inside.append((member, number))
        assert len(places) == len(inside) <= most
        for group in range(5):
            assert places.held_by(str(group)) == sum(each == group for _, each in inside)
