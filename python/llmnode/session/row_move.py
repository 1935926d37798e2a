"""The part that one row has in a move of rows to better peers. Until the move is over, it can go back at once.

`moving.py` says which rows move, and whether all went well.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.errors import PeerError, PeerRefused, PeerTimeout, SessionClosed
from llmnode.session.failures import StepFailures

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.moves import Move
    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.swarm.peer_connection import PeerConnection


class RowMove:
    """That of one row. If the row is closed meanwhile, the others move without it."""

    def __init__(self, row: SessionHops, move: Move) -> None:
        self.row = row
        self.is_placed = False
        """The new hops are in the places of the old ones."""
        self._route = move.hops
        self._old = tuple(row.hops[move.first : move.first + len(move.left)])
        self._new: Sequence[SessionHop] = ()
        self._before = row.state.before(self._old[0])
        self._was_trusted = self._before is None or self._before.pushing.is_trusted
        self._old[0].inputs.truncate(row.state.position)  # those of a step that failed may be there, too

    async def replay(self, connections: Mapping[PeerId, PeerConnection]) -> None:
        """Have new hops compute all inputs, while the old ones keep their KV. Raises PeerError."""
        failures = StepFailures(self.row.terms.policy.recovery)
        try:
            self._new = await self.row.replayed(self._old[0], self._route, connections, failures)
        except (PeerError, SessionClosed):
            if self.row.ended is None:
                raise

    def place(self) -> None:
        """Put the new hops in the places of the old ones. If the row was closed, nobody would close them there."""
        if self.row.ended is None:
            self.row.state.unsettle()
            self.row.state.replace(self._old, self._new)
            self.is_placed = True

    async def settle(self) -> None:
        """Have all hops of the row stand at its position. Raises the PeerError of a new hop.

        If another one is lost, that is no reason to go back: the new hops have their inputs.
        """
        if self.is_placed:
            try:
                await self.row.settle()
            except PeerError:
                if self.row.ended is None and any(hop.failure is not None for hop in self._new):
                    raise

    def stay(self) -> Sequence[SessionHop]:
        """Have the old hops go on, after the next `settle`. Returns the hops to close."""
        state, before, spare = self.row.state, self._before, list(self._new)
        state.unsettle()
        if self.is_placed:
            state.replace(self._new, self._old)
            self.is_placed = False
            if self.row.ended is not None:  # the new ones were closed with it, and nobody else would close these
                spare += self._old
        if before is not None:
            before.pushing.is_trusted = self._was_trusted
            for hop in self._route:
                before.pushing.forget(hop.peer)
            if isinstance(before.failure, (PeerTimeout, PeerRefused)):
                before.failure = None  # it may have waited for a new hop, or be busy: it answers now, or is lost
        return spare

    def go(self) -> Sequence[SessionHop]:
        """The move is over. Returns the hops to close."""
        if not self.is_placed:
            return self._new
        if self._before is not None:
            for hop in self._old:  # that it could not push there matters no more
                self._before.pushing.forget(hop.hop.peer)
        return self._old
