"""Sessions that wait for each other, as the rows of a generation do. While one waits for KV, the others hold none.

Otherwise the rows of two generations could hold what those of the other one wait for, at one server or at several.
"""

from __future__ import annotations

from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

import trio

from llmnode.errors import PeerRefused
from llmnode.session.better_routes import LastLook
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

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
        self.last_look = LastLook()
        """One of them looks for a better route, for all that are at the same peers."""
        self._rows: list[SessionHops] = []
        self._opening: list[tuple[frozenset[PeerId], int]] = []

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
        wanted = self._wanted()
        refused: dict[PeerId, PeerError] = {}
        for each in announcements:
            lengths = wanted.get(each.peer, [])
            positions = sum(map(each.offer.in_pages, (*lengths, length)))
            if lengths and positions > each.offer.kv_tokens:
                why = f"{positions} positions in all, and this server has {each.offer.kv_tokens}"
                refused[each.peer] = PeerRefused(RefusalCode.NO_ROOM, why, peer=each.peer, span=each.offer.span)
        return refused

    def at_peers_of(self, row: SessionHops) -> list[SessionHops]:
        """This row first, and the others that go on at the same hops."""
        route = [hop.hop for hop in row.hops]
        others = [each for each in self._rows if each is not row and each.ended is None and each.state.lost is None]
        return [row, *(each for each in others if [hop.hop for hop in each.hops] == route)]

    def without_kv(self, announcements: Iterable[Announcement], movers: Sequence[SessionHops]) -> set[PeerId]:
        """The peers that have no KV now for what all `movers` hold, or will never have for their greatest lengths."""
        wanted, found = self._wanted(), set()
        for each in announcements:
            offer, most, now = each.offer, sum(map(each.offer.in_pages, wanted.get(each.peer, []))), 0
            for row in movers:
                length, first = row.terms.max_length, row.state.position + row.terms.policy.route.first_positions
                most += 0 if self.lengths_are_guesses else offer.in_pages(length)
                now += offer.in_pages(min(length, first))
            if most > offer.kv_tokens or now > offer.kv_tokens_free:
                found.add(each.peer)
        return found

    def _wanted(self) -> Mapping[PeerId, list[int]]:
        """The greatest lengths of the rows at each peer, as far as they are known."""
        wanted: defaultdict[PeerId, list[int]] = defaultdict(list)
        rows = [({hop.hop.peer for hop in row.hops}, row.terms.max_length) for row in self._rows]
        for peers, length in [] if self.lengths_are_guesses else [*rows, *self._opening]:
            for peer in peers:
                wanted[peer].append(length)
        return wanted

    async def let_go(self) -> None:
        """Have the rows that are not in use free their KV: one waits for some. They are replayed when they go on."""
        async with trio.open_nursery() as nursery:
            for row in self._rows:
                if not row.is_busy:
                    nursery.start_soon(row.let_go)
