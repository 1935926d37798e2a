"""The blocks that a server should hold: those where the swarm is slowest (Petals, section 3.2)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.span import Span
from llmnode.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable


def block_speeds(blocks: int, held: Iterable[tuple[Span, float]]) -> list[float]:
    """Tokens a second that the swarm can put through each block; `held` are spans and the speeds of their peers."""
    speeds = [0.0] * blocks
    for span, speed in held:
        for block in range(span.start, min(span.end, blocks)):
            speeds[block] += speed
    return speeds


def choose_span(blocks: int, length: int, held: Iterable[tuple[Span, float]]) -> Span:
    """The `length` blocks that need another server most, the first of equals.

    The paper's rule: of all windows, the one whose speeds, slowest first, come first in order.
    """
    if not 1 <= length <= blocks:
        raise ConfigError(f"cannot serve {length} blocks: the model has {blocks}")
    speeds = block_speeds(blocks, held)
    start = min(range(blocks - length + 1), key=lambda start: sorted(speeds[start : start + length]))
    return Span(start, start + length)
