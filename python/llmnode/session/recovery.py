"""Other peers take the place of hops that have failed (Petals, Algorithm 1).

The inputs of a lost hop are replayed to the hops that take its place, by the hop before, which has logged them, or by
the client.
"""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.errors import IntegrityError, NoRoute, NumericOverflow, PeerError, SessionLost
from llmnode.session.failures import Busier, LetGo, Recovery, has_lost_kv
from llmnode.session.hops import signed_receipt
from llmnode.wire.chunk_path import HopsDisagree

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.session.asking import AskingTurn
    from llmnode.session.failures import StepFailures
    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.rows import Rows

log = logging.getLogger(__name__)


class Recoverer:
    """Recovers the hops of one session, which is one of `rows`. Without `finder` no peer can be replaced."""

    def __init__(self, hops: SessionHops, rows: Rows) -> None:
        self.recoveries: list[Recovery] = []
        self._hops = hops
        self._rows = rows
        self._state = hops.state
        self._finder = hops.tools.finder

    async def recover(self, error: PeerError, failures: StepFailures) -> None:
        """Put others in the place of all hops that have failed. Raises SessionLost, NoRoute or NumericOverflow."""
        state = self._state
        if isinstance(error, IntegrityError) and state.lost is None:
            log.warning("%s", error)
            self._judge(error)
        lost = state.lost
        if lost is None and isinstance(error, IntegrityError):
            return  # it happens once to any two: hidden states between them go by way of the client now
        if self._finder is None or lost is None:
            raise SessionLost([error]) from error
        while lost is not None:
            try:
                await self._replace(lost, self._finder, failures)
            except NumericOverflow:  # no peer has failed: the session may go on with other numbers
                await self._hops.abandon([lost])
                lost.failure = LetGo(lost.hop)
                raise
            lost = state.lost

    def _judge(self, error: IntegrityError) -> None:
        """Two hops contradict each other. Their signatures may prove which one lies. Otherwise both are suspected.

        A liar is blamed: that is its hop's failure.
        """
        book = self._hops.tools.book
        if isinstance(error, HopsDisagree) and error.shown is not None and book is not None:
            told = signed_receipt(book, error.upstream, error.chunk, error.told)
            shown = error.shown.shown_input, error.shown.input_digest, error.shown.shown_signature
            try:
                if (conviction := book.echo(told, error.hop.hop, *shown)) is not None:
                    error.upstream.blame(conviction.error())
                    return
            except IntegrityError as doubt:
                log.warning("%s", doubt)
        if self._finder is not None:
            self._finder.suspect(error.suspects)

    async def _replace(self, lost: SessionHop, finder: PeerFinder, failures: StepFailures) -> None:
        """Put others in the place of `lost`. Returns early if the hop before fails, which is then lost too.

        While no peer has KV for them, neither this session nor another row that is not in use holds any.
        """
        hops, policy = self._hops, self._hops.terms.policy
        began_s = trio.current_time()
        before = self._state.before(lost)
        assert lost.failure is not None
        if not (isinstance(lost.failure, LetGo) and failures.searches):  # else the search goes on
            failures.begin_search(began_s, policy.recovery.kv_patience_s if has_lost_kv(lost.failure) else 0.0)
        lost.inputs.truncate(self._state.position)
        failures.note_lost(lost.failure, finder, began_s)
        await hops.abandon([lost])  # if it lives it may be asked to take its own place, and has no KV for both
        missing: NoRoute | None = None
        hurry, turn = False, finder.asking.turn()
        while hops.ended is None and trio.current_time() < failures.deadline_s:
            try:
                others = await self._try(lost, finder, failures, turn, hurry=hurry)
            except NoRoute as absence:
                missing = absence
                if hurry:  # every peer has been asked
                    failures.check_agreement(trio.current_time())
                    finder.records.tell_absence(missing, failures.deadline_s)
                    if failures.wants_kv and failures.waits_for_kv:  # a short wait is cheaper than a replay
                        await hops.let_go()
                        await self._rows.let_go()
                    pause_s = failures.pause_s(policy.route, finder.rng)
                    with trio.move_on_at(min(trio.current_time() + pause_s, failures.deadline_s)):
                        await finder.wait_changed()
                    failures.ask_all_again()  # they may be back, or have free KV, by now
                    if before is not None and before.failure is not None:
                        if isinstance(before.failure, LetGo):
                            lost.failure = LetGo(lost.hop)  # its own failure is noted: the search goes on
                        return
                hurry = not hurry
            except Busier as busier:
                log.info("looking again: %s", busier)
            except PeerError as failure:
                if before is not None and before.failure is not None:
                    return
                missing = None
                if isinstance(failure, IntegrityError) and failure.suspects:
                    self._judge(failure)
                    failures.is_disputed = True
                    if isinstance(failure, HopsDisagree):
                        failure = failure.upstream.failure or failure
                failures.note(failure, finder)
            else:
                self._note(lost, others, trio.current_time() - began_s)
                return
        hops.check_open()
        why = failures.causes[-1] if failures.causes else lost.failure
        raise (None if failures.waits_for_kv else missing) or NoRoute([lost.hop.span], hint=str(why))

    async def _try(
        self, lost: SessionHop, finder: PeerFinder, failures: StepFailures, turn: AskingTurn, *, hurry: bool
    ) -> Sequence[SessionHop]:
        """Have the best others take the place of `lost`, and return them. They say how busy they are when they open.

        Raises NoRoute and PeerError, and Busier if others are better by what they say.
        """
        hops, avoided = self._hops, failures.avoided(hurry=hurry)
        length, at_once = hops.terms.max_length, self._state.position
        beside = {each.hop.peer for each in hops.hops if each.failure is None}
        find = partial(finder.find, lost.hop.span, length, avoided, hurry=hurry)
        route, connections = await find(beside=beside, at_once=at_once, turn=turn)
        others = await hops.rebuild(lost, route, connections, failures, turn.is_outdone)
        turn.settle(route)
        return others

    def _note(self, lost: SessionHop, hops: Sequence[SessionHop], stall_s: float) -> None:
        others = tuple(each.hop.peer for each in hops)
        cause, positions = str(lost.failure), self._state.position
        self.recoveries.append(Recovery(lost.hop.peer, lost.hop.span, others, positions, stall_s, cause))
        log.info("recovered span=%s positions=%d in %.3f s: %s", lost.hop.span, positions, stall_s, cause)
