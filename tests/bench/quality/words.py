"""A zero-shot task: the next word of a text. It needs no torch.

It is scored like LAMBADA (Paperno et al. 2016): a word is right if each of its tokens is the likeliest one, given all
tokens before it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

CONTEXT_TOKENS = 32
"""At least this number of tokens comes before each word."""


def words_of(texts: Sequence[str], context: int = CONTEXT_TOKENS) -> list[range]:
    """The tokens of a chunk that make up whole words. A word is a space and the letters that follow it."""
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
    """The number of `words` that are right. `chosen` has the likeliest token after each of `tokens` but the last."""
    return sum(all(chosen[place - 1] == tokens[place] for place in word) for word in words)
