"""A server tells a client of others that are about to come, or that its load does not show yet."""

from __future__ import annotations

import pytest

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.serving.comers import (
    ASKING_OF_GROUP,
    ASKING_S,
    FRESH_OF_GROUP,
    FRESH_S,
    MOST_ASKING,
    MOST_FRESH,
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
    living = {session(1)}
    assert comers.fresh(B, living, 10.0) == 1.0 and comers.fresh(A, living, 10.0) == 0.0
    assert comers.fresh(B, living, 10.0 + HALF_LIFE_S) == pytest.approx(0.5)
    assert comers.fresh(B, living, 10.0 + FRESH_S) == 0.0
    comers.note_opened(A, "group", session(2), 90.0)
    assert comers.fresh(B, (), 90.0) == 0.0


def test_a_stranger_with_many_names_counts_as_few_clients() -> None:
    comers = Comers()
    for number in range(2 * ASKING_OF_GROUP):
        comers.note_asking(PeerId(str(number)), "group", 0.0, opens=True)
    assert comers.asking(B, 0.0) == ASKING_OF_GROUP
    for number in range(2 * MOST_ASKING):
        comers.note_asking(PeerId(f"other {number}"), f"group {number}", 0.0, opens=True)
    assert comers.asking(B, 0.0) == MOST_ASKING
    living = {session(number) for number in range(2 * MOST_FRESH)}
    for number in range(100):
        comers.note_opened(A, "group", session(number), 0.0)
    assert comers.fresh(B, living, 0.0) == FRESH_OF_GROUP
    for number in range(2 * MOST_FRESH):
        comers.note_opened(A, f"group {number}", session(number), 0.0)
    assert comers.fresh(B, living, 0.0) == MOST_FRESH
