"""Spans: half-open ranges of transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from llmnode.core.errors import ConfigError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Blocks `start` up to, not including, `end`. Never empty."""

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise ValueError(f"a span needs 0 <= start < end, got [{self.start}, {self.end})")

    def __len__(self) -> int:
        return self.end - self.start

    def __str__(self) -> str:
        return f"[{self.start}, {self.end})"

    def covers(self, other: Span) -> bool:
        return self.start <= other.start and other.end <= self.end

    def meets(self, other: Span) -> bool:
        """Whether some block is in both."""
        return self.start < other.end and other.start < self.end


def parse_span(text: str, blocks: int | None = None) -> Span:
    """Read `"0:10"` as blocks 0 to 9, of a model with `blocks` blocks if that is known already.

    Raises ConfigError, with the form or the range that would be right.
    """
    start, _, end = text.partition(":")
    try:
        span = Span(int(start), int(end))
    except ValueError:
        raise ConfigError(f"--blocks {text!r} is not a range: write START:END, for example 0:10") from None
    if blocks is not None and span.end > blocks:
        raise ConfigError(f"--blocks {text} ends after the model's last block: it has {blocks}, so at most 0:{blocks}")
    return span


def split_evenly(blocks: int, parts: int) -> list[Span]:
    """Cut `blocks` blocks into `parts` spans whose lengths differ by one at most."""
    if not 1 <= parts <= blocks:
        raise ConfigError(f"cannot cut {blocks} blocks into {parts} spans: choose 1 to {blocks}")
    edges = [blocks * part // parts for part in range(parts + 1)]
    return [Span(start, end) for start, end in pairwise(edges)]
