"""How fast peers have taken large frames of sessions from this node: its upload, as it is while it serves.

The receiver of a link tells it (`packing.py: ArrivalRate`). It times the parts of one frame, in which the link is the
bottleneck. Its word is a claim, so `core/speed.py: observed_upload` keeps it within bounds.
"""

from __future__ import annotations

KEEPS_S = 600.0
"""A rate counts for this time: two of the probes that servers send every five minutes."""
MOST_PEERS = 256
"""The peers whose rates are kept; the one that was heard longest ago goes first."""


class SendRates:
    """The latest rate that each peer has told, with its address group, and when."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[float, str, float]] = {}

    def note(self, peer: str, group: str, bytes_per_s: float, now_s: float) -> None:
        """A peer of this address `group` has taken a large frame this fast."""
        self._told.pop(peer, None)
        self._told[peer] = bytes_per_s, group, now_s
        if len(self._told) > MOST_PEERS:
            del self._told[next(iter(self._told))]

    def by_group(self, now_s: float) -> dict[str, list[float]]:
        """The rates that are not too old, by address group."""
        rates: dict[str, list[float]] = {}
        for bytes_per_s, group, told_s in self._told.values():
            if now_s < told_s + KEEPS_S:
                rates.setdefault(group, []).append(bytes_per_s)
        return rates
