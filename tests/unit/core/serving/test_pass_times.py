"""How passes are cut into parts by the times of earlier ones."""

from __future__ import annotations

import pytest

from llmnode.core.operations import Backward, Evaluate
from llmnode.core.serving.pass_times import PassTimes
from llmnode.core.span import Span

BLOCK_S, MOST = 0.001, 256
"""The time of a position in a block, and the positions that go together at most."""


def evaluate(*lengths: int) -> Evaluate:
    return Evaluate(Span(0, 4), lengths, b"")


def backward(*lengths: int) -> Backward:
    return Backward(Span(0, 4), lengths, b"", b"")


@pytest.fixture
def times() -> PassTimes:
    made = PassTimes()
    made.note([backward(16), backward(24, 24)], BLOCK_S * 64 * 4)
    return made


def test_passes_go_block_by_block_until_their_time_is_known() -> None:
    times = PassTimes()
    assert times.blocks(Backward, 100, 15, 0.5) == 1
    assert times.positions(Backward, MOST, 15, 0.5) == MOST
    times.note([evaluate(100)], 1.0)
    assert times.blocks(Backward, 100, 15, 0.5) == 1, "a forward says nothing of a backward"
    times.note([backward(31)], 1.0)
    assert times.blocks(Backward, 100, 15, 0.5) == 1, "few positions say nothing of many"


def test_a_part_has_the_blocks_that_there_is_time_for(times: PassTimes) -> None:
    assert times.blocks(Backward, 100, 15, None) == 1
    assert times.blocks(Backward, 100, 15, 0.5) == 5
    assert times.blocks(Backward, 100, 15, 0.01) == 1
    assert times.blocks(Backward, 1, 15, 0.064) == 2, "one position takes the time of 32"


def test_a_part_takes_somewhat_longer_if_it_then_goes_through_all_blocks(times: PassTimes) -> None:
    assert times.blocks(Backward, 100, 15, 1.01) == 15
    assert times.blocks(Backward, 100, 15, 0.99) == 9
    assert times.blocks(Backward, 100, 3, 10.0) == 3


def test_a_backward_has_the_positions_that_go_through_all_blocks_in_time(times: PassTimes) -> None:
    assert times.positions(Backward, MOST, 4, 0.5) == 125
    assert times.positions(Backward, MOST, 1, 0.5) == MOST
    assert times.positions(Backward, MOST, 15, 0.5) == MOST, "33 at a time would be slow"
    assert times.positions(Backward, MOST, 4, None) == MOST
    times.note([evaluate(100)], BLOCK_S * 100 * 4)
    assert times.positions(Evaluate, MOST, 4, 0.5) == MOST, "a forward computes blocks once in any case"


def test_the_latest_times_count_most(times: PassTimes) -> None:
    for _ in range(20):
        times.note([backward(64)], 2 * BLOCK_S * 64 * 4)
    assert times.positions(Backward, MOST, 2, 0.5) == 125
