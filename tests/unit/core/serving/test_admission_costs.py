"""The cost of an OPEN for a server, counted in calls: hardly more with thousands of sessions than with some."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode.core.policy import AdmissionPolicy
from unit.calls import calls_counted
from unit.core.serving.claims import a_full_server, claim, name

if TYPE_CHECKING:
    from llmnode.core.ids import SessionId


@pytest.mark.parametrize("clients", [1, 20])
def test_a_refused_open_costs_little_however_many_sessions_there_are(clients: int) -> None:
    """A client may send them in a loop, each for another number of positions. One group or many may do so."""
    sessions, opens, now_s = 4000, 1000, 5.0
    policy = AdmissionPolicy(most_waiting_per_client=32 // clients, most_waiting=64)
    queue = a_full_server(sessions, policy)
    for number in range(32 // clients * clients):
        queue.add(name(sessions + number), claim(1, client=100 + number % clients), now_s)
    spread_s: set[float] = set()
    with calls_counted() as calls:
        for number in range(opens):
            now_s += 0.001
            asked = claim(1 + number % 50, client=100 + number % clients)
            assert queue.place_for(asked) == (False, None)
            spread_s.add(queue.retry_after_s(asked, now_s))
            queue.remove(name(9999), now_s)
            assert not queue.admit(now_s)
    assert calls[0] / opens < sessions, "less than a look at each session"
    assert all(policy.least_retry_s <= each <= policy.longest_retry_s for each in spread_s)


@pytest.mark.parametrize("clients", [1, 20])
def test_an_open_that_waits_in_vain_costs_as_much_with_thousands_of_sessions_as_with_some(clients: int) -> None:
    """One that comes in and goes, too, though others leave and grow meanwhile."""
    calls_of = {sessions: calls_of_opens(sessions, clients) for sessions in (400, 4000)}
    assert calls_of[4000] <= calls_of[400] * 1.05 + 5
    assert calls_of[4000] < 400


def calls_of_opens(sessions: int, clients: int) -> float:
    """Those of one OPEN, in the mean of some."""
    opens, now_s = 500, 5.0
    queue = a_full_server(sessions, AdmissionPolicy(stays_kept=1))
    with calls_counted() as calls:
        for number in range(opens):
            now_s += 0.001
            asked = claim(5, client=100 + number % clients)
            assert queue.place_for(asked) == (True, None)
            queue.add(name(sessions + number), asked, now_s)
            assert not queue.admit(now_s)
            if number % 4 == 0:  # one of those that are here ends
                here = name(number % sessions)
                queue.end(here)
                queue.remove(here, now_s)
                assert not queue.admit(now_s)
                queue.add(here, claim(1, client=number % 40), now_s)
                assert queue.admit(now_s) == [here]
            assert queue.kept == 0 and queue.free == 0
            assert queue.retry_after_s(asked, now_s, forecasts=False)
            queue.end(name(sessions + number))
            queue.remove(name(sessions + number), now_s)
            assert not queue.admit(now_s)
    return calls[0] / opens


@pytest.mark.parametrize("clients", [1, 60])
def test_sessions_that_wait_in_vain_cost_little_at_each_look(clients: int) -> None:
    """Nobody may be moved for them: those that are here have not had their KV for long."""
    sessions, policy = 4000, AdmissionPolicy()
    queue = a_full_server(sessions, policy)
    now_s = policy.keeps_s / 2
    for number in range(sessions):
        queue.use(name(number), now_s, ends=False)
    for number in range(60):
        queue.add(name(sessions + number), claim(50, client=100 + number % clients), now_s)
    with calls_counted() as calls:
        for _ in range(10):
            assert not queue.choose_moves(now_s)
    assert calls[0] / 10 < 10 * sessions, "a few looks at each session, however many wait"


def test_each_that_waits_has_its_look_though_those_before_it_wait_in_vain() -> None:
    """Those before it ask for too much. It came last, of a peer that holds nothing."""
    policy = AdmissionPolicy(tried_per_look=4, first_positions=1)
    queue, now_s = a_full_server(100, policy), 1000.0
    for number in range(30):
        queue.add(name(1000 + number), replace(claim(90, client=1000 + number), at_once=90), now_s)
    queue.add(name(2000), claim(1, client=2000), now_s)
    moved: list[SessionId] = []
    for _ in range(30 // policy.tried_per_look + 1):
        assert not moved
        moved += queue.choose_moves(now_s)
    assert len(moved) == 1


def test_a_flood_of_refused_opens_leaves_other_groups_their_forecasts() -> None:
    queue = a_full_server(40, policy := AdmissionPolicy(stays_kept=1))
    queue.remove(name(0), 1000.0)  # a stay that lasted very long
    queue.add(name(50), claim(1, client=0), 1000.0)
    queue.admit(1000.0)
    for number in (*range(1, 40), 50):
        queue.use(name(number), 1000.0, ends=True)
    told_s = [queue.retry_after_s(claim(1, client=100), 1000.0) for _ in range(100)]
    assert told_s[0] == policy.idle_s, "then one may be moved"
    assert told_s[-1] > policy.idle_s, "it is told when sessions end"
    assert queue.retry_after_s(claim(1, client=101), 1000.0) == policy.idle_s
