"""A client knows its own part of the load of each peer: the times of its steps, averaged as peers average theirs.

A load average is announced seconds later, so this one can be asked for a moment that is over. Knows no clock.
"""

from __future__ import annotations

from collections import deque
from math import log
from typing import TYPE_CHECKING

from llmnode.core.serving import load_average

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llmnode.core.ids import PeerId

TOGETHER_S = 1.0
"""Steps of this time are kept as one."""
KEPT_S = 60.0
"""Older steps are forgotten: they are a 64th of the load at most."""
AROUND_S = 2.0
"""The clocks of two machines differ by this, and a step ends a little later here than where it was computed."""
PEERS = 1024
"""The most peers. Those that were used first are forgotten first."""


class OwnLoad:
    """Holds the steps of a minute."""

    def __init__(self) -> None:
        self._spent: dict[PeerId, deque[tuple[float, float]]] = {}

    def note(self, peer: PeerId, spent_s: float, now_s: float) -> None:
        """A step has ended that was computed at the peer, or waited for that, for `spent_s`."""
        spent = self._spent.get(peer)
        if spent is None:
            if len(self._spent) == PEERS:
                del self._spent[next(iter(self._spent))]
            spent = self._spent[peer] = deque(maxlen=int(KEPT_S / TOGETHER_S))
        if spent and now_s < spent[-1][0] + TOGETHER_S:
            spent[-1] = (spent[-1][0], spent[-1][1] + spent_s)
        else:
            spent.append((now_s, spent_s))

    def peers(self) -> Iterable[PeerId]:
        """Those that have computed a step, perhaps long ago."""
        return self._spent

    def at(self, peer: PeerId, then_s: float) -> float:
        """The number of steps at a time that the peer had from this client, by then."""
        half_life_s = load_average.HALF_LIFE_S
        left_s = sum(
            spent_s * 0.5 ** ((then_s - at_s) / half_life_s)
            for at_s, spent_s in self._spent.get(peer, ())
            if at_s <= then_s < at_s + KEPT_S
        )
        return float(left_s * log(2) / half_life_s)

    def most_around(self, peer: PeerId, then_s: float) -> float:
        """The most that it was within `AROUND_S` of then: a load from which it is taken away has no rest of it."""
        since_s, until_s = then_s - AROUND_S, then_s + AROUND_S
        ends_s = [at_s for at_s, _ in self._spent.get(peer, ()) if since_s < at_s <= until_s]
        return max(self.at(peer, each) for each in (since_s, *ends_s))
