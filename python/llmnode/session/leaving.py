"""A session leaves a hop between two steps: one that is much slower than it says, or than others that are known."""

from __future__ import annotations

from typing import TYPE_CHECKING

import trio

from llmnode.session.failures import Outdone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.session.hop import SessionHop
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.session.tools import SessionTools
    from llmnode.wire.session_terms import SessionTerms


class Leaving:
    """That of one session. Its waits double with each hop that it leaves."""

    def __init__(self, terms: SessionTerms, tools: SessionTools) -> None:
        self._terms = terms
        self._tools = tools
        self._left = 0
        self._looks_s: float | None = None
        """When it looks for better hops next."""

    async def leave_outdone(self, hops: Sequence[SessionHop], position: int) -> None:
        """Raises Outdone, the failure of a hop, if others are known to be faster by the factors of `StandingPolicy`.

        Nothing is under way. While a spot check asks hops, they stay.
        """
        finder, checks, standing = self._tools.finder, self._tools.spot_checks, self._terms.policy.standing
        if finder is None or (checks is not None and checks.is_busy):
            return
        for hop in hops:
            if not hop.is_leased and hop.overtime.total_s >= standing.slow_total_s * 2**self._left:
                await self._leave_if_slow(hop, hops, position, finder)
        now_s = trio.current_time()
        if self._looks_s is None or now_s >= self._looks_s:
            is_first, pause_s = self._looks_s is None, standing.better_every_s * 2**self._left
            self._looks_s = now_s + pause_s * finder.rng.uniform(0.75, 1.25)  # not all sessions at once
            if not is_first:
                self._leave_for_better(hops, position, finder)

    async def _leave_if_slow(
        self, hop: SessionHop, hops: Sequence[SessionHop], position: int, finder: PeerFinder
    ) -> None:
        position_s = hop.overtime.position_s
        hop.overtime.forget()
        left = self._terms.max_length - position
        if hop.word is None or left * position_s < position * hop.word.position_s:
            return  # the replay would take longer
        await finder.note_slow(hop.hop.span, [hop.hop.peer])
        beside = {each.hop.peer for each in hops if each is not hop}
        length, times = self._terms.max_length, self._terms.policy.standing.leaving_times
        others = finder.instead_of(hop.hop, length, beside=beside, at_once=position)
        if others is not None and times * others.position_s < position_s:
            self._left += 1
            raise hop.blame(Outdone(f"takes {position_s:.1f} s for a position, which is much longer than it says"))

    def _leave_for_better(self, hops: Sequence[SessionHop], position: int, finder: PeerFinder) -> None:
        """The session is taken to last as long as until now, or as it may. Only proven peers count."""
        standing, left = self._terms.policy.standing, min(position, self._terms.max_length - position)
        for hop in hops:
            position_s = hop.pace.usual_s(standing.short_step)
            if hop.is_leased or position_s is None or left * position_s < standing.least_saved_s:
                continue
            beside = {each.hop.peer for each in hops if each is not hop}
            others = finder.instead_of(
                hop.hop, self._terms.max_length, beside=beside, at_once=position, only_proven=True
            )
            if others is None or standing.better_times * others.position_s > position_s:
                continue
            saved_s = left * (position_s - others.position_s)
            if saved_s >= standing.least_saved_s + standing.repaid_times * others.replay_s:
                self._left += 1
                told = f"{1000 * position_s:.0f} ms for a position, and others {1000 * others.position_s:.0f}"
                raise hop.blame(Outdone(f"takes {told}"))
