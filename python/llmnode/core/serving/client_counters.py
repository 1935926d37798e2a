"""Virtual token counters: how much of an executor each client was given, in positions times blocks.

Sheng et al., Fairness in Serving Large Language Models, OSDI 2024, algorithm 2.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId

REMEMBERED = 256
"""Clients without a session whose counters are kept. A pass has parts, and a client has passes one after the other:
between them nothing of it is here."""


class ClientCounters:
    """The client with the lowest counter is next. A new one starts level with the lowest of those that wait.

    One that comes back is at most one request behind that, so nobody saves up turns while away. It is not quite level:
    else a client with small requests one at a time, which is away for a moment after each, would get fewer positions
    than one with large requests. Nobody pays for positions that nobody else wanted.
    """

    def __init__(self) -> None:
        self.given: dict[PeerId, int] = {}
        self._latest: dict[PeerId, int] = {}  # what each was charged last
        self._queued: Counter[PeerId] = Counter()  # requests of each client
        self._left: PeerId | None = None  # the latest client that had nothing left in the queue
        self._gone: dict[PeerId, None] = {}  # clients without a session or a request, the latest last

    def enter(self, client: PeerId) -> None:
        """One more of its requests waits."""
        self._gone.pop(client, None)
        if not self._queued[client]:
            others = [each for each, queued in self._queued.items() if queued]
            if not others and self._left in self.given:
                others = [self._left]
            if (own := self.given.get(client)) is None:
                self.given[client] = min((self.given[each] for each in others), default=0)
            else:
                before = (self.given[each] - self._latest.get(each, 0) for each in others)
                self.given[client] = max(own, min(before, default=0))
        self._queued[client] += 1

    def leave(self, client: PeerId) -> None:
        """One of its requests waits no more."""
        self._queued[client] -= 1
        if not self._queued[client]:
            del self._queued[client]
            self._left = client

    def charge(self, client: PeerId, cost: int) -> None:
        self.given[client] += cost
        self._latest[client] = cost

    def forget(self, client: PeerId) -> None:
        """Called for a client without a session. Unless a request of it waits, it is soon forgotten."""
        if client in self._queued or client not in self.given:
            return
        self._gone.pop(client, None)
        self._gone[client] = None
        if len(self._gone) > REMEMBERED:
            oldest = next(iter(self._gone))
            for counters in (self.given, self._latest, self._gone):
                counters.pop(oldest, None)
