"""Placement: `choose_span` against the paper's rule written out, and what a view makes of announcements."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Offer, PeerState
from llmnode.core.model import Precision, Profile
from llmnode.core.serving.placement import block_speeds, choose_span, counted
from llmnode.core.span import Span
from llmnode.errors import ConfigError

BLOCKS = 10
held = st.lists(
    st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS), st.integers(1, 9)).map(
        lambda each: (Span(each[0], each[0] + each[1]), float(each[2]))
    ),
    max_size=5,
)


@given(held, st.integers(1, BLOCKS))
def test_no_window_is_slower_than_the_one_chosen(swarm: list[tuple[Span, float]], length: int) -> None:
    speeds = block_speeds(BLOCKS, swarm)
    chosen = choose_span(BLOCKS, length, swarm)
    assert len(chosen) == length
    assert chosen.end <= BLOCKS
    windows = [sorted(speeds[start : start + length]) for start in range(BLOCKS - length + 1)]
    assert sorted(speeds[chosen.start : chosen.end]) == min(windows)


@given(held, st.integers(1, BLOCKS))
def test_a_hole_that_fits_is_filled(swarm: list[tuple[Span, float]], length: int) -> None:
    speeds = block_speeds(BLOCKS, swarm)
    if length == 1 and 0.0 in speeds:
        assert speeds[choose_span(BLOCKS, length, swarm).start] == 0.0


def test_servers_that_come_one_after_the_other_cover_the_model() -> None:
    swarm: list[tuple[Span, float]] = []
    for _server in range(5):
        swarm.append((choose_span(BLOCKS, 2, swarm), 1.0))
    assert sorted(span for span, _speed in swarm) == [Span(start, start + 2) for start in range(0, BLOCKS, 2)]


@pytest.mark.parametrize("length", [0, 11])
def test_a_number_of_blocks_that_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="the model has 10"):
        choose_span(BLOCKS, length, [])


def offer(span: Span, state: PeerState, block_us: int) -> Offer:
    profile = Profile(b"d" * 32, Precision())
    return Offer("model", profile, BLOCKS, span, state, block_us, kv_tokens=9, kv_tokens_free=9)


def test_one_that_only_says_that_it_joins_counts_for_a_while_and_at_the_usual_speed() -> None:
    serving = [(offer(Span(0, 5), PeerState.ONLINE, block_us), 1.0) for block_us in (100, 200, 400)]
    joining = offer(Span(5, 10), PeerState.JOINING, 1)
    usual = serving[1][0].speed_tokens_per_s
    assert counted([*serving, (joining, 599.0)], 600.0)[-1] == (Span(5, 10), usual)
    assert len(counted([*serving, (joining, 600.0)], 600.0)) == len(serving)
    assert choose_span(BLOCKS, 5, counted([*serving, (joining, 600.0)], 600.0)) == Span(5, 10), "the hole is filled"
    assert counted([(joining, 0.0)], 600.0) == [(Span(5, 10), 1.0)]


@pytest.mark.parametrize("state", [PeerState.DRAINING, PeerState.LEFT, PeerState.UNKNOWN])
def test_one_that_will_not_serve_does_not_count(state: PeerState) -> None:
    assert counted([(offer(Span(0, 5), state, 100), 1.0)], 600.0) == []
