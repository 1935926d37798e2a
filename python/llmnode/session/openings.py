"""The sessions of one client that are being opened, so that others which are opened beside them know of them."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route


class Openings:
    """For one client."""

    def __init__(self) -> None:
        self.sessions: Counter[PeerId] = Counter()
        """How many are being opened at each peer."""

    def beside(self, others: Mapping[PeerId, int]) -> Counter[PeerId]:
        """These, and `others`: the sessions at each peer."""
        return self.sessions + Counter(others)

    @contextmanager
    def at(self, route: Route) -> Iterator[None]:
        """While a session is being opened at the peers of `route`."""
        peers = [hop.peer for hop in route]
        self.sessions.update(peers)
        try:
            yield
        finally:
            self.sessions.subtract(peers)
            self.sessions = +self.sessions
