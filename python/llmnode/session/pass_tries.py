"""The servers of one pass: which is asked next, and for how long others are when one has failed."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

import trio

from llmnode.errors import NoRoute, PeerError, PeerRefused, SessionLost
from llmnode.session.failures import Overdue, StepFailures
from llmnode.session.overflow import Given, OverflowClaims
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.peers.pass_loads import PassLoad
    from llmnode.core.span import Span
    from llmnode.session.pass_routes import PassRoutes
    from llmnode.swarm.peer_connection import PeerConnection

log = logging.getLogger(__name__)


class PassTries:
    """Finds the next hop of one way through the swarm. Peers that have failed are asked again after all others.

    A peer that never has memory for a pass is asked once for each hop, and one that has said that it does not know what
    the pass requires is not asked.
    """

    def __init__(
        self, routes: PassRoutes, given: Given, *, is_backward: bool = False, has_dropout: bool = False
    ) -> None:
        self._routes = routes
        self._finder = finder = routes.finder
        self._given = given
        self._is_backward = is_backward
        self._has_dropout = has_dropout
        self._policy = finder.policy
        self._failures = self._none_failed()
        self._unable: set[PeerId] = set()
        self._outdated: set[PeerId] = set()
        """Those of them that are too old for the pass."""
        needed = ("deep prompts", given.prompts), ("adapters", given.adapter), ("lora_dropout", has_dropout)
        self._needs = tuple(name for name, is_needed in needed if is_needed)
        self._asked = range(0)
        """The blocks of the hop that was found last."""
        self._was_overdue = False

    @property
    def unfit(self) -> set[PeerId]:
        """Peers that cannot take this pass, be it in a hurry."""
        return self._unable | {each.peer for each in self._finder.pool.living() if self._is_too_old(each)}

    async def next_hop(self, span: Span, weight: int) -> tuple[Span, PeerConnection, PassLoad]:
        """The first hop of the best route through `span` for a pass of this `weight`, and the load there, which is to
        be taken back. Raises NoRoute or SessionLost after too long, and NumericOverflow as `failed`.
        """
        hurry = False
        while True:
            try:
                avoided, to_known = self._failures.avoided(hurry=hurry) | self.unfit, self._was_overdue
                find = partial(self._routes.find, hurry=hurry, to_known=to_known)
                route, connections, load = await find(span, avoided, weight)
            except NoRoute as absence:
                self._begin_deadline()
                if hurry:  # every peer has been asked
                    self._check_age(absence)
                    self._failures.check_agreement(trio.current_time())
                    await self._wait_changed(absence)
                hurry = not hurry
            except PeerError as error:
                self.failed(error)
            else:
                self._asked = range(route[0].span.start, route[0].span.end)
                return route[0].span, connections[route[0].peer], load

    def goes_elsewhere(self, load: PassLoad, span: Span, weight: int) -> bool:
        """Whether the pass, which waits for its turn at a peer, would be given to another one now."""
        avoided = self._failures.avoided(hurry=False) | self.unfit
        return self._routes.goes_elsewhere(load, span, avoided, weight, to_known=self._was_overdue)

    def measured_others(self, peer: PeerId, span: Span) -> Sequence[PeerId]:
        """Those that have answered passes and could do this one together instead of `peer`. None if they cannot."""
        return self._routes.measured_others(peer, span, self._failures.avoided(hurry=False) | self.unfit)

    def failed(self, error: PeerError, took_s: float = 0.0) -> None:
        """A peer has failed, after this time: others are asked. Raises SessionLost after too long, and NumericOverflow
        if it says that numbers overflow, and is believed.

        After one that is only overdue, there are others that have answered passes. These are asked.
        """
        log.info("a pass failed: %s", error)
        self._failures.note_uncomputed(error, self._finder, trio.current_time())
        if isinstance(error, Overdue):
            self._was_overdue = True
            self._failures.add_try(took_s, failed=True)  # its time is none of the search
            return
        if error.peer is not None and _never_will(error):
            self._unable.add(error.peer)
            if isinstance(error, PeerRefused) and error.code == RefusalCode.UNKNOWN_EXTENSION:
                self._outdated.add(error.peer)
        self._failures.add_try(took_s, failed=True)
        self._begin_deadline()
        if trio.current_time() >= self._failures.deadline_s:
            raise SessionLost(self._failures.causes) from error

    def worked(self) -> None:
        """A server has answered."""
        self._routes.computed |= {(self._needs, block) for block in self._asked}
        self._failures.got_through(self._finder)
        self._failures = self._none_failed()
        self._unable.clear()
        self._was_overdue = False

    def _none_failed(self) -> StepFailures:
        return StepFailures(self._policy.recovery, OverflowClaims(self._given, self._is_backward))

    def _is_too_old(self, connection: PeerConnection) -> bool:
        """Whether its peer has said so."""
        lacks_adapters = self._given.adapter is not None and connection.adapters.is_unable
        lacks_dropout = self._has_dropout and not connection.knows_dropout
        return lacks_adapters or lacks_dropout or (bool(self._given.prompts) and not connection.knows_prompts)

    def _check_age(self, absence: NoRoute) -> None:
        """Raise at once if some of the missing blocks are only at servers that are too old: nobody will be back.

        If passes like this one have come through these blocks before, other servers may be back.
        """
        old = self._outdated | {each.peer for each in self._finder.pool.living() if self._is_too_old(each)}
        of_old, of_others = set[int](), set[int]()
        for each in self._finder.holders():
            held = of_old if each.peer in old else of_others
            held.update(range(each.offer.span.start, each.offer.span.end))
        missing = {block for span in absence.missing for block in range(span.start, span.end)}
        if any((self._needs, block) not in self._routes.computed for block in missing & of_old - of_others):
            explained = self._explained(absence)
            raise SessionLost(self._failures.causes) if explained is absence else explained

    def _explained(self, absence: NoRoute) -> NoRoute:
        """The same, with what the pass needs if servers that are connected do not know it."""
        too_old = sum(map(self._is_too_old, self._finder.pool.living()))
        if not too_old:
            return absence
        needs = " and ".join(self._needs)
        instead = ", or train with lora_dropout=0" if self._has_dropout else ""
        hint = f"{too_old} of the servers are too old for {needs} in passes: update llmnode there{instead}"
        return NoRoute(absence.missing, hint=hint)

    def _begin_deadline(self) -> None:
        latest_s = trio.current_time() + self._policy.recovery.timeout_s
        self._failures.deadline_s = min(self._failures.deadline_s, latest_s)

    async def _wait_changed(self, absence: NoRoute) -> None:
        """Those that have failed may be back in a moment, or others."""
        if trio.current_time() >= self._failures.deadline_s:
            raise SessionLost(self._failures.causes) if self._failures.causes else self._explained(absence)
        if not self._failures.wants_kv:  # else servers are there, and only busy
            self._finder.records.tell_absence(self._explained(absence), self._failures.deadline_s)
        pause_s = self._failures.pause_s(self._policy.route, self._finder.rng)  # a peer may have named any time
        with trio.move_on_at(min(trio.current_time() + pause_s, self._failures.deadline_s)):
            await self._finder.wait_changed()
        self._failures.ask_all_again()


def _never_will(error: PeerError) -> bool:
    """Whether a peer says that it never has memory for the pass, or that it is too old for it."""
    if not isinstance(error, PeerRefused):
        return False
    return error.code == RefusalCode.UNKNOWN_EXTENSION or (
        error.code == RefusalCode.NO_ROOM and error.retry_after_s is None
    )
