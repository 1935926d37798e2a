"""A session goes over to a better route between two steps, and loses nothing if that fails.

The new hops open, and compute all of its inputs, while the old ones keep their KV. Then they take their place. A batch
is as slow as its slowest row. So rows at the same peers that wait for each other move together, or none of them does.
"""

from __future__ import annotations

import logging
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.moves import steps_until
from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout, single_error
from llmnode.session.better_routes import Moved, RowAt, Standpoint
from llmnode.session.row_move import RowMove

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.session.better_routes import BetterRoute
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.rows import Rows

log = logging.getLogger(__name__)

MOST_DOUBLINGS = 6
"""The pause between two looks doubles this often at most: 16 minutes."""
AT_ONCE = 16
"""The rows that are replayed at a time. With more, a server would queue their openings."""


class Moving:
    """That of one session."""

    def __init__(self, hops: SessionHops, rows: Rows) -> None:
        """`rows` are the sessions that wait for each other, this one among them. One of them looks for all."""
        policy = hops.terms.policy.moves
        self.at_step: float = policy.first_steps if policy.enabled and hops.tools.finder is not None else inf
        """The step before which the session is to look next. A comparison with it is all that other steps cost."""
        self._hops = hops
        self._rows = rows
        self._policy = policy

    async def look(self) -> None:
        """Look for a better route, if it is time to, and go over to it with the rows that are at the same peers.

        Nothing is under way at this one. If another row is on its way, the next step looks. Raises the PeerError of a
        hop that is lost, be it for another reason.
        """
        hops, finder, now_s, taken_s = self._hops, self._hops.tools.finder, trio.current_time(), self._step_s()
        assert finder is not None, "it never looks without one"
        better, last = finder.better_routes, self._rows.last_look
        if last.next_s is None:
            last.next_s = now_s + better.rng.uniform(0, self._policy.look_s)
        if now_s >= last.next_s and taken_s is not None:
            batch = self._rows.at_peers_of(hops)
            if any(row.is_busy and row is not hops for row in batch):
                self.at_step = hops.state.step + 1
                return
            pause_s = self._policy.look_s * (1 << min(last.tried, MOST_DOUBLINGS))
            last.next_s = now_s + pause_s * better.rng.uniform(1, 2)  # clients come apart
            if not better.is_busy and not any(map(_must_stay, batch)):
                with better.looking():
                    route = tuple(each.hop for each in hops.hops)
                    rows = [RowAt(row.terms, row.state.position) for row in batch]
                    without_kv = partial(self._rows.without_kv, movers=batch)
                    session = Standpoint(route, rows, without_kv, hops.state.step, taken_s)
                    if (found := better.find(session, last)) is not None:
                        last.tried += 1
                        await self._move(batch, found, finder)
                    if last.tries:
                        last.next_s = min(last.next_s, now_s + self._policy.tried_s)
        self.at_step = hops.state.step + steps_until(last.next_s - now_s, taken_s or 0.0)

    def _step_s(self) -> float | None:
        """The usual time of a step. None if there were none lately."""
        most = self._hops.terms.policy.standing.short_step
        taken_s = [hop.pace.usual_s(most) for hop in self._hops.hops]
        known_s = [each for each in taken_s if each is not None]
        return sum(known_s) if len(known_s) == len(taken_s) else None

    async def _move(self, batch: Sequence[SessionHops], found: BetterRoute, finder: PeerFinder) -> None:
        hops, began_s = self._hops, trio.current_time()
        rows = [RowMove(row, found.move) for row in batch]
        most_s = min(found.gain_s, self._policy.repays_times * found.price_s + self._policy.patience_s)
        failure: PeerError | None = None
        is_over = False
        with _at_rest(batch[1:]):
            try:
                with trio.move_on_after(most_s):
                    await self._go_over(rows, found, finder)
                    is_over = True
            except PeerError as error:
                failure = error
            finally:
                spare = [hop for row in rows for hop in (row.go() if is_over else row.stay())]
                await hops.abandon(spare)
        moved = [row.row for row in rows if row.is_placed and row.row.ended is None]
        if moved:
            self._note(moved, found, trio.current_time() - began_s)
            finder.warm_standbys(tuple(hop.hop for hop in hops.hops))
        elif not is_over:
            log.info("a session stays where it was: %s", failure or f"a replay took {most_s:.1f} s")
            self._note_failed(found, failure, finder)
        hops.check_open()  # it may have been closed meanwhile
        if (lost := hops.state.lost) is not None and lost.failure is not None:
            raise lost.failure
        await hops.settle()

    async def _go_over(self, rows: Sequence[RowMove], found: BetterRoute, finder: PeerFinder) -> None:
        """Have new hops take over from the old ones in all rows, or raise the PeerError of one of them."""
        connections = await finder.reach(found.move.hops, found.usable)
        limit = trio.CapacityLimiter(AT_ONCE)

        async def replay(row: RowMove) -> None:
            async with limit:
                await row.replay(connections)

        await _beside_each_other(partial(replay, row) for row in rows)
        for row in rows:  # that of the last one is over
            row.place()
        await _beside_each_other(row.settle for row in rows)

    def _note(self, moved: Sequence[SessionHops], found: BetterRoute, stall_s: float) -> None:
        move = found.move
        left, new = (tuple(hop.peer for hop in route) for route in (move.left, move.hops))
        for row in moved:
            row.moves.append(Moved(left, new, row.state.position, stall_s, found.price_s, move.saved_s))
        log.info(
            "moved %d session(s) from %s to %s: %d positions in %.3f s, to save %.4f s a step",
            len(moved),
            ", ".join(left),
            ", ".join(new),
            sum(row.state.position for row in moved),
            stall_s,
            move.saved_s,
        )

    def _note_failed(self, found: BetterRoute, failure: PeerError | None, finder: PeerFinder) -> None:
        """Have sessions go to those that failed no more for a while.

        A peer that refused to open is not banned: it has not promised anything. A dispute counts against new peers
        alone: with the others all went well.
        """
        peers, now_s = {hop.peer for hop in found.move.hops}, trio.current_time()
        for peer in at_fault(failure, peers):
            finder.better_routes.failed.report(peer, now_s)
        if isinstance(failure, IntegrityError) and failure.suspects:
            finder.suspect([peer for peer in failure.suspects if peer in peers])
        elif isinstance(failure, PeerRefused) and not failure.breaks_promise:
            if failure.peer is not None and failure.retry_after_s is not None:
                finder.records.note_full(failure.peer, failure.retry_after_s, now_s)
        elif failure is not None and failure.peer in peers:
            finder.report(failure)


