"""A session goes over to a better route between two steps, and loses nothing if that fails.

The new hops open, and compute all of its inputs, while the old ones keep their KV. Then they take their place.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.moves import steps_until
from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout
from llmnode.session.better_routes import LastLook, Standpoint
from llmnode.session.failures import StepFailures

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.session.better_routes import BetterRoute
    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.rows import Rows

log = logging.getLogger(__name__)

MOST_DOUBLINGS = 6
"""The pause between two looks doubles this often at most: 16 minutes."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Other peers have taken the place of some that served well, since they are better."""

    left: tuple[PeerId, ...]
    taken_over_by: tuple[PeerId, ...]
    positions: int
    """The number of positions that were replayed."""
    stall_s: float
    """The time that it took."""
    price_s: float
    """The time that it was expected to take."""
    saved_s: float
    """The time that each step was expected to be shorter."""


class Moving:
    """That of one session."""

    def __init__(self, hops: SessionHops, rows: Rows) -> None:
        """`rows` are the sessions that wait for each other, this one among them."""
        policy = hops.terms.policy.moves
        self.moves: list[Moved] = []
        self.at_step: float = policy.first_steps if policy.enabled and hops.tools.finder is not None else inf
        """The step before which the session is to look next. A comparison with it is all that other steps cost."""
        self._hops = hops
        self._rows = rows
        self._policy = policy
        self._next_s: float | None = None
        self._tried = 0
        self._last = LastLook()

    async def look(self) -> None:
        """Look for a better route, if it is time to, and go over to it. Nothing is under way.

        Raises the PeerError of a hop that is lost, be it for another reason.
        """
        hops, finder, now_s, taken_s = self._hops, self._hops.tools.finder, trio.current_time(), self._step_s()
        assert finder is not None, "it never looks without one"
        better = finder.better_routes
        if self._next_s is None:
            self._next_s = now_s + better.rng.uniform(0, self._policy.look_s)
        if now_s >= self._next_s and taken_s is not None:
            pause_s = self._policy.look_s * (1 << min(self._tried, MOST_DOUBLINGS))
            self._next_s = now_s + pause_s * better.rng.uniform(1, 2)  # clients come apart
            if not better.is_busy and not self._must_stay():
                with better.looking():
                    state = hops.state
                    route = tuple(each.hop for each in hops.hops)
                    at = state.position, state.step, taken_s
                    session = Standpoint(route, hops.terms, self._rows.number, self._rows.too_small, *at)
                    if (found := better.find(session, self._last)) is not None:
                        await self._move(found, finder)
                    if self._last.tries:
                        self._next_s = min(self._next_s, now_s + self._policy.tried_s)
        self.at_step = hops.state.step + steps_until(self._next_s - now_s, taken_s or 0.0)

    def put_off(self) -> None:
        """It becomes a copy of another one, whose peers it takes: a move of its own would have been for nothing."""
        self.at_step = max(self.at_step, self._hops.state.step + self._policy.first_steps)

    def _must_stay(self) -> bool:
        checks = self._hops.tools.spot_checks
        return (checks is not None and checks.is_busy) or any(hop.is_leased for hop in self._hops.hops)

    def _step_s(self) -> float | None:
        """The usual time of a step. None if there were none lately."""
        most = self._hops.terms.policy.standing.short_step
        taken_s = [hop.pace.usual_s(most) for hop in self._hops.hops]
        known_s = [each for each in taken_s if each is not None]
        return sum(known_s) if len(known_s) == len(taken_s) else None

    async def _move(self, found: BetterRoute, finder: PeerFinder) -> None:
        hops, state, move, began_s = self._hops, self._hops.state, found.move, trio.current_time()
        old = state.hops[move.first : move.first + len(move.left)]
        self._tried += 1
        new = await self._replayed(found, old[0], finder)
        if not new:
            return
        state.unsettle()
        state.replace(old, new)
        spare: Sequence[SessionHop] = old
        try:
            try:
                await hops.settle()
                if hops.ended is not None:  # it was closed meanwhile, and the old hops were not in their places
                    hops.check_open()
            except PeerError as error:
                if all(hop.failure is None for hop in new):
                    raise  # another hop is lost: that of a new one has its inputs
                log.info("a session stays where it was: %s", error)
                state.unsettle()
                state.replace(new, old)
                spare = new
                if hops.ended is not None:  # that closed the new hops, and nobody else would close these
                    spare = [*new, *old]
                    hops.check_open()
                await self._go_on(old[0], found, error, finder)
                return
        finally:
            await hops.abandon(spare)
        if (before := state.before(new[0])) is not None:
            for hop in old:  # that it could not push there matters no more
                before.pushing.forget(hop.hop.peer)
        finder.warm_standbys(tuple(hop.hop for hop in state.hops))
        peers = tuple(hop.hop.peer for hop in old), tuple(hop.hop.peer for hop in new)
        stall_s = trio.current_time() - began_s
        self.moves.append(Moved(*peers, state.position, stall_s, found.price_s, move.saved_s))
        log.info(
            "moved from %s to %s: %d positions in %.3f s, to save %.4f s a step",
            *(", ".join(each) for each in peers),
            state.position,
            stall_s,
            move.saved_s,
        )

    async def _replayed(self, found: BetterRoute, first: SessionHop, finder: PeerFinder) -> Sequence[SessionHop]:
        """The new hops, when they have computed all inputs; none if one of them did not, or it took too long."""
        hops, state, route = self._hops, self._hops.state, found.move.hops
        before = state.before(first)
        was_trusted = before is None or before.pushing.is_trusted
        failure: PeerError | None = None
        most_s = min(found.gain_s, self._policy.repays_times * found.price_s + self._policy.patience_s)
        with trio.move_on_after(most_s):
            try:
                connections = await finder.reach(route, found.usable)
                return await hops.replayed(first, route, connections, StepFailures(hops.terms.policy.recovery))
            except PeerError as error:
                failure = error
        log.info("a session stays where it was: %s", failure or f"a replay took {most_s:.1f} s")
        state.unsettle()
        if before is not None:
            before.pushing.is_trusted = was_trusted
        await self._go_on(first, found, failure, finder)
        return ()

    async def _go_on(
        self, first: SessionHop, found: BetterRoute, failure: PeerError | None, finder: PeerFinder
    ) -> None:
        """Have the old hops stand as before, and go to those that failed no more for a while.

        A peer that refused to open is not banned: it has not promised anything. A dispute counts against new peers
        alone: with the others all went well.
        """
        state, peers, now_s = self._hops.state, {hop.peer for hop in found.move.hops}, trio.current_time()
        for peer in peers if failure is None or failure.peer not in peers else {failure.peer}:
            finder.better_routes.failed.report(peer, now_s)
        if isinstance(failure, IntegrityError) and failure.suspects:
            finder.suspect([peer for peer in failure.suspects if peer in peers])
        elif isinstance(failure, PeerRefused) and not failure.breaks_promise:
            if failure.peer is not None and failure.retry_after_s is not None:
                finder.records.note_full(failure.peer, failure.retry_after_s, now_s)
        elif failure is not None and failure.peer in peers:
            finder.report(failure)
        if (before := state.before(first)) is not None:
            for peer in peers:
                before.pushing.forget(peer)
            if isinstance(before.failure, (PeerTimeout, PeerRefused)):
                before.failure = None  # it may have waited for a new hop, or be busy: it answers now, or is lost
        if (lost := state.lost) is not None and lost.failure is not None:
            raise lost.failure
        await self._hops.settle()
