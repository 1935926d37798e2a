"""A client's taste: of servers that cost nearly the same, each client prefers others.

Without it all clients would take the one that says that it is a hundredth faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.route import HopCost

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from llmnode.core.ids import PeerId

PEERS = 8192
"""After this many servers it begins anew: more than a view holds."""


class Tastes:
    """Those of one client. They stay the same, so its sessions find the connections of the ones before."""

    def __init__(self, near: float, draw: Callable[[], float]) -> None:
        """Costs that differ by less than the share `near` are nearly the same. `draw` gives a number from 0 to 1."""
        self._near = near
        self._draw = draw
        self._factors: dict[PeerId, float] = {}

    def of(self, costs: Mapping[PeerId, HopCost]) -> dict[PeerId, HopCost]:
        """The costs as the client likes the servers: each up to `near` dearer."""
        factors, near, draw = self._factors, self._near, self._draw
        if len(factors) > PEERS:
            factors.clear()
        liked = {}
        for peer, (hop_s, block_s, way_s) in costs.items():
            if (factor := factors.get(peer)) is None:
                factor = factors[peer] = 1.0 + near * draw()
            liked[peer] = HopCost(factor * hop_s, factor * block_s, way_s)
        return liked
