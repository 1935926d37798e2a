"""Progress messages while blocks are read, on a clock of our own."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.span import Span
from llmnode.models.weights.read_progress import TOLD_EVERY_S, Reading

if TYPE_CHECKING:
    from collections.abc import Sequence

TIMES_S = st.lists(st.integers(0, 5), min_size=1, max_size=40)


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def told(reading_s: Sequence[float], rounding_s: float = 0.0, quant: str = "none") -> list[tuple[float, str]]:
    """When, and what."""
    clock = Clock()
    lines: list[tuple[float, str]] = []
    span = Span(7, 7 + len(reading_s))
    reading = Reading(span, quant, lambda line: lines.append((clock.now_s, line)), clock)
    indices = []
    for index in reading.blocks():
        indices.append(index)
        clock.now_s += reading_s[index - span.start]
        if rounding_s:
            with reading.rounding():
                clock.now_s += rounding_s
    assert indices == [*range(span.start, span.end)]
    return lines


def test_it_is_said_how_many_blocks_are_read_and_how_long_they_took() -> None:
    assert told([1.0] * 5) == [(2.0, "read 2 of 5 blocks in 2 s"), (4.0, "read 4 of 5 blocks in 4 s")]
    assert told([30.0, 1.0]) == [(30.0, "read 1 of 2 blocks in 30 s")]


def test_it_is_said_what_quantizing_takes() -> None:
    assert told([1.0] * 2, 3.0, "nf4") == [
        (4.0, "read 1 of 2 blocks in 4 s, 3 s of it rounding to nf4"),
        (8.0, "read 2 of 2 blocks in 8 s, 6 s of it rounding to nf4"),
    ]


def test_of_a_fast_load_nothing_is_said() -> None:
    assert told([0.0] * 40) == told([TOLD_EVERY_S / 41] * 40) == []


@given(TIMES_S)
def test_lines_are_never_closer_to_each_other_and_none_is_missing(reading_s: list[int]) -> None:
    times_s = [0.0, *(at for at, _ in told(reading_s)), float(sum(reading_s))]
    between = [later - sooner for sooner, later in pairwise(times_s)]
    assert all(each >= TOLD_EVERY_S for each in between[:-1])
    assert between[-1] < TOLD_EVERY_S
    assert all(each < 2 * TOLD_EVERY_S + max(reading_s) for each in between)
