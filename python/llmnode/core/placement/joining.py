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
    blocks: int, me: PeerId, mine: Span, others: Collection[PlacedServer], joining: Collection[PeerId]
) -> Span:
    """The place of a node that loads the blocks of `mine`, beside `others`, of which some are `joining` with it.

    It stays if none of these load any of the same blocks: a load that is begun anew is lost. Those that do take their
    places one after the other, by `choose_span`, those with most blocks first: what these leave is filled more easily.
    The first id breaks ties, so nodes that know the same others agree.
    """
    spans = {each.peer: each.span for each in others if each.peer in joining} | {me: mine}
    contending = {
        peer for peer, span in spans.items() if any(span.meets(spans[each]) for each in spans if each != peer)
    }
    if me not in contending:
        return mine
    speeds = block_speeds(blocks, [each for each in others if each.peer not in contending])
    for each in sorted(
        (each for each in others if each.peer in contending), key=lambda each: _turn(each.peer, each.span)
    ):
        if _turn(each.peer, each.span) > _turn(me, mine):
            break
        span = choose_span(min(len(each.span), blocks), speeds)
        for block in range(span.start, span.end):
            speeds[block] += each.speed
    return choose_span(len(mine), speeds)


def _turn(peer: PeerId, span: Span) -> tuple[int, PeerId]:
    return -len(span), peer
