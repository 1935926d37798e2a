"""The paper's rule for a node that joins: it takes the slowest blocks of the swarm (Petals, appendix D, eq. 1)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Sequence


def choose_span(length: int, speeds: Sequence[float]) -> Span:
    """The `length` blocks that need another server most, the first of equals. `speeds` are those of all blocks.

    The paper's rule: of all windows, the one whose speeds, slowest first, come first in order.
    """
    blocks = len(speeds)
    if not 1 <= length <= blocks:
        raise ConfigError(f"cannot serve {length} blocks: the model has {blocks}")
    slowest, last = min(speeds), blocks - length
    # The window that comes first has a slowest block in it: the others need not be sorted.
    starts = {
        start
        for block, speed in enumerate(speeds)
        if speed == slowest
        for start in range(max(0, block - length + 1), min(block, last) + 1)
    }
    start = min(sorted(starts), key=lambda start: sorted(speeds[start : start + length]))
    return Span(start, start + length)
