"""The sessions that one client opens, or has opened lately: others that it opens beside them count these."""

from __future__ import annotations

from collections import Counter, deque
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route

LATELY_S = 20.0
"""A server announces its load every 15 s or so. After this time a session is a part of it, if it is in use."""


class Openings:
    """For one client."""

    def __init__(self) -> None:
        self._opening: Counter[PeerId] = Counter()
        self._opened: deque[tuple[float, list[PeerId]]] = deque()

    def beside(self, others: Mapping[PeerId, int]) -> Counter[PeerId]:
        """The sessions that are being opened, and `others`, at each peer."""
        return self._opening + Counter(others)

    def lately(self) -> Counter[PeerId]:
        """The sessions that are being opened, or were opened lately, at each peer."""
        while self._opened and self._opened[0][0] < trio.current_time() - LATELY_S:
            self._opened.popleft()
        counts = self._opening.copy()
        for _, peers in self._opened:
            counts.update(peers)
        return counts

    @contextmanager
    def at(self, route: Route) -> Iterator[None]:
        """While a session is being opened at the peers of `route`."""
        peers = [hop.peer for hop in route]
        self._opening.update(peers)
        try:
            yield
        finally:
            self._opening.subtract(peers)
            self._opening = +self._opening

    def note(self, route: Route) -> None:
        """A session is open at the peers of `route`."""
        self._opened.append((trio.current_time(), [hop.peer for hop in route]))
