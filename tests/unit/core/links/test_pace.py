"""A frame that has begun keeps a pace: a burst buys one more grace, and so does our own slowness, and no more."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.links.pace import LinkPaces, Pace
from llmnode.core.policy import LinkPolicy

POLICY = LinkPolicy()
GRACE_S, RATE, LOOK_S = POLICY.pace_grace_s, int(POLICY.pace_bytes_per_s), POLICY.heartbeat_s
MIB = 1 << 20
LONG_S = 7200
GAP_S = 2 * LOOK_S


def _lasts_s(moved: list[int], paused_s: float = 0.0, pace: Pace | None = None) -> float | None:
    """The time after which a thing is too slow, with the bytes that it has moved at each look; None: it never is."""
    pace = pace or Pace(GRACE_S, RATE, GAP_S)
    for look, bytes_in_all in enumerate(moved):
        now_s = look * LOOK_S
        pace.note(1, bytes_in_all, now_s, now_s * paused_s)
        if pace.is_too_slow():
            return now_s
    return None


@pytest.mark.parametrize(("burst", "graces"), [(0, 1), (100, 1), (MIB, 2), (63 * MIB, 2)])
def test_a_burst_buys_no_more_than_one_more_grace(burst: int, graces: int) -> None:
    lasts_s = _lasts_s([0] + [burst] * LONG_S)
    assert lasts_s is not None and graces * GRACE_S < lasts_s <= graces * GRACE_S + 2 * LOOK_S < 60


def test_what_was_fast_may_stand_still_for_15_s() -> None:
    """TCP shares a slow uplink unfairly among the connections of a client."""
    fast, still = [int(2 * RATE * LOOK_S)] * 10, [0] * int(15 / LOOK_S)
    assert _lasts_s(list(accumulate((fast + still) * 20))) is None


@pytest.mark.parametrize("every", [1, 2, 4])
def test_what_keeps_the_pace_may_take_as_long_as_it_needs(every: int) -> None:
    """Also if its bytes come in parts of 8 s, as pieces of frames do."""
    steps = [RATE * LOOK_S * every * (look // every) for look in range(LONG_S)]
    assert _lasts_s([int(each) for each in steps]) is None


def test_half_of_the_pace_is_too_slow_even_after_an_hour_at_twice_of_it() -> None:
    fast = [int(2 * RATE * LOOK_S)] * 1800
    slow = [int(RATE * LOOK_S / 2)] * 1800
    assert _lasts_s(list(accumulate(fast))) is None
    lasts_s = _lasts_s(list(accumulate(fast + slow)))
    assert lasts_s is not None and lasts_s <= 3600 + 2 * 2 * GRACE_S + 2 * LOOK_S


def test_the_time_in_which_we_do_not_read_is_excused_once() -> None:
    lasts_s = _lasts_s([MIB] * LONG_S, paused_s=1.0)
    assert lasts_s is not None and 2 * GRACE_S < lasts_s <= 2 * GRACE_S + 2 * LOOK_S


def test_each_thing_has_a_grace_of_its_own() -> None:
    pace = Pace(GRACE_S, RATE, GAP_S)
    for number in range(1000):
        pace.note(number, 0, number * GRACE_S)
        assert not pace.is_too_slow()
    pace.note(None, 0, 2000 * GRACE_S)
    assert not pace.is_too_slow()


def test_a_machine_that_was_suspended_reads_on() -> None:
    pace = Pace(GRACE_S, RATE, GAP_S)
    pace.note(1, 100, 0.0)
    pace.note(1, 100, 3600.0)
    assert not pace.is_too_slow(), "what has come meanwhile is read now"
    for look in range(1, int(GRACE_S / LOOK_S)):
        pace.note(1, 100, 3600.0 + look * LOOK_S)
    assert pace.is_too_slow()


def test_a_thing_that_is_behind_already_is_not_given_up_for_a_stall_of_ours() -> None:
    pace, before_s = Pace(GRACE_S, RATE, GAP_S), int(0.5 * GRACE_S)
    for now_s in range(before_s + 1):
        pace.note(1, 0, now_s)
    pace.note(1, 0, before_s + GRACE_S)
    assert not pace.is_too_slow(), "what has come meanwhile is read now"
    pace.note(1, int(3 * RATE), before_s + GRACE_S + 1)
    assert not pace.is_too_slow()


LOOKS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 64)), min_size=1, max_size=40)


@given(LOOKS)
def test_since_no_moment_may_it_have_moved_less_than_its_rate_beyond_the_grace(looks: list[tuple[int, int]]) -> None:
    """Beyond one since it began, and two since any other moment. A gap between looks counts as GAP_S at most.

    Times are quarters of a second, and amounts quarters of what moves in a second: all sums are exact.
    """
    pace, seen, clock_s = Pace(GRACE_S, RATE, GAP_S), [(0.0, 0)], 0.0
    pace.note(1, 0, 0.0)
    for quarters, parts in looks:
        clock_s += quarters / 4
        now_s, moved_bytes = seen[-1][0] + min(quarters / 4, GAP_S), seen[-1][1] + parts * RATE // 4
        pace.note(1, moved_bytes, clock_s)
        seen.append((now_s, moved_bytes))
        behind_s, *since = [now_s - then_s - (moved_bytes - then_bytes) / RATE for then_s, then_bytes in seen]
        assert pace.is_too_slow() == (behind_s > GRACE_S or max(since) > 2 * GRACE_S)


@given(LOOKS, st.integers(0, 40))
def test_pauses_only_ever_help_and_by_one_grace_at_most(looks: list[tuple[int, int]], paused: int) -> None:
    plain, excused, patient = Pace(GRACE_S, RATE, GAP_S), Pace(GRACE_S, RATE, GAP_S), Pace(2 * GRACE_S, RATE, GAP_S)
    now_s, moved_bytes, paused_s = 0.0, 0, 0.0
    for quarters, parts in [(0, 0), *looks]:
        now_s, moved_bytes = now_s + quarters / 4, moved_bytes + parts * RATE // 4
        paused_s += min(quarters, paused) / 4
        plain.note(1, moved_bytes, now_s)
        excused.note(1, moved_bytes, now_s, paused_s)
        patient.note(1, moved_bytes, now_s)
        assert excused.is_too_slow() <= plain.is_too_slow()
        assert patient.is_too_slow() <= excused.is_too_slow()


def test_a_link_watches_what_arrives_and_what_is_to_be_read() -> None:
    nothing = (None, 0)
    for arriving, leaving in (([(1, MIB), nothing], nothing), ([nothing, (1, MIB)], nothing), ([nothing] * 2, (1, 9))):
        paces = LinkPaces(GRACE_S, RATE, GAP_S)
        for look in range(int(GRACE_S / LOOK_S) + 1):
            assert not paces.are_too_slow(arriving, leaving, look * LOOK_S)
        assert paces.are_too_slow(arriving, leaving, GRACE_S + 1)


def test_a_link_that_does_not_read_keeps_the_frames_waiting_that_arrive_and_no_others() -> None:
    arriving, nothing = [(1, MIB), (None, 0)], (None, 0)
    for leaving, ends in ((nothing, False), ((1, 9), True)):
        paces = LinkPaces(GRACE_S, RATE, GAP_S)
        for look in range(5):
            assert not paces.are_too_slow(arriving, leaving, look * LOOK_S)
            if look == 1:
                paces.pause(2.0)
        paces.resume(8.0)
        paces.are_too_slow(arriving, leaving, GRACE_S)
        assert paces.are_too_slow(arriving, leaving, GRACE_S + 2) == ends
