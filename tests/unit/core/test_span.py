"""Spans: what users write, and how a model is cut."""

from __future__ import annotations

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from llmnode.core.span import Span, parse_span, split_evenly
from llmnode.errors import ConfigError

BLOCKS = 30


@st.composite
def spans(draw: st.DrawFn, blocks: int = BLOCKS) -> Span:
    start = draw(st.integers(0, blocks - 1))
    return Span(start, draw(st.integers(start + 1, blocks)))


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 3), (4, 2), (-1, 2), (-2, -1)])
def test_a_span_is_never_empty_and_never_negative(start: int, end: int) -> None:
    with pytest.raises(ValueError, match="start < end"):
        Span(start, end)


@given(spans())
def test_a_span_has_the_length_of_its_range(span: Span) -> None:
    assert len(span) == len(range(span.start, span.end)) >= 1


@given(spans(), spans())
def test_a_span_covers_another_if_it_has_all_its_blocks(one: Span, other: Span) -> None:
    blocks_of_one, blocks_of_other = range(one.start, one.end), range(other.start, other.end)
    assert one.covers(other) == set(blocks_of_one).issuperset(blocks_of_other)


@given(spans())
def test_what_parses_is_what_was_written(span: Span) -> None:
    assert parse_span(f"{span.start}:{span.end}", BLOCKS) == span


UNREADABLE = [
    "",
    ":",
    "7",
    "0:",
    ":5",
    "a:b",
    "5:5",
    "7:5",
    "-1:5",
    "1:2:3",
    "0-5",
    "0:5.0",
    "1e1:2",
    "0:" + "9" * 5000,
]


@pytest.mark.parametrize("text", UNREADABLE, ids=lambda text: repr(text[:8]))
@pytest.mark.parametrize("blocks", [BLOCKS, None])
def test_a_range_that_cannot_be_read_is_answered_with_one_that_can(text: str, blocks: int | None) -> None:
    with pytest.raises(ConfigError, match=r"--blocks .* write START:END, for example (\d+:\d+)$") as caught:
        parse_span(text, blocks)
    assert len(parse_span(str(caught.value).rpartition(" ")[2], blocks)) > 1


@pytest.mark.parametrize("text", ["0:31", "30:31", "100:200"])
def test_a_range_past_the_last_block_is_answered_with_the_longest_that_is_right(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"--blocks {text} .* it has {BLOCKS}, so at most 0:{BLOCKS}$"):
        parse_span(text, BLOCKS)


def test_a_range_can_be_read_before_the_model_is_known() -> None:
    assert parse_span("100:200") == Span(100, 200)


@given(st.text(max_size=12))
def test_any_text_is_a_span_within_the_model_or_a_config_error(text: str) -> None:
    try:
        span = parse_span(text, BLOCKS)
    except ConfigError:
        return
    assert 0 <= span.start < span.end <= BLOCKS


@given(st.integers(1, 200), st.integers(1, 200))
def test_an_even_split_covers_every_block_once_with_lengths_that_differ_by_one_at_most(blocks: int, parts: int) -> None:
    assume(parts <= blocks)
    cut = split_evenly(blocks, parts)
    assert [block for span in cut for block in range(span.start, span.end)] == list(range(blocks))
    assert len(cut) == parts
    lengths = [len(span) for span in cut]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize("parts", [-1, 0, 31, 1000])
def test_a_split_that_cannot_be_names_those_that_can(parts: int) -> None:
    with pytest.raises(ConfigError, match=f"into {parts} spans: choose 1 to {BLOCKS}$"):
        split_evenly(BLOCKS, parts)
