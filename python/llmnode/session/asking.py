"""Asks the servers of a route how busy they are, just before a session opens there, or while it recovers there.

Announcements are up to 15 s old, and a thousand clients read the same ones. The answers are claims: they can only make
a server look worse (`core/peers/asked_loads.py`). A server that does not answer is not blamed.
"""

from __future__ import annotations

from contextlib import suppress
from functools import partial
from heapq import nsmallest
from typing import TYPE_CHECKING

import trio

from llmnode.core.moves import crowded
from llmnode.core.peers.asked_loads import AskedLoads, expected, share_there
from llmnode.core.peers.ways import believed_ways
from llmnode.core.route import cost_s, find_detour, replaceable
from llmnode.core.span import Span
from llmnode.errors import PeerError

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.peers.asked_loads import LoadNow
    from llmnode.core.policy import RoutePolicy
    from llmnode.core.route import Hop, HopCost, Route
    from llmnode.session.peer_records import PeerRecords
    from llmnode.session.reaching import Reaching
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool


class Asking:
    """For one client, with what it knows of its servers."""

    def __init__(self, pool: ConnectionPool, records: PeerRecords, reaching: Reaching, policy: RoutePolicy) -> None:
        self._pool = pool
        self._records = records
        self._reaching = reaching
        self._policy = policy
        self._loads = AskedLoads(policy.asked_keeps_s, policy.silent_s)
        self._under_way: dict[PeerId, trio.Event] = {}

    def turn(self) -> AskingTurn:
        """For one session that opens."""
        return AskingTurn(self, self._policy)

    def worse_of(self, announcements: Sequence[Announcement]) -> list[Announcement]:
        """The same, with what servers have answered lately where that is worse."""
        own, near = self._records.own_uses, self._reaching.round_trips_s()
        return self._loads.worse_of(announcements, own, near, trio.current_time())

    async def has_become_dearer(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        usable: Sequence[Announcement],
        positions: int,
        turn: AskingTurn,
    ) -> bool:
        """Whether a session of these `positions` costs more on `route` than was thought, by what its servers say now.

        Those are asked that others of the `usable` ones could replace, and count the session as about to open. It waits
        for them for the rest of the time of this `turn`.
        """
        hops = replaceable(route, [(each.peer, each.offer.span) for each in usable])
        again = turn.is_contended
        asked = [connections[hop.peer] for hop in hops if self._is_due(hop.peer, again and hop.peer not in turn.asked)]
        if not asked:
            return False
        peers = {hop.peer for hop in route}
        thought = [each for each in usable if each.peer in peers]

        def is_dearer() -> bool:
            before, after = (self._costs(each, positions, peers) for each in (thought, self.worse_of(thought)))
            return cost_s(route, after) > (1 + self._policy.near) * cost_s(route, before)

        answers: dict[PeerId, LoadNow] = {}
        others = self._connected_others(hops, peers, usable, positions, again)
        turn.asked |= {each.peer: each for each in asked}
        within_s = turn.left_s
        with trio.move_on_after(within_s) as scope:
            async with trio.open_nursery() as beside:
                for each in others:
                    beside.start_soon(self._ask, each, answers, False)
                async with trio.open_nursery() as nursery:
                    for each in asked:
                        nursery.start_soon(self._ask, each, answers, True)
                if not any(answer.asking for answer in answers.values()) and not is_dearer():
                    beside.cancel_scope.cancel()  # it makes no difference what they say
        now_s = trio.current_time()
        if scope.cancelled_caught and within_s == self._policy.ask_s:
            for each in (*asked, *others):
                if self._loads.age_s(each.peer, now_s) is None:
                    self._loads.note_silent(each.peer, now_s)
        self._note_asking(hops, answers, peers, usable, positions)
        turn.is_contended = any(answer.asking for answer in answers.values())
        return is_dearer()

    def _note_asking(
        self,
        hops: Sequence[Hop],
        answers: Mapping[PeerId, LoadNow],
        peers: Collection[PeerId],
        usable: Sequence[Announcement],
        positions: int,
    ) -> None:
        """Count the other clients that were about to open sessions when servers have given these `answers`."""
        for peer in answers.keys() - peers:  # others have chosen those, and were there before us
            self._loads.note_coming(peer, answers[peer].asking, trio.current_time())
        for hop in hops:
            if hop.peer in answers and (before := answers[hop.peer].asking):
                self._expect(hop, before, peers, usable, positions)

    def ask_soon(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        usable: Sequence[Announcement],
        positions: int,
        turn: AskingTurn,
    ) -> Callable[[], None] | None:
        """Ask the servers of `route` that others of the `usable` ones could replace, and some of those, and wait for
        none. None if there are none to ask, else a function that counts the other clients of the answers until then.
        """
        hops, peers = replaceable(route, [(each.peer, each.offer.span) for each in usable]), {hop.peer for hop in route}
        asked = [connections[hop.peer] for hop in hops if self._is_due(hop.peer, again=False)]
        if not asked:
            return None
        turn.asked |= {each.peer: each for each in asked}
        answers: dict[PeerId, LoadNow] = {}
        for each in asked:
            self._pool.start_soon(partial(self._ask, each, answers, True))
        for each in self._connected_others(hops, peers, usable, positions, again=False):
            self._pool.start_soon(partial(self._ask, each, answers, False))
        return lambda: self._note_asking(hops, answers, peers, usable, positions)

    def costs(
        self,
        route: Route,
        announcements: Sequence[Announcement],
        *,
        positions: int,
        beside: Collection[PeerId],
        at_once: int,
    ) -> dict[PeerId, HopCost]:
        """Those without a session that has just opened on this route, where it has KV."""
        peers = {hop.peer for hop in route}
        costs_of = partial(self._records.costs_and_doubts, announcements, positions, beside=beside, at_once=at_once)
        costs = costs_of(without_one=peers)[1]
        with_kv = costs_of(without_one=peers, needs_kv=False)[1]
        return costs | {peer: with_kv[peer] for peer in peers}

    def is_outdone(
        self,
        route: Route,
        thought: Sequence[Announcement],
        costs: Callable[[Sequence[Announcement]], Mapping[PeerId, HopCost]],
        note: Callable[[], None],
    ) -> bool:
        """Whether `route` is dearer by what servers say now than was `thought`, and others are better by that.

        `note` counts the other clients that have asked.
        """
        note()
        now = self.worse_of(thought)
        if all(each is before for each, before in zip(now, thought, strict=True)):
            return False
        before, after = (costs(each) for each in (thought, now))
        if cost_s(route, after) <= (1 + self._policy.near) * cost_s(route, before):
            return False
        held, ways = ((each.peer, each.offer.span) for each in now), believed_ways(now, self._reaching.round_trips_s())
        best = find_detour(Span(route[0].span.start, route[-1].span.end), held, after, ways)
        return cost_s(best, after) < (1 - self._policy.near) * cost_s(route, after)

    def _costs(
        self, announcements: Sequence[Announcement], positions: int, peers: Collection[PeerId]
    ) -> Mapping[PeerId, HopCost]:
        """Those without the session that opens at `peers`: it is no load for itself."""
        return self._records.costs_and_doubts(announcements, positions, without_one=peers)[1]

    def take_back(self, connection: PeerConnection) -> None:
        """Tell a server that the session does not open there."""

        async def tell() -> None:
            with suppress(PeerError):
                await connection.best.ask_load(self._policy.measure_s, opens=False)

        self._pool.start_soon(tell)

    def _is_due(self, peer: PeerId, again: bool) -> bool:
        now_s = trio.current_time()
        age_s = self._loads.age_s(peer, now_s)
        return not self._loads.is_silent(peer, now_s) and (
            again or age_s is None or age_s >= self._policy.asked_again_s
        )

    def _connected_others(
        self,
        hops: Sequence[Hop],
        peers: Collection[PeerId],
        usable: Sequence[Announcement],
        positions: int,
        again: bool,
    ) -> list[PeerConnection]:
        """The connections to the best servers that could take the place of a hop."""
        living = {
            each.peer: each for each in self._pool.living() if each.peer not in peers and self._is_due(each.peer, again)
        }
        others = [each for each in usable if each.peer in living]
        costs = self._costs(others, positions, peers)
        best = {peer: None for hop in hops for peer in self._instead(hop, others, peers, costs)}
        return [living[peer] for peer in best][: self._policy.asked_beside]

    def _instead(
        self,
        hop: Hop,
        usable: Sequence[Announcement],
        peers: Collection[PeerId],
        costs: Mapping[PeerId, HopCost],
    ) -> list[PeerId]:
        """The best few servers that could take the place of a hop, but for the `peers` of its route."""
        others = [each.peer for each in usable if each.offer.span.covers(hop.span) and each.peer not in peers]
        return nsmallest(self._policy.asked_beside, others, lambda peer: _of_hop_s(hop, costs[peer]))

    async def _ask(self, connection: PeerConnection, answers: dict[PeerId, LoadNow], opens: bool) -> None:
        """Note the answer. Another session of this client may be asking the same server already."""
        peer = connection.peer
        if (over := self._under_way.get(peer)) is not None:
            await over.wait()
            return
        over = self._under_way[peer] = trio.Event()
        answer: LoadNow | None = None
        try:
            with suppress(PeerError):
                answer = await connection.best.ask_load(self._policy.measure_s, opens=opens)
            now_s = trio.current_time()
            if answer is None:  # it is too old, or asked for too much
                self._loads.note_silent(peer, now_s)
            else:
                answers[peer] = answer
                self._loads.note(peer, answer, self._records.own.load_at(peer, now_s), now_s)
        finally:
            del self._under_way[peer]
            over.set()

    def _expect(
        self, hop: Hop, before: int, peers: Collection[PeerId], usable: Sequence[Announcement], positions: int
    ) -> None:
        """Count the clients that have asked the peer of a hop `before` us where each goes, if it chooses as we do."""
        now = self.worse_of(usable)
        costs, near = self._costs(now, positions, peers), self._reaching.round_trips_s()
        instead = self._instead(hop, now, peers, costs)
        chosen = [each for each in now if each.peer == hop.peer or each.peer in instead]
        decodes = self._records.decodes(chosen)
        shares = {each.peer: share_there(each.offer, near.get(each.peer)) for each in chosen}

        def beside_s(peer: PeerId, clients: int) -> float:
            return _of_hop_s(hop, crowded(costs[peer], decodes[peer], clients * shares[peer]))

        for peer, clients in expected(hop.peer, before, instead, beside_s).items():
            self._loads.note_coming(peer, clients, trio.current_time())


