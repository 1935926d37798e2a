"""A session leaves a hop between two steps that is much slower than it says, if others are known to be faster."""

from __future__ import annotations

from typing import TYPE_CHECKING

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

    async def leave_outdone(self, hops: Sequence[SessionHop], position: int) -> None:
        """Raises Outdone, the failure of a hop, if others are known to be `leaving_times` as fast.

        Nothing is under way. While a spot check asks hops, they stay.
        """
        finder, checks, standing = self._tools.finder, self._tools.spot_checks, self._terms.policy.standing
        if finder is None or (checks is not None and checks.is_busy):
            return
        for hop in hops:
            if not hop.is_leased and hop.overtime.total_s >= standing.slow_total_s * 2**self._left:
                await self._leave_if_slow(hop, hops, position, finder)

    async def _leave_if_slow(
        self, hop: SessionHop, hops: Sequence[SessionHop], position: int, finder: PeerFinder
    ) -> None:
        position_s = hop.overtime.position_s
        hop.overtime.forget()
        left = self._terms.max_length - position
        if hop.promised is None or left * position_s < position * hop.promised.position_s:
            return  # the replay would take longer
        await finder.note_slow(hop.hop.span, [hop.hop.peer])
        beside = {each.hop.peer for each in hops if each is not hop}
        length, times = self._terms.max_length, self._terms.policy.standing.leaving_times
        others_s = finder.instead_s(hop.hop, length, beside=beside, at_once=position)
        if others_s is not None and times * others_s < position_s:
            self._left += 1
            raise hop.blame(Outdone(f"takes {position_s:.1f} s for a position, which is much longer than it says"))