def at_fault(failure: PeerError | None, peers: Collection[PeerId]) -> Collection[PeerId]:
    """Those of the new `peers` that may be why a move failed.

    Without a `failure` it took too long, and then each of them may be. So may they if the hop before did not answer in
    time: it may have waited for them with its pushes. They have no part in any other failure of that hop.
    """
    if failure is None or (isinstance(failure, PeerTimeout) and failure.peer not in peers):
        return peers
    named = [failure.peer, *(failure.suspects if isinstance(failure, IntegrityError) else ())]
    return [peer for peer in peers if peer in named]


def _must_stay(row: SessionHops) -> bool:
    checks = row.tools.spot_checks
    return (checks is not None and checks.is_busy) or any(hop.is_leased for hop in row.hops)


@contextmanager
def _at_rest(rows: Sequence[SessionHops]) -> Iterator[None]:
    """Nothing else is done with `rows`, which are at rest. Their steps and forks wait."""
    over = trio.Event()
    for row in rows:
        row.is_busy, row.move = True, over
    try:
        yield
    finally:
        for row in rows:
            row.is_busy, row.move = False, None
        over.set()


async def _beside_each_other(works: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Raises the error of one that fails. That cancels the others."""
    with single_error():
        async with trio.open_nursery() as nursery:
            for work in works:
                nursery.start_soon(work)
