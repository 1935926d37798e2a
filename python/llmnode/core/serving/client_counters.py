"""Virtual token counters: how much of an executor each client was given, in positions times blocks.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId


class ClientCounters:
    """The client with the lowest counter is next. One that comes back starts level with the lowest of those that wait.

    So nobody saves up turns while away, and nobody pays for positions that nobody else wanted.
    """

    def __init__(self) -> None:
        self.given: dict[PeerId, int] = {}
        self._queued: Counter[PeerId] = Counter()  # requests of each client
        self._level = 0  # the counter of the latest client that had nothing left in the queue

    def enter(self, client: PeerId) -> None:
        """One more of its requests waits."""
        if not self._queued[client]:
            waiting = [self.given[each] for each, queued in self._queued.items() if queued]
            self.given[client] = max(self.given.get(client, 0), min(waiting, default=self._level))
        self._queued[client] += 1

    def leave(self, client: PeerId) -> None:
        """One of its requests waits no more."""
        self._queued[client] -= 1
        if not self._queued[client]:
            del self._queued[client]
            self._level = self.given[client]

    def charge(self, client: PeerId, cost: int) -> None:
        self.given[client] += cost

    def forget(self, client: PeerId) -> None:
        """Called for a client without a session. It is forgotten unless a request of it waits."""
        if client not in self._queued:
            self.given.pop(client, None)
