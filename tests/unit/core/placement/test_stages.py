"""Layouts of a whole cluster: the same in any order of the machines, within their limits, and few hops if wanted."""

from __future__ import annotations

import math
import random
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from llmnode.core.errors import ConfigError
from llmnode.core.ids import PeerId
from llmnode.core.placement.servers import PlacedServer, most_throughput, one_speed, shared_speed, throughput
from llmnode.core.placement.stages import best_of, fewest_hops, layouts
from llmnode.core.span import Span

BLOCKS = 8


@st.composite
def clusters(draw: st.DrawFn) -> list[PlacedServer]:
    machines = []
    for number in range(draw(st.integers(1, 8))):
        most = draw(st.integers(1, 6))
        start = draw(st.integers(0, BLOCKS - 1))
        end = draw(st.integers(start + 1, min(BLOCKS, start + most)))
        speeds = draw(st.sampled_from([one_speed, shared_speed]))(float(draw(st.integers(1, 50))), most)
        machines.append(
            PlacedServer(PeerId(f"{number:02}"), Span(start, end), speeds, movable=draw(st.integers(0, 3)) > 0)
        )
    return machines


@given(clusters(), st.randoms(use_true_random=False))
@settings(max_examples=20, deadline=None)
def test_every_layout_is_within_the_limits_of_its_machines_in_any_order(
    machines: list[PlacedServer], rng: random.Random
) -> None:
    shuffled = [*machines]
    rng.shuffle(shuffled)
    bound, given_spans = most_throughput(BLOCKS, machines), {each.peer: each.span for each in machines}
    for layout, other in zip(islice(layouts(BLOCKS, machines), 20), islice(layouts(BLOCKS, shuffled), 20), strict=True):
        assert layout == other
        assert [each.peer for each in layout] == [each.peer for each in machines]
        assert all(each.span.end <= BLOCKS and len(each.span) <= len(each.speeds) for each in layout)
        assert all(each.movable or each.span == given_spans[each.peer] for each in layout)
        assert throughput(BLOCKS, layout) <= bound + 1e-6


def equal(number: int, most: int) -> list[PlacedServer]:
    return [PlacedServer(PeerId(str(each)), Span(0, 1), shared_speed(60.0, most)) for each in range(number)]


def test_equal_machines_share_the_blocks_evenly() -> None:
    best = best_of(BLOCKS, layouts(BLOCKS, equal(8, 4)))
    assert throughput(BLOCKS, best) == most_throughput(BLOCKS, best) == 60.0


def test_no_start_is_improved_if_one_comes_near_the_bound() -> None:
    """The stages of one to eight blocks, and the paper's rule for all: these are all starts."""
    assert len([*layouts(BLOCKS, equal(8, 8))]) == 9


def test_a_session_needs_no_more_hops_than_wanted() -> None:
    slower_if_longer = tuple(60.0 / length**1.2 for length in range(1, 9))
    machines = [PlacedServer(PeerId(str(each)), Span(0, 1), slower_if_longer) for each in range(4)]
    fastest = best_of(BLOCKS, layouts(BLOCKS, machines))
    short = best_of(BLOCKS, layouts(BLOCKS, machines), most_hops=2)
    assert fewest_hops(BLOCKS, short) <= 2 < fewest_hops(BLOCKS, fastest)
    assert 0.0 < throughput(BLOCKS, short) < throughput(BLOCKS, fastest)
    with pytest.raises(ConfigError, match="need 2 hops at least, and 1 may be used"):
        best_of(BLOCKS, layouts(BLOCKS, equal(8, 4)), most_hops=1)


def test_machines_that_cannot_hold_the_model_have_no_layout() -> None:
    with pytest.raises(ConfigError, match="hold too few blocks"):
        best_of(BLOCKS, layouts(BLOCKS, equal(3, 2)))


def test_the_fewest_hops_use_the_spans_that_reach_furthest() -> None:
    spans = [Span(0, 2), Span(0, 4), Span(2, 6), Span(3, 5), Span(6, 8)]
    placed = [PlacedServer(PeerId(str(each)), span, one_speed(1.0, 8)) for each, span in enumerate(spans)]
    assert fewest_hops(BLOCKS, placed) == 3
    assert fewest_hops(BLOCKS, placed[:4]) == math.inf


def test_a_worth_that_knows_links_chooses_another_layout() -> None:
    """The layout with the most throughput is worth nothing, so the next one is taken."""
    machines = equal(6, 4)
    fastest = best_of(BLOCKS, layouts(BLOCKS, machines))
    other = best_of(
        BLOCKS,
        layouts(BLOCKS, machines),
        lambda layout: 0.0 if layout == fastest else throughput(BLOCKS, layout),
    )
    assert other != fastest
    assert 0.0 < throughput(BLOCKS, other) <= throughput(BLOCKS, fastest)
