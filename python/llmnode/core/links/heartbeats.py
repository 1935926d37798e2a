"""The heartbeats that the other side of a link may send: those that are due, and news of how fast the link is.

A heartbeat asks for nothing, so it is in no turns. Told the time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.rates import Rates

if TYPE_CHECKING:
    from llmnode.core.policy import LinkPolicy


class Heartbeats:
    """A burst, then a rate. Large frames that we send earn more: their receiver measures the link, and tells us."""

    def __init__(self, policy: LinkPolicy) -> None:
        self._rates = Rates(policy.heartbeats_burst, policy.heartbeats_each / policy.heartbeat_s)
        self._measured_bytes = policy.packing.rate_bytes
        self._sent_bytes = 0

    def take(self, sent_bytes: int, now_s: float) -> bool:
        """One has come. Whether it is allowed, after all the `sent_bytes` of the link."""
        self._rates.give_back(None, now_s, (sent_bytes - self._sent_bytes) / self._measured_bytes)
        self._sent_bytes = sent_bytes
        return self._rates.take(None, now_s)
