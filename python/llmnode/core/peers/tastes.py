"""A client's taste: of servers that cost nearly the same, each client prefers others.

Without it all clients would take the one that says that it is a hundredth faster.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.route import HopCost

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Mapping, Sequence

    from llmnode.core.ids import PeerId

PEERS = 8192
"""After this many servers it begins anew: more than a view holds."""


class Tastes:
    """Those of one client. They stay the same, so its sessions find the connections of the ones before."""

    def __init__(self, near: float, draw: Callable[[int], Sequence[float]]) -> None:
        """Costs that differ by less than the share `near` are nearly the same. `draw` gives numbers from 0 to 1."""
        self._near = near
        self._draw = draw
        self._factors: dict[PeerId, float] = {}

    def of(self, costs: Mapping[PeerId, HopCost]) -> dict[PeerId, HopCost]:
        """The costs as the client likes the servers: each up to `near` dearer."""
        factors = self._factors
        if len(factors) > PEERS:
            factors.clear()
        if new := [peer for peer in costs if peer not in factors]:
            factors.update(zip(new, [1.0 + self._near * each for each in self._draw(len(new))], strict=True))
        liked = {}
        for peer, (hop_s, block_s, way_s) in costs.items():
            factor = factors[peer]
            liked[peer] = HopCost(factor * hop_s, factor * block_s, way_s)
        return liked


def draw_numbers(rng: random.Random, count: int) -> list[float]:
    """The numbers are those of `count` calls of `rng.random`, drawn in a few calls: a view has thousands of peers."""
    words = memoryview(rng.getrandbits(64 * count).to_bytes(8 * count, "little")).cast("I")
    return [((low >> 5) * 2**26 + (high >> 6)) / 2**53 for low, high in zip(words[::2], words[1::2], strict=True)]
