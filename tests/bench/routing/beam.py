"""The search that Petals describes (ICLR submission, 3.1), "a beam-search-like procedure": over heaps of servers that
are ordered by their ping. The paper names no width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import NoRoute

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.route import HopCost, Route, Ways


def beam_route(
    blocks: int, held: Sequence[Hop], costs: Mapping[PeerId, HopCost], ways: Ways, width: int
) -> tuple[Route, float]:
    """A route, and its cost in seconds. Each server computes up to the end of its span.

    From each block, the `width` cheapest ways to it go on to the `width` nearest servers that hold it. The costs are
    those of `find_route`. Raises NoRoute if the beam has lost every way to the end.
    """
    reached: list[list[tuple[float, Route]]] = [[] for _ in range(blocks + 1)]
    reached[0] = [(0.0, ())]
    for block in range(blocks):
        heap = sorted(
            (hop for hop in held if hop.span.start <= block < hop.span.end), key=lambda hop: costs[hop.peer].way_s
        )
        for cost_s, route in sorted(reached[block], key=lambda each: each[0])[:width]:
            taken = {hop.peer for hop in route}
            for hop in [each for each in heap if each.peer not in taken][:width]:
                end, cost = min(hop.span.end, blocks), costs[hop.peer]
                added_s = cost.hop_s + (end - block) * cost.block_s
                if route and (route[-1].peer, hop.peer) in ways:
                    saved_s = costs[route[-1].peer].way_s + cost.way_s - ways[route[-1].peer, hop.peer]
                    added_s -= min(max(0.0, saved_s), cost.hop_s)
                reached[end].append((cost_s + added_s, (*route, Hop(hop.peer, Span(block, end)))))
    if not reached[blocks]:
        raise NoRoute([Span(0, blocks)])
    cost_s, route = min(reached[blocks], key=lambda each: each[0])
    return route, cost_s
