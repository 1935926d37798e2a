"""How much goes into a line at once, by how fast it is seen to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.links.write_size import (
    AMID_S,
    GENTLE_S,
    LEAST_BYTES,
    MOMENT_S,
    OPENING_WRITES,
    Amid,
    DrainRate,
    part_bytes,
)

MOST = 1 << 18
FULL_BYTES = 1 << 16
STEP_BYTES = 2304


@given(st.floats(1.0, 1e12))
def test_a_part_passes_in_a_moment_unless_it_would_be_too_small(bytes_per_s: float) -> None:
    part = part_bytes(bytes_per_s, MOST)
    assert LEAST_BYTES <= part <= MOST
    assert part in (LEAST_BYTES, MOST) or MOMENT_S / 2 < part / bytes_per_s <= MOMENT_S


def test_a_line_of_which_nothing_is_known_is_taken_for_fast() -> None:
    rate = DrainRate()
    rate.note(FULL_BYTES, 1.0, is_full=True)
    assert rate.bytes_per_s is None
    assert part_bytes(rate.bytes_per_s, MOST) == MOST


@given(st.floats(1e4, 1e10), st.lists(st.integers(1, FULL_BYTES), min_size=2, max_size=50))
def test_a_socket_that_is_always_full_says_how_fast_it_is(bytes_per_s: float, taken: list[int]) -> None:
    rate, now_s = DrainRate(), 0.0
    for size_bytes in taken:
        rate.note(size_bytes, now_s := now_s + size_bytes / bytes_per_s, is_full=True)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s)


def test_what_was_written_after_it_was_writable_counts_until_it_is_full_again() -> None:
    rate = DrainRate()
    rate.note(FULL_BYTES, 0.0, is_full=True)
    rate.note(10_000, 0.010, is_full=False)
    rate.note(20_000, 0.011, is_full=False)
    rate.note(10_000, 0.012, is_full=True)
    assert rate.bytes_per_s == pytest.approx(40_000 / 0.012)


def test_a_pause_of_the_sender_says_nothing_about_the_line() -> None:
    rate = DrainRate()
    for at_ms in range(100):
        rate.note(10_000, at_ms / 1000, is_full=True)
    rate.note(10_000, 0.1, is_full=False)
    rate.note(FULL_BYTES, 60.0, is_full=True)
    assert rate.bytes_per_s == pytest.approx(1e7)


def test_a_line_that_becomes_slow_is_known_to_be_so_within_some_tenths_of_a_second() -> None:
    rate, now_s = DrainRate(), 0.0
    for _ in range(1000):
        rate.note(FULL_BYTES, now_s := now_s + FULL_BYTES / 1e9, is_full=True)
    began_s = now_s
    while part_bytes(rate.bytes_per_s, MOST) > part_bytes(2e7, MOST):
        rate.note(FULL_BYTES, now_s := now_s + FULL_BYTES / 1e7, is_full=True)
    assert now_s - began_s < 0.5


def test_a_bulk_goes_gently_for_a_while_after_something_small_amid_it() -> None:
    amid = Amid()
    assert not amid.note(FULL_BYTES, 0, 0.0)
    assert not amid.note(STEP_BYTES, OPENING_WRITES, 0.1), "what is small never waits"
    assert amid.note(FULL_BYTES, 0, 0.1)
    assert amid.note(FULL_BYTES, 0, 0.1 + 0.99 * GENTLE_S)
    assert not amid.note(FULL_BYTES, 0, 0.1 + GENTLE_S)


def test_a_bulk_that_nothing_small_came_amid_goes_at_once() -> None:
    amid = Amid()
    amid.note(STEP_BYTES, OPENING_WRITES, 0.0)
    assert not amid.note(FULL_BYTES, 0, 0.0), "before it"
    amid.note(STEP_BYTES, OPENING_WRITES, AMID_S)
    assert not amid.note(FULL_BYTES, 0, AMID_S), "when the one before was over"


def test_messages_of_16_kib_with_their_headers_are_no_bulk() -> None:
    amid = Amid()
    amid.note((16 << 10) + 200, OPENING_WRITES, 0.0)
    amid.note(STEP_BYTES, OPENING_WRITES, 0.1)
    assert not amid.note(FULL_BYTES, 0, 0.2)


def test_what_opens_a_stream_amid_a_bulk_is_no_conversation() -> None:
    amid = Amid()
    for writes in range(OPENING_WRITES):
        amid.note(FULL_BYTES, 0, 0.0)
        amid.note(STEP_BYTES, writes, 0.0)
        assert not amid.note(FULL_BYTES, 0, 0.0)


WRITES = st.lists(
    st.tuples(st.integers(1, 2 * FULL_BYTES), st.integers(0, 2 * OPENING_WRITES), st.floats(0, AMID_S), st.booleans())
)


@given(WRITES)
def test_writes_that_need_no_note_change_nothing(writes: list[tuple[int, int, float, bool]]) -> None:
    rate, amid, all_rates, all_amid, now_s = DrainRate(), Amid(), DrainRate(), Amid(), 0.0
    for size_bytes, before, pause_s, is_full in writes:
        now_s += pause_s
        all_rates.note(size_bytes, now_s, is_full=is_full)
        if is_full or rate.is_counting:
            rate.note(size_bytes, now_s, is_full=is_full)
        assert rate.bytes_per_s == all_rates.bytes_per_s
        is_gentle = amid.counts(size_bytes) and amid.note(size_bytes, before, now_s)
        assert is_gentle == all_amid.note(size_bytes, before, now_s)
