"""Others take the place of hops that have failed (Petals, Algorithm 1).

What a lost hop was given is replayed to who takes its place, by the hop before, which has logged it, or by us.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import trio

from llmnode.errors import IntegrityError, NoRoute, PeerError, SessionLost
from llmnode.session.chunk_run import HopsDisagree
from llmnode.session.failures import Recovery

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.session.failures import StepFailures
    from llmnode.session.hop import SessionHop
    from llmnode.session.hops import SessionHops
    from llmnode.session.peer_finder import PeerFinder

log = logging.getLogger(__name__)


class Recoverer:
    """Recovers the hops of one session. Without `finder` no peer can be replaced."""

    def __init__(self, line: SessionHops) -> None:
        self.recoveries: list[Recovery] = []
        self._line = line
        self._finder = line.tools.finder

    async def mend(self, error: PeerError, trouble: StepFailures) -> None:
        """Put others in the place of all hops that have failed. Raises SessionLost or NoRoute."""
        line = self._line
        if isinstance(error, IntegrityError) and line.lost is None:
            log.warning("%s", error)
            self._judge(error)
        lost = line.lost
        if lost is None and isinstance(error, IntegrityError):
            return  # it happens once to any two: what goes between them does so by way of us now
        if self._finder is None or lost is None:
            raise SessionLost([error]) from error
        trouble.deadline_s = min(trouble.deadline_s, trio.current_time() + line.policy.recovery.timeout_s)
        while lost is not None:
            await self._replace(lost, self._finder, trouble)
            lost = line.lost

    def _judge(self, error: IntegrityError) -> None:
        """Two hops contradict each other. What both have signed may prove which one lies; else both are suspected."""
        book = self._line.tools.book
        if isinstance(error, HopsDisagree) and error.shown is not None and book is not None:
            told = error.upstream.receipt(book, error.chunk, error.told)
            shown = error.shown.shown_input, error.shown.input_digest, error.shown.shown_signature
            try:
                if (conviction := book.echo(told, error.hop.hop, *shown)) is not None:
                    error.upstream.blame(conviction.error())
                    return
            except IntegrityError as doubt:
                log.warning("%s", doubt)
        if self._finder is not None:
            self._finder.suspect(error.suspects)

    async def _replace(self, lost: SessionHop, finder: PeerFinder, trouble: StepFailures) -> None:
        """Have others in the place of `lost`; or return because of the hop before, which is then lost too."""
        line = self._line
        began, index = trio.current_time(), line.hops.index(lost)
        before = line.hops[index - 1] if index else None
        assert lost.failure is not None
        lost.inputs.truncate(line.position)
        trouble.note_lost(lost.failure, finder)
        await line.abandon([lost])  # if it lives it may be asked to take its own place, and has no room for both
        missing: NoRoute | None = None
        hurry = False
        while line.ended is None and trio.current_time() < trouble.deadline_s:
            try:
                with trio.fail_at(trouble.deadline_s):
                    avoided = trouble.avoided(hurry=hurry)
                    route, connections = await finder.find(lost.hop.span, line.terms.max_length, avoided, hurry=hurry)
                    hops = await line.rebuild(lost, route, connections)
            except NoRoute as found:
                missing = found
                if hurry:  # everybody has been asked
                    log.warning("%s; trying again for %.0f s", found, trouble.deadline_s - trio.current_time())
                    pause_s = max(line.policy.route.retry_s, trouble.room_in_s)
                    with trio.move_on_at(min(trio.current_time() + pause_s, trouble.deadline_s)):
                        await finder.wait_changed()
                    trouble.ask_all_again()  # they may be back, or have room, by now
                hurry = not hurry
            except PeerError as failure:
                if before is not None and before.failure is not None:
                    return
                missing = None
                trouble.note(failure, finder)
            except trio.TooSlowError:
                break
            else:
                self._note(lost, hops, trio.current_time() - began)
                return
        line.check_open()
        raise missing or NoRoute([lost.hop.span], hint=str(trouble.causes[-1]))

    def _note(self, lost: SessionHop, hops: Sequence[SessionHop], stall_s: float) -> None:
        others = tuple(each.hop.peer for each in hops)
        cause, positions = str(lost.failure), self._line.position
        self.recoveries.append(Recovery(lost.hop.peer, lost.hop.span, others, positions, stall_s, cause))
        log.info("recovered span=%s positions=%d in %.3f s: %s", lost.hop.span, positions, stall_s, cause)
