"""Finds texts that begin with the same tokens, and how many: these are computed once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

LEAST_SHARED_TOKENS = 16
"""A copy costs a round trip and a copy of the KV: fewer tokens are as soon computed again."""


@dataclass(frozen=True, slots=True)
class SharedBeginning:
    """Texts that follow each other, and how many tokens all of them begin with: 0 for one alone."""

    texts: range
    tokens: int


def shared_beginnings(texts: Sequence[Sequence[int]]) -> list[SharedBeginning]:
    """All of `texts` in order, in runs that begin alike. At least one token of each text is left for itself.

    A text joins the run before it unless more positions are saved if it begins the next, as far as the text after it
    tells: one that shares little with many others does not take from them what they share.
    """
    runs: list[SharedBeginning] = []
    for text in range(len(texts)):
        ahead = _common(texts[text], texts[text + 1]) if text + 1 < len(texts) else 0
        if runs:
            run, members = runs[-1], len(runs[-1].texts)
            tokens = _common(texts[text - 1], texts[text])
            tokens = min(tokens, run.tokens) if members > 1 else tokens
            joining = max(tokens * members, min(tokens, ahead) * (members + 1))
            if tokens and joining >= run.tokens * (members - 1) + ahead:
                runs[-1] = SharedBeginning(range(run.texts.start, text + 1), tokens)
                continue
        runs.append(SharedBeginning(range(text, text + 1), 0))
    return runs


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens that both begin with, but for the last of either; 0 if they are too few to be worth a copy."""
    shorter = min(len(one), len(other)) - 1
    common = next((at for at in range(shorter) if one[at] != other[at]), max(shorter, 0))
    return common if common >= LEAST_SHARED_TOKENS else 0