class AskingTurn:
    """Asks for one session that opens: a few times, and not for long."""

    def __init__(self, asking: Asking, policy: RoutePolicy) -> None:
        self._asking = asking
        self._left, self.left_s = policy.asks, policy.ask_s
        self.asked: dict[PeerId, PeerConnection] = {}
        """The servers that expect the session."""
        self.is_contended = False
        """Other clients were about to open sessions when it last asked."""
        self._is_outdone: Callable[[], bool] | None = None

    async def has_become_dearer(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        usable: Sequence[Announcement],
        positions: int,
    ) -> bool:
        """Whether the route costs more than was thought, see `Asking`.

        Without `positions` no session opens, and nobody is asked.
        """
        if not positions or not self._left or self.left_s <= 0:
            return False
        began_s = trio.current_time()
        dearer = await self._asking.has_become_dearer(route, connections, usable, positions, self)
        self._left, self.left_s = self._left - 1, self.left_s - (trio.current_time() - began_s)
        return dearer

    def ask_beside(
        self,
        route: Route,
        connections: Mapping[PeerId, PeerConnection],
        usable: Sequence[Announcement],
        positions: int,
        beside: Collection[PeerId],
        at_once: int,
    ) -> None:
        """Ask while a session opens on this route in place of a lost hop: it waits for no answer.

        The rest is as for `PeerFinder.find`.
        """
        self._is_outdone = None
        asking, self._left = self._asking, self._left - 1
        if self._left >= 0 and (note := asking.ask_soon(route, connections, usable, positions, self)) is not None:
            costs = partial(asking.costs, route, positions=positions, beside=beside, at_once=at_once)
            self._is_outdone = lambda: asking.is_outdone(route, usable, costs, note)

    def is_outdone(self) -> bool:
        """Whether others are better than the route where a session has just opened, by the answers that are there."""
        return self._is_outdone is not None and self._is_outdone()

    def settle(self, route: Route) -> None:
        """The session opens on this route: servers that were asked before expect it no more."""
        peers = {hop.peer for hop in route}
        for connection in [each for peer, each in self.asked.items() if peer not in peers]:
            self._asking.take_back(connection)


def _of_hop_s(hop: Hop, cost: HopCost) -> float:
    return cost.hop_s + len(hop.span) * cost.block_s
