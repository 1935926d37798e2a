"""When packing pays: how a receiver finds out how fast a link is, and what its sender makes of it. Values alone."""

from __future__ import annotations

import pytest

from llmnode.core.links.packing import ArrivalRate, PackChoice
from llmnode.core.policy import PackPolicy

POLICY = PackPolicy()
MB = 1_000_000
FP32, BF16 = 4, 2
CHUNK_BYTES = 1_179_648  # 512 positions of SmolLM2 in fp32


def arrive(rate: ArrivalRate, frame_bytes: int, bytes_per_s: float, start_s: float = 0.0, part: int = 50_000) -> float:
    """One frame, in parts; returns when it is there."""
    now_s, rest = start_s, frame_bytes
    while rest:
        came = min(part, rest)
        rest -= came
        now_s += came / bytes_per_s
        rate.note(came, now_s, inside=rest > 0)
    return now_s


def informed(bytes_per_s: float | None, size_bytes: int = CHUNK_BYTES) -> PackChoice:
    """Packing saves 15 % and costs 2 ns a byte; unpacking 1."""
    choice = PackChoice(POLICY)
    choice.bytes_per_s = bytes_per_s
    choice.note(FP32, size_bytes, 100_000, 85_000, took_s=2e-4)
    choice.note_unpacked(100_000, took_s=1e-4)
    return choice


@pytest.mark.parametrize("bytes_per_s", [1e5, 1e6, 1e7, 1e9])
def test_a_large_frame_tells_the_rate_of_its_link(bytes_per_s: float) -> None:
    rate = ArrivalRate(POLICY)
    arrive(rate, 20 * POLICY.rate_bytes, bytes_per_s)
    assert rate.bytes_per_s == pytest.approx(bytes_per_s)


def test_pauses_between_frames_do_not_count() -> None:
    rate, now_s = ArrivalRate(POLICY), 0.0
    for _ in range(10):
        now_s = arrive(rate, 3 * POLICY.rate_bytes, MB, now_s) + 60
    assert rate.bytes_per_s == pytest.approx(MB)


