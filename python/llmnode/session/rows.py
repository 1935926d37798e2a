"""Sessions that wait for each other, as the rows of a generation do. While one waits for KV, the others hold none.

Otherwise the rows of two generations could hold what those of the other one wait for, at one server or at several.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerRefused
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route
    from llmnode.errors import PeerError
    from llmnode.session.hops import SessionHops


class Rows:
    """The sessions of one client that were opened beside each other."""

    def __init__(self) -> None:
        self.lengths_are_guesses = False
        """They may never have their greatest lengths. So no row is refused because all of these do not fit."""
        self._rows: list[SessionHops] = []
        self._opening: list[tuple[frozenset[PeerId], int]] = []

    @property
    def number(self) -> int:
        return len(self._rows)

    def add(self, row: SessionHops) -> None:
        self._rows.append(row)

    @contextmanager
    def opening(self, route: Route, length: int) -> Iterator[None]:
        """Around the opening of one of this greatest length at `route`: KV for it counts as taken."""
        taken = frozenset(hop.peer for hop in route), length
        self._opening.append(taken)
        try:
            yield
        finally:
            self._opening.remove(taken)

    def remove(self, row: SessionHops) -> None:
        """One that is not there changes nothing."""
        self._rows = [each for each in self._rows if each is not row]

    def too_small(self, announcements: Iterable[Announcement], length: int) -> dict[PeerId, PeerError]:
        """The peers that will never have KV for one more row of this greatest length, each with a refusal.

        The rows wait for each other, so all those at a peer have to fit.
        """
        wanted: defaultdict[PeerId, list[int]] = defaultdict(list)
        rows = [({hop.hop.peer for hop in row.hops}, row.terms.max_length) for row in self._rows]
        for peers, own_length in [] if self.lengths_are_guesses else [*rows, *self._opening]:
            for peer in peers:
                wanted[peer].append(own_length)
        refused: dict[PeerId, PeerError] = {}
        for each in announcements:
            lengths = wanted.get(each.peer, [])
            positions = sum(map(each.offer.in_pages, (*lengths, length)))
            if lengths and positions > each.offer.kv_tokens:
                why = f"{positions} positions in all, and this server has {each.offer.kv_tokens}"
                refused[each.peer] = PeerRefused(RefusalCode.NO_ROOM, why, peer=each.peer, span=each.offer.span)
        return refused

    async def let_go(self) -> None:
        """Have the rows that are not in use free their KV: one waits for some. They are replayed when they go on."""
        async with trio.open_nursery() as nursery:
            for row in self._rows:
                if not row.is_busy:
                    nursery.start_soon(row.let_go)
