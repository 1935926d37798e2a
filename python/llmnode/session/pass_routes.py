"""A pass goes to the server where it ends first, after all others that this client has there.

A batch has many passes, and the swarm may have thousands of servers. So all of them are looked through once a second,
and the best ones of each block are kept until then. Each pass chooses among these.
"""

from __future__ import annotations

import math
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.peers.pass_loads import Holder, Kind, PassLoad, PassLoads
from llmnode.core.peers.pass_patience import PassPatience
from llmnode.core.peers.standing import new_tuple
from llmnode.core.route import NoRoute, covers, find_detour

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence, Set

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.route import Route
    from llmnode.core.span import Span
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.swarm.peer_connection import PeerConnection

LOOKS_AGAIN_S = 1.0
"""Servers that are new, or not so busy any more, get passes after this time."""
HOLDERS = 8
"""The servers of each block that passes may be split over, of those that have answered passes and of others each."""


class PassRoutes:
    """Finds servers for the passes of one client."""

    def __init__(self, finder: PeerFinder) -> None:
        self.loads = PassLoads()
        self.patience = PassPatience(finder.policy.passes)
        self.finder = finder
        self.computed: set[tuple[Sequence[str], int]] = set()
        """The needs of passes that servers have computed, with each block: at most a few times the number of blocks."""
        self._kept: dict[PeerId, tuple[Announcement, Holder]] = {}
        self._until_s = -math.inf
        self._has_looked = False
        self._left_out: Set[PeerId] = frozenset()

    async def find(
        self, span: Span, avoid: Collection[PeerId], weight: int, *, hurry: bool = False, to_known: bool = False
    ) -> tuple[Route, Mapping[PeerId, PeerConnection], PassLoad]:
        """The route through `span` on which a pass of this `weight` ends first, and the load at its first hop.

        The caller has to take that back. If the pass is to go `to_known` servers, it does so if they have the blocks:
        they have answered passes. Parameters and errors are otherwise those of `PeerFinder.find`.
        """
        finder = self.finder
        if not hurry:
            await finder.wait_for_trials(span, avoid)
            if (route := self._best(span, avoid, weight, to_known=to_known)) is not None:
                load = self._give(route, weight)
                try:
                    usable = [self._kept[hop.peer][0] for hop in route]
                    connections = await finder.reach(route, usable)
                except BaseException:
                    self.loads.take_back(load)
                    raise
                if self._has_looked:
                    self._has_looked = False
                    finder.warm_standbys(route)
                return route, connections, load
        route, connections = await finder.find(span, 0, avoid, hurry=hurry)
        return route, connections, self._give(route, weight)

    def goes_elsewhere(
        self, load: PassLoad, span: Span, avoid: Collection[PeerId], weight: int, *, to_known: bool
    ) -> bool:
        """Whether a pass that has to wait for its peer would choose another one now, with the parameters of `find`."""
        route = self._best(span, avoid, weight, load, to_known=to_known)
        return route is not None and route[0].peer != load.peer

    def measured_others(self, peer: PeerId, span: Span, avoid: Collection[PeerId]) -> Sequence[PeerId]:
        """Those that have answered passes lately, are well, and have all blocks of `span` together without `peer`.

        None if they have not.
        """
        found = self._holders({peer, *self._unfit(avoid), *self._strangers()})
        return [each.peer for each in found] if covers([each.span for each in found], span) else []

    def _strangers(self) -> set[PeerId]:
        """The servers that passes choose among, and that have answered none lately."""
        now_s = trio.current_time()
        return {each for each in self._kept if self.loads.kind(each, now_s) is not Kind.MEASURED}

    def _unfit(self, avoid: Collection[PeerId]) -> set[PeerId]:
        now_s, records = trio.current_time(), self.finder.records
        banned, excluded = records.bans.banned(now_s), records.suspicion.excluded(now_s)
        return {*avoid, *banned, *excluded, *self.patience.resting(now_s)}

    def _give(self, route: Route, weight: int) -> PassLoad:
        return self.loads.give(route[0].peer, weight * len(route[0].span))

    def _best(
        self,
        span: Span,
        avoid: Collection[PeerId],
        weight: int,
        without: PassLoad | None = None,
        *,
        to_known: bool = False,
    ) -> Route | None:
        """None if none of the servers that are kept hold some of the blocks: others may."""
        now_s = trio.current_time()
        if now_s >= self._until_s:
            self._look(weight, now_s)
        unfit = self._unfit(avoid)
        if to_known:
            with suppress(NoRoute):
                return self._among_kept(span, unfit | self._strangers(), weight, without)
        with suppress(NoRoute):
            return self._among_kept(span, unfit, weight, without)
        if not unfit <= self._left_out:  # others may have the blocks, and were not kept
            self._look(weight, now_s, unfit | self._left_out)
            with suppress(NoRoute):
                return self._among_kept(span, unfit, weight, without)
        return None

    def _among_kept(self, span: Span, unfit: Collection[PeerId], weight: int, without: PassLoad | None) -> Route:
        """Raises NoRoute."""
        holders = self._holders(unfit)
        self.finder.rng.shuffle(holders)  # of equal ones, each is taken now and then
        costs = self.loads.costs(holders, weight, trio.current_time(), without)
        return find_detour(span, [(each.peer, each.span) for each in holders], costs)

    def _holders(self, unfit: Collection[PeerId]) -> list[Holder]:
        """The servers that are kept and still have their blocks."""
        view = self.finder.swarm.view
        return [
            holder
            for peer, (announcement, holder) in self._kept.items()
            if peer not in unfit and ((now := view.of_peer(peer)) is announcement or _still_holds(now, announcement))
        ]

    def _look(self, weight: int, now_s: float, left_out: Set[PeerId] = frozenset()) -> None:
        """Keep the best servers of each block that are not `left_out`, whatever the client has there now.

        Those that have answered passes have places of their own: any number of strangers may say that they are fast.
        """
        resting = self.patience.resting(now_s)
        usable = [each for each in self.finder.good() if each.peer not in left_out and each.peer not in resting]
        self._left_out = left_out
        undoubted, costs = self.finder.records.costs_and_doubts(usable, needs_kv=False)
        holders = [
            new_tuple(Holder, (each.peer, each.offer.span, costs[each.peer], undoubted[each.peer])) for each in usable
        ]
        of_passes = self.loads.costs(holders, weight, now_s, has_none=True)
        ranks_s = [
            of_passes[peer].block_s + of_passes[peer].hop_s / (span.end - span.start) for peer, span, *_ in holders
        ]
        kinds = [self.loads.kind(each.peer, now_s) for each in holders]
        self._kept, of_measured, of_others = {}, Counter[int](), Counter[int]()
        for number in sorted(range(len(usable)), key=lambda number: (kinds[number], ranks_s[number])):
            peer, span, *_ = holders[number]
            held, blocks = of_measured if kinds[number] is Kind.MEASURED else of_others, range(span.start, span.end)
            if kinds[number] is Kind.TRIED:  # it may be silent: beside measured ones, no others are tried meanwhile
                held.update(block for block in blocks if of_measured[block])
            elif any(held[block] < HOLDERS for block in blocks):
                held.update(blocks)
            else:
                continue
            self._kept[peer] = usable[number], holders[number]
        self._until_s, self._has_looked = now_s + LOOKS_AGAIN_S, True


def _still_holds(now: Announcement | None, before: Announcement) -> bool:
    if now is None or now.offer.state is not PeerState.ONLINE:
        return False
    return (now.offer.span, now.offer.profile) == (before.offer.span, before.offer.profile)
