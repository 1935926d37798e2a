"""The zero-shot task of `tests/bench/run quality`."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from bench.quality.words import count_right, words_of

TEXTS = ["The", " quick", " bro", "wn", " fox", ",", " jumps", "\n", "over", " it", " 3", " times", "."]


def test_words_begin_with_a_space_have_letters_alone_and_end_within_the_text() -> None:
    assert ["".join(TEXTS[place] for place in word) for word in words_of(TEXTS, 0)] == [
        " quick",
        " brown",
        " fox",
        " jumps",
        " it",
        " times",
    ]
    assert words_of(TEXTS[:4], 0) == [range(1, 2)], "nobody knows how the second one goes on"
    assert words_of(TEXTS, 5) == words_of(TEXTS, 0)[3:]


@given(st.lists(st.sampled_from(TEXTS)), st.integers(0, 9))
def test_words_are_apart_and_after_their_context(texts: list[str], context: int) -> None:
    words = words_of(texts, context)
    assert all(context <= word.start < word.stop < len(texts) for word in words)
    assert all(one.stop <= other.start for one, other in pairwise(words))


def test_a_word_is_right_if_all_of_its_tokens_are() -> None:
    tokens, words = [7, 1, 2, 3, 4], [range(1, 2), range(2, 4)]
    assert count_right(words, tokens, tokens[1:]) == 2
    assert count_right(words, tokens, [1, 2, 0, 4]) == 1
    assert count_right(words, tokens, [0, 0, 3, 4]) == 0
