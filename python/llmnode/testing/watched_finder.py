"""A peer finder that keeps a record of failures and of the routes that it found, for `checks.check_no_banned_peer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import trio

from llmnode.session.peer_finder import PeerFinder

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route
    from llmnode.core.span import Span
    from llmnode.errors import PeerError
    from llmnode.swarm.peer_connection import PeerConnection


class WatchedFinder(PeerFinder):
    """`failures` have their time, and how long we had waited for the peer; `found` routes have the time, and how many
    failures were known then.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:  # Any: what a PeerFinder takes
        super().__init__(*arguments, **options)
        self.failures: list[tuple[float, PeerId, float]] = []
        self.found: list[tuple[float, int, Route]] = []
        self.banned: list[tuple[float, PeerError]] = []
        """The errors for which peers were banned."""

    def report(self, error: PeerError) -> None:
        super().report(error)
        if error.peer is not None and not self.reports.is_excused(error):
            self.failures.append((trio.current_time(), error.peer, error.waited_s))
            self.banned.append((trio.current_time(), error))

    async def find(
        self, span: Span, positions: int, avoid: Collection[PeerId], *, hurry: bool, **near: Any
    ) -> tuple[Route, Mapping[PeerId, PeerConnection]]:
        asked_s, failures = trio.current_time(), len(self.failures)
        route, connections = await super().find(span, positions, avoid, hurry=hurry, **near)
        if not hurry:
            self.found.append((asked_s, failures, route))
        return route, connections
