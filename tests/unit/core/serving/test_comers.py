"""A server tells a client of others that are about to come, or that its load does not show yet."""

from __future__ import annotations

import pytest

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.serving.comers import (
    ASKING_OF_GROUP,
    ASKING_S,
    FRESH_OF_GROUP,
    FRESH_S,
    KEPT_OF_GROUP,
    MOST_ASKING,
    MOST_GROUPS,
    Comers,
)
from llmnode.core.serving.load_average import HALF_LIFE_S

A, B = PeerId("a"), PeerId("b")


def session(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def test_a_client_that_asks_is_expected_until_it_opens_or_goes_or_a_moment_later() -> None:
    comers = Comers()
    for end in ("opens", "goes", "waits"):
        comers.note_asking(A, "group", 10.0, opens=True)
        assert (comers.asking(B, 10.0), comers.asking(A, 10.0)) == (1, 0)
        if end == "opens":
            comers.note_opened(A, "group", session(1), 10.0)
        elif end == "goes":
            comers.note_asking(A, "group", 10.0, opens=False)
        assert comers.asking(B, 10.0 + (ASKING_S if end == "waits" else 0.0)) == 0


def test_a_session_fades_as_the_load_average_takes_it_in_and_goes_when_it_ends() -> None:
    comers = Comers()
    comers.note_opened(A, "group", session(1), 10.0)
    assert comers.fresh(B, 10.0) == 1.0 and comers.fresh(A, 10.0) == 0.0
    assert comers.fresh(B, 10.0 + HALF_LIFE_S) == pytest.approx(0.5)
    assert comers.fresh(B, 10.0 + FRESH_S) == 0.0
    assert not comers._fresh
    comers.note_opened(A, "group", session(2), 90.0)
    comers.note_ended("group", session(2))
    comers.note_ended("group", session(2))
    assert comers.fresh(B, 90.0) == 0.0


def test_a_stranger_with_many_names_counts_as_few_clients() -> None:
    comers = Comers()
    for number in range(2 * ASKING_OF_GROUP):
        comers.note_asking(PeerId(str(number)), "group", 0.0, opens=True)
    assert comers.asking(B, 0.0) == ASKING_OF_GROUP
    for number in range(2 * MOST_ASKING):
        comers.note_asking(PeerId(f"other {number}"), f"group {number}", 0.0, opens=True)
    assert comers.asking(B, 0.0) == MOST_ASKING
    for number in range(5000):
        comers.note_opened(A, "group", session(number), 0.0)
    assert comers.fresh(B, 0.0) == FRESH_OF_GROUP
    comers.note_opened(B, "other", session(5000), 0.0)
    assert comers.fresh(A, 0.0) == 1.0, "one group has no session of another forgotten"


def test_what_is_looked_at_for_an_answer_does_not_grow_with_the_sessions() -> None:
    comers = Comers()
    for number in range(10_000):
        comers.note_opened(A, f"group {number % 500}", session(number), 0.0)
    assert len(comers._fresh) == MOST_GROUPS
    assert max(map(len, comers._fresh.values())) <= KEPT_OF_GROUP
    assert comers.fresh(B, 0.0) <= MOST_GROUPS * FRESH_OF_GROUP
    for number in range(10_000):
        comers.note_ended(f"group {number % 500}", session(number))
    assert not comers._fresh
