"""The figure that a server announces: the smaller one of what it computes and what its network carries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.speed import (
    LEAST_FORWARDS,
    PROMPT_POSITIONS,
    SEEN_FASTER,
    SEEN_SLOWER,
    ComputeSpeed,
    ForwardsSeen,
    NetworkSpeed,
    announced_speed,
    believed,
    is_doubtful,
    observed_upload,
    seen,
    throughput,
    usual_rate,
)

ROW_BYTES, BLOCKS = 2304, 5
rates = st.floats(0.01, 1e6)


@given(rates, rates)
def test_the_throughput_is_that_of_the_narrower_one_of_device_and_network(shared: float, rows_per_s: float) -> None:
    compute, network = ComputeSpeed(1.0, shared, 1.0), NetworkSpeed(rows_per_s * ROW_BYTES)
    assert throughput(compute, network, ROW_BYTES) == pytest.approx(min(shared, rows_per_s))


@pytest.mark.parametrize(
    ("compute", "network"),
    [(ComputeSpeed(), NetworkSpeed(1e9)), (ComputeSpeed(9.0, 9.0, 9.0), NetworkSpeed())],
)
def test_without_one_of_the_two_no_throughput_is_announced(compute: ComputeSpeed, network: NetworkSpeed) -> None:
    assert announced_speed(compute, network, BLOCKS, ROW_BYTES, 8).tokens_per_1000_s == 0


def test_what_is_announced_is_in_the_units_of_the_wire_and_names_the_nearest() -> None:
    round_trips = {PeerId(f"peer{ms}"): ms / 1000 for ms in (30, 10, 20)}
    compute = ComputeSpeed(10.0, 40.0, 100.0)
    announced = announced_speed(compute, NetworkSpeed(23_040.0, round_trips), BLOCKS, ROW_BYTES, 2)
    assert announced.tokens_per_s == 10.0
    assert announced.prefill_ns == round(1e9 / 500)
    assert announced.upload_bytes_per_s == 23_000
    assert announced.round_trips_us == (("peer10", 10_000), ("peer20", 20_000))
    assert compute.block_us(BLOCKS) == 20_000


@given(st.floats(1e-9, 1e15), st.floats(1e-9, 1e15))
def test_whatever_is_measured_fits_a_field_and_is_never_taken_for_nothing(rate: float, bytes_per_s: float) -> None:
    compute = ComputeSpeed(rate, rate, rate)
    announced = announced_speed(compute, NetworkSpeed(bytes_per_s), BLOCKS, ROW_BYTES, 8)
    values = (announced.tokens_per_1000_s, announced.prefill_ns, announced.upload_kb_per_s, compute.block_us(BLOCKS))
    assert all(1 <= value < 2**32 for value in values)


def test_what_sessions_take_replaces_the_first_guess_once_there_were_enough() -> None:
    guess = ComputeSpeed(10.0, 30.0, 100.0)
    slower = ForwardsSeen(LEAST_FORWARDS, decode_s=0.2 / BLOCKS, prefill_s=0.02 / BLOCKS)
    assert seen(guess, ForwardsSeen(LEAST_FORWARDS - 1, 0.2 / BLOCKS, 0.02 / BLOCKS), BLOCKS) == guess
    now = seen(guess, slower, BLOCKS)
    assert now.decode_tokens_per_s == pytest.approx(5.0)
    assert now.shared_tokens_per_s == pytest.approx(15.0), "as much slower as one session is"
    assert now.prefill_tokens_per_s == pytest.approx(PROMPT_POSITIONS / (0.2 + PROMPT_POSITIONS * 0.02))
    assert seen(ComputeSpeed(), slower, BLOCKS) == ComputeSpeed(), "nothing was measured"


@given(rates, st.floats(1.01, 100), st.floats(1e-12, 1e3), st.floats(0, 1e3))
def test_what_sessions_take_moves_a_speed_by_a_stated_factor_at_most(
    decode: float, prefills: float, decode_s: float, prefill_s: float
) -> None:
    """Clients that shape their batches have the times of one decode extrapolated to almost nothing."""
    guess = ComputeSpeed(decode, 2 * decode, prefills * decode)
    now = seen(guess, ForwardsSeen(LEAST_FORWARDS, decode_s, prefill_s), BLOCKS)
    for rate, measured in [
        (now.decode_tokens_per_s, guess.decode_tokens_per_s),
        (now.shared_tokens_per_s, guess.shared_tokens_per_s),
        (now.prefill_tokens_per_s, guess.prefill_tokens_per_s),
    ]:
        assert 0.999 / SEEN_SLOWER <= rate / measured <= 1.001 * SEEN_FASTER


def test_prompts_that_a_slow_device_had_no_time_to_measure_are_known_by_those_of_sessions() -> None:
    guess = ComputeSpeed(1.0, 1.0, 1.0)
    now = seen(guess, ForwardsSeen(LEAST_FORWARDS, 1.0 / BLOCKS, 0.01 / BLOCKS), BLOCKS)
    assert now.prefill_tokens_per_s == pytest.approx(PROMPT_POSITIONS / (1.0 + PROMPT_POSITIONS * 0.01))
    shaped = seen(guess, ForwardsSeen(LEAST_FORWARDS, 1e-9, 1e-12), BLOCKS)
    assert shaped.prefill_tokens_per_s <= 1.001 * SEEN_FASTER * PROMPT_POSITIONS


def test_what_sessions_observe_may_only_have_the_machine_measured_again() -> None:
    speeds = [ComputeSpeed(100.0, 100.0, 100.0)] * 2
    doubted = {rate: is_doubtful(speeds, ComputeSpeed(rate, rate, rate)) for rate in (20.0, 80.0, 100.0, 130.0, 400.0)}
    assert doubted == {20.0: True, 80.0: False, 100.0: False, 130.0: False, 400.0: True}


def test_peers_of_one_address_group_cannot_make_a_network_seem_slow() -> None:
    assert usual_rate({"liars": [1.0] * 100, "one": [50.0], "another": [60.0, 5.0]}) == 50.0
    assert usual_rate({"one": [], "other": []}) == usual_rate({}) == 0.0


@pytest.mark.parametrize(
    ("latest", "counts", "is_doubted"),
    [
        ([10], 10, False),
        ([40, 10], 40, False),
        ([20, 40], 40, True),
        ([35, 40], 40, False),
        ([20, 20, 40], 20, False),
        ([20, 40, 40], 40, True),
        ([40, 20, 20], 40, False),
        ([20, 30, 40], 30, True),
        ([20, 40, 20], 20, False),
        ([20, 20, 20, 90, 90], 20, False),
    ],
)
def test_one_slow_figure_changes_nothing_and_a_lasting_slowness_is_believed(
    latest: list[float], counts: float, is_doubted: bool
) -> None:
    speeds = [ComputeSpeed(rate, rate, rate) for rate in latest]
    assert believed(speeds).decode_tokens_per_s == counts
    assert is_doubtful(speeds) is is_doubted


@pytest.mark.parametrize(
    ("told", "upload"),
    [
        ({}, 10.0),
        ({"a": [7.0]}, 10.0),
        ({"a": [15.0]}, 15.0),
        ({"a": [7.0, 2.0], "b": [6.0]}, 7.0),
        ({"a": [1.0], "b": [1.0, 2.0]}, 5.0),
        ({"a": [1e9], "b": [1e9]}, 20.0),
        ({"liars": [1.0] * 100, "b": [12.0]}, 10.0),
    ],
)
def test_the_upload_that_sessions_see_replaces_that_of_the_probes_within_bounds(
    told: dict[str, list[float]], upload: float
) -> None:
    assert observed_upload(10.0, told) == upload
    assert observed_upload(0.0, told) == 0.0
