"""Tokens a second of several clients, as `tests/bench/run clients` counts them."""

from __future__ import annotations

import pytest

from bench.clients.clients import rate

TOKENS = 40


def clients(count: int, begun_apart_s: float) -> list[list[float]]:
    """Each has a token a second."""
    return [[number * begun_apart_s + at for at in range(TOKENS)] for number in range(count)]


@pytest.mark.parametrize("count", [1, 2, 8, 16])
def test_clients_in_step_have_as_many_times_what_one_has(count: int) -> None:
    assert rate(clients(count, 0)) == pytest.approx(count)


@pytest.mark.parametrize(("count", "together"), [(8, 1), (16, 1)])
def test_clients_one_after_the_other_have_what_one_has(count: int, together: int) -> None:
    assert rate(clients(count, TOKENS)) == pytest.approx(together, rel=0.05)


def test_who_begins_when_others_are_done_does_not_leave_nothing_to_count() -> None:
    late = [*clients(16, 0)[:-1], [TOKENS + at for at in range(TOKENS)]]
    assert rate(late) == pytest.approx(15)
