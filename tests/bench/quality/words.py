"""A zero-shot task: the next word of a text. No torch.

As LAMBADA (Paperno et al. 2016) is scored: a word is right if each of its tokens is the likeliest, given all before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONTEXT_TOKENS = 32
"""That are before each word at least."""


def words_of(texts: Sequence[str], context: int = CONTEXT_TOKENS) -> list[range]:
    """Which tokens of a chunk, given by their `texts`, are whole words: a space and letters, up to what is none."""
    words: list[range] = []
    start: int | None = None
    for place, text in enumerate(texts):
        if start is not None and not text.isalpha():
            words.append(range(start, place))
            start = None
        if text.startswith(" ") and text[1:].isalpha():
            start = place
    return [word for word in words if word.start >= context]


def count_right(words: Iterable[range], tokens: Sequence[int], chosen: Sequence[int]) -> int:
    """How many of `words` are right; `chosen` are the likeliest tokens after each but the last of `tokens`."""
    return sum(all(chosen[place - 1] == tokens[place] for place in word) for word in words)
