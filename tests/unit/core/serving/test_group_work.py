"""Whether others have work: while it is computed, and a moment later."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.serving.group_work import GroupWork

KEEPS_S = 2
GROUPS = "abc"


def test_the_work_of_others_counts_until_a_moment_after_its_end_and_own_work_never_does() -> None:
    work = GroupWork(KEEPS_S)
    assert not work.is_of_others("a", 0)
    work.begin("a")
    assert work.is_of_others("b", 100) and not work.is_of_others("a", 100)
    work.end("a", 100)
    assert work.is_of_others("b", 101) and not work.is_of_others("b", 102)
    assert not work.is_of_others("a", 100)


@given(st.lists(st.tuples(st.sampled_from(GROUPS), st.integers(0, 3), st.integers(0, 3)), max_size=20))
def test_it_is_as_all_that_was_done_says(done: list[tuple[str, int, int]]) -> None:
    """Each lasts for some seconds, and begins some seconds after the one before."""
    moments: list[tuple[int, int, str]] = []
    begin_s = 0
    for group, later_s, lasts_s in done:
        begin_s += later_s
        moments += [(begin_s, 1, group), (begin_s + lasts_s, 2, group)]
    moments.sort()
    work, at = GroupWork(KEEPS_S), iter([*moments, (1000, 0, "")])
    moment = next(at)
    for now_s in range(begin_s + 10):
        while moment[0] <= now_s:
            begun = {1: work.begin, 2: lambda group, now_s=now_s: work.end(group, now_s)}[moment[1]]
            begun(moment[2])
            moment = next(at)
        for group in GROUPS:
            under_way = sum(1 if kind == 1 else -1 for when, kind, each in moments if when <= now_s and each != group)
            lately = any(kind == 2 and now_s - KEEPS_S < when <= now_s for when, kind, each in moments if each != group)
            assert work.is_of_others(group, now_s) == (under_way > 0 or lately)
