"""Each row of a reordered batch gets the session that it asked for, and no needless copy is made."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.texts.beams import first_alike, sessions_of_rows

sources_of_rows = st.integers(1, 8).flatmap(
    lambda rows: st.lists(st.integers(0, rows - 1), min_size=rows, max_size=rows)
)


@given(sources_of_rows)
def test_every_row_goes_on_from_its_source_in_a_session_of_its_own(sources: list[int]) -> None:
    sessions = sessions_of_rows(sources)
    assert sorted(sessions) == list(range(len(sources)))
    held = list(range(len(sources)))
    for session, source in zip(sessions, sources, strict=True):
        if session != source:
            assert session not in sources, "nobody else goes on from what is overwritten"
            held[session] = source
    assert [held[session] for session in sessions] == sources


@given(sources_of_rows)
def test_as_many_are_copied_as_go_on_from_another_rows_source(sources: list[int]) -> None:
    copies = sum(session != source for session, source in zip(sessions_of_rows(sources), sources, strict=True))
    assert copies == sum(count - 1 for count in Counter(sources).values())


@given(st.permutations(range(6)))
def test_a_permutation_copies_nothing(sources: list[int]) -> None:
    assert sessions_of_rows(sources) == sources


def test_copies_are_made_of_and_over_rows_of_the_same_prompt() -> None:
    assert sessions_of_rows([1, 1, 1, 3, 5, 5]) == [1, 0, 2, 3, 5, 4]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=6), st.data())
def test_no_session_becomes_a_copy_of_one_of_another_kind(kinds: list[int], data: st.DataObject) -> None:
    sources = data.draw(st.lists(st.integers(0, len(kinds) - 1), min_size=1, max_size=9))
    sessions = sessions_of_rows(sources, kinds)
    assert len(set(sessions)) == len(sessions)
    opened = [each for each in sessions if each >= len(kinds)]
    assert opened == list(range(len(kinds), len(kinds) + len(opened)))
    for session, source in zip(sessions, sources, strict=True):
        assert session == source or session not in sources
        assert session >= len(kinds) or kinds[session] == kinds[source]
    spare = [kind for session, kind in enumerate(kinds) if session not in sessions and session not in sources]
    assert not {kinds[source] for session, source in zip(sessions, sources, strict=True) if session in opened} & {
        *spare
    }


@pytest.mark.parametrize(
    ("rows", "firsts"),
    [
        ([], []),
        ([[1, 2], [1, 2], [1, 3], [1, 2]], [0, 0, 2, 0]),
        ([[], [1], [], [1]], [0, 1, 0, 1]),
    ],
)
def test_rows_that_are_equal_are_known_by_the_first(rows: list[list[int]], firsts: list[int]) -> None:
    assert first_alike(rows) == firsts