def test_small_frames_tell_nothing() -> None:
    rate, now_s = ArrivalRate(POLICY), 0.0
    for size_bytes in (1, 2304, POLICY.rate_bytes // 2, POLICY.rate_bytes - 1):
        now_s = arrive(rate, size_bytes, MB, now_s, part=1000)
    assert rate.bytes_per_s is None and not rate.has_news and rate.tell_kilobytes_per_s() == 0


def test_frames_that_come_without_a_break_tell_the_rate_though_none_ends_with_a_part() -> None:
    rate = ArrivalRate(POLICY)
    for number in range(1, 100):
        rate.note(10_000, number / 100, inside=True)
    assert rate.bytes_per_s == pytest.approx(MB)


def test_parts_that_come_at_one_time_do_not_make_a_link_infinitely_fast() -> None:
    rate = ArrivalRate(POLICY)
    for _ in range(20):
        rate.note(POLICY.rate_bytes, 5.0, inside=True)
    assert rate.bytes_per_s is None
    rate.note(POLICY.rate_bytes, 6.0, inside=False)
    assert rate.bytes_per_s == 20 * POLICY.rate_bytes


def test_a_link_that_becomes_slow_is_known_to_be_within_megabytes_and_one_that_becomes_fast_too() -> None:
    rate = ArrivalRate(POLICY)
    now_s = arrive(rate, 100 * MB, 1000 * MB)
    now_s = arrive(rate, 3 * MB, MB, now_s)
    assert rate.bytes_per_s is not None and 1 * MB < rate.bytes_per_s < 1.5 * MB
    arrive(rate, 20 * MB, 1000 * MB, now_s)
    assert rate.bytes_per_s > 500 * MB


def test_a_receiver_that_pauses_once_makes_no_fast_link_slow() -> None:
    rate = ArrivalRate(POLICY)
    now_s = arrive(rate, 10 * MB, 500 * MB)
    rate.note(100, now_s, inside=True)
    rate.note(MB, now_s + 0.02, inside=False)
    assert rate.bytes_per_s is not None and rate.bytes_per_s > 100 * MB


def test_a_sender_is_told_at_first_and_of_changes() -> None:
    rate = ArrivalRate(POLICY)
    now_s = arrive(rate, MB, MB)
    assert rate.has_news
    assert rate.tell_kilobytes_per_s() == 1000
    now_s = arrive(rate, MB, 1.1 * MB, now_s)
    assert not rate.has_news
    arrive(rate, 9 * MB, 2 * MB, now_s)
    assert rate.has_news


def test_the_slowest_and_the_fastest_link_can_be_told() -> None:
    for bytes_per_s, told in ((1.0, 1), (1e18, 2**32 - 1)):
        rate = ArrivalRate(POLICY)
        arrive(rate, MB, bytes_per_s)
        assert rate.tell_kilobytes_per_s() == told


@pytest.mark.parametrize(("bytes_per_s", "pays"), [(1 * MB, True), (10 * MB, True), (100 * MB, False), (1e9, False)])
def test_packing_pays_on_slow_links_alone(bytes_per_s: float, pays: bool) -> None:
    # It saves 0.15 bytes and costs 3 ns of a byte: both are the same at 50 MB/s, three times it saves at 17.
    assert informed(bytes_per_s).pays(FP32, CHUNK_BYTES) is pays


def test_packing_is_on_from_exactly_the_rate_at_which_it_saves_so_many_times_its_cost() -> None:
    worth = 0.15 / 3e-9 / POLICY.margin
    assert informed(0.99 * worth).pays(FP32, CHUNK_BYTES)
    assert not informed(1.01 * worth).pays(FP32, CHUNK_BYTES)


def test_on_a_link_of_unknown_rate_nothing_is_packed_or_tried() -> None:
    choice = informed(None)
    assert not any(choice.wants_sample(FP32, CHUNK_BYTES) for _ in range(1000))
    assert not choice.pays(FP32, CHUNK_BYTES)


@pytest.mark.parametrize(("value_bytes", "size_bytes"), [(0, CHUNK_BYTES), (FP32, POLICY.least_bytes - 1), (FP32, 0)])
def test_what_is_no_numbers_or_too_few_is_never_tried(value_bytes: int, size_bytes: int) -> None:
    choice = informed(1.0)
    assert not any(choice.wants_sample(value_bytes, size_bytes) for _ in range(1000))


def test_what_is_not_known_is_tried_once_and_then_now_and_then() -> None:
    choice = PackChoice(POLICY)
    choice.bytes_per_s = 1e9
    tried = []
    for number in range(3 * POLICY.sample_every):
        if choice.wants_sample(FP32, CHUNK_BYTES):
            tried.append(number)
            choice.note(FP32, CHUNK_BYTES, 64 << 10, 60_000, took_s=1e-4)
        assert not choice.pays(FP32, CHUNK_BYTES)
    assert tried == [0, POLICY.sample_every, 2 * POLICY.sample_every]


def test_while_it_pays_it_is_not_tried_beside() -> None:
    choice = informed(MB)
    for _ in range(3 * POLICY.sample_every):
        assert not choice.wants_sample(FP32, CHUNK_BYTES)
        assert choice.pays(FP32, CHUNK_BYTES)
        choice.note(FP32, CHUNK_BYTES, CHUNK_BYTES, int(0.85 * CHUNK_BYTES), took_s=2e-9 * CHUNK_BYTES)


def test_kinds_and_sizes_are_judged_apart() -> None:
    choice = informed(MB)
    assert choice.pays(FP32, CHUNK_BYTES)
    assert not choice.pays(BF16, CHUNK_BYTES) and choice.wants_sample(BF16, CHUNK_BYTES)
    assert not choice.pays(FP32, 2304) and choice.wants_sample(FP32, 2304)
    choice.note(FP32, 2304, 2304, 2000, took_s=1e-3)  # a small payload has the costs of a call
    assert not choice.pays(FP32, 2304)
    assert choice.pays(FP32, CHUNK_BYTES)


def test_what_stops_to_gain_is_given_up() -> None:
    choice = informed(MB)
    for _ in range(20):
        choice.note(FP32, CHUNK_BYTES, CHUNK_BYTES, CHUNK_BYTES + 6, took_s=2e-9 * CHUNK_BYTES)
    assert not choice.pays(FP32, CHUNK_BYTES)


def test_a_call_that_took_long_once_does_not_end_packing_but_calls_that_always_do_end_it() -> None:
    choice = informed(MB)
    choice.note(FP32, CHUNK_BYTES, 100_000, 85_000, took_s=1.0)
    assert choice.pays(FP32, CHUNK_BYTES)
    for _ in range(30):
        choice.note(FP32, CHUNK_BYTES, 100_000, 85_000, took_s=1.0)
    assert not choice.pays(FP32, CHUNK_BYTES)
    choice.note(FP32, CHUNK_BYTES, 100_000, 85_000, took_s=2e-4)
    assert choice.pays(FP32, CHUNK_BYTES)


def test_until_something_is_unpacked_here_it_counts_like_packing() -> None:
    choice = PackChoice(POLICY)
    choice.note(FP32, CHUNK_BYTES, 100_000, 85_000, took_s=2e-4)
    worth = 0.15 / 4e-9 / POLICY.margin
    choice.bytes_per_s = 1.01 * worth
    assert not choice.pays(FP32, CHUNK_BYTES)
    choice.note_unpacked(CHUNK_BYTES, took_s=1e-9 * CHUNK_BYTES)
    assert choice.pays(FP32, CHUNK_BYTES)
