"""The paper's rule for a node that joins: it takes the slowest blocks of the swarm (Petals, appendix D, eq. 1).

Nodes that join at the same moment do not see each other choose, and all take the same blocks. While they load, each
hears of the others. Then they choose once more as if they had come one after the other.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.placement.servers import block_speeds
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.placement.servers import PlacedServer


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


def choose_together(
    blocks: int, me: PeerId, length: int, others: Collection[PlacedServer], joining: Collection[PeerId]
) -> Span:
    """The place of a node with this number of blocks beside `others`, of which some are `joining` at the same time.

    They take their places one after the other, by `choose_span`, those with most blocks first: what these leave is
    filled more easily. The first id breaks ties, so nodes that know the same others agree.
    """
    speeds = block_speeds(blocks, [each for each in others if each.peer not in joining])
    for each in sorted((each for each in others if each.peer in joining), key=lambda each: _turn(each.peer, each.span)):
        if _turn(each.peer, each.span) > (-length, me):
            break
        span = choose_span(min(len(each.span), blocks), speeds)
        for block in range(span.start, span.end):
            speeds[block] += each.speed
    return choose_span(length, speeds)


def _turn(peer: PeerId, span: Span) -> tuple[int, PeerId]:
    return -len(span), peer
