"""Finds the peers for a session: routes over the view, connections to their peers, bans and suspicions.

A session asks it for others when it has lost a peer. It knows no session.
"""

from __future__ import annotations

import logging
import random
from contextlib import suppress
from copy import copy
from functools import partial
from math import inf
from typing import TYPE_CHECKING

import trio

from llmnode.core.announcement import PeerState
from llmnode.core.peers.absence import explain_absence
from llmnode.core.peers.tastes import Tastes, draw_numbers
from llmnode.core.peers.ways import believed_ways
from llmnode.core.peers.whereabouts import groups_of
from llmnode.core.route import Hop, Route, cost_s, find_detour, find_route
from llmnode.core.span import Span
from llmnode.core.view import online
from llmnode.errors import NoRoute, PeerError
from llmnode.session.asking import Asking
from llmnode.session.better_routes import BetterRoutes
from llmnode.session.failure_reports import FailureReports
from llmnode.session.newcomers import Newcomers
from llmnode.session.peer_records import PeerRecords
from llmnode.session.reaching import Reaching
from llmnode.session.standbys import Standbys
from llmnode.session.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.peers.peer_speed import PromisedTime
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import Held, Ways
    from llmnode.receipts.book import Run
    from llmnode.session.asking import AskingTurn
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.peer_connection import PeerConnection
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.chunk_path import ChunkResult

log = logging.getLogger(__name__)

NAMED = 4
"""The most precisions that a message names."""
MOST_INTRODUCED = 64
"""A client remembers this many next hops that it has told a server about."""
MOST_TWINS = 4
"""A spot check connects to this many peers, to find one of another address group."""


class PeerFinder:
    """Finds peers of one model for the sessions of one client, over what the view knows at the time."""

    def __init__(
        self,
        model: ModelInfo,
        pool: ConnectionPool,
        swarm: Swarm,
        policy: ClientPolicy,
        rng: random.Random | None = None,
        run: Run = trio.to_thread.run_sync,
    ) -> None:
        """`run` runs what takes long, off the event loop."""
        self.model = model
        self.pool = pool
        self.swarm = swarm
        self.policy = policy
        self.rng = rng or random.Random()
        self.run = run
        self.others: Sequence[str] = ()
        """The names of other precisions that could have been found instead of that of the model."""
        self.reaching = Reaching(pool, policy.route, swarm.met_in)
        self._trials = Trials(model, policy, self.reaching, self.note_served, self.report)
        self.records = PeerRecords(model, policy, pool, swarm, self.reaching, self._trials)
        self.reports = FailureReports(model, policy, self.records, self._trials, self.group_of, self.try_others)
        self._newcomers = Newcomers(model.blocks, policy, self.records.standing, self._trials, self.rng)
        proofs = self._trials, self._newcomers
        self.better_routes = BetterRoutes(pool, self.records, self.reaching, proofs, self._candidates, self.rng)
        self._standbys = Standbys(pool, policy.route)
        self.asking = Asking(pool, self.records, self.reaching, policy.route)
        self._tastes = Tastes(policy.route.near, partial(draw_numbers, copy(self.rng)))

    async def look_up(self) -> None:
        """Ask the directory for peers of the model. The view has them then."""
        await self.swarm.look_up(self.model.digest)

    def all_have_addresses(self) -> bool:
        """Whether each peer of the model names an address. One without may just have lost its relays."""
        return all(each.addresses for each in self._candidates())

    def advise(self) -> None:
        """No session could be opened. If the precision was found, that may have been a mistake: say what to do."""
        if self.others:
            text = "no session in %s, in which the model was found: connect again, or name the dtype (also served: %s)"
            log.warning(text, self.model.precision.name, ", ".join(self.others[:NAMED]))

    def report(self, error: PeerError) -> None:
        """A peer failed: see `FailureReports.report`."""
        self.reports.report(error)

    async def note_slow(self, span: Span, slow: Collection[PeerId] = ()) -> None:
        """Peers are much slower than they say, perhaps busy. Others are tried, until some have computed `span`."""
        self.try_others()
        await self.wait_for_trials(span, slow)

    def try_others(self, group: str | None = None) -> None:
        """Begin to try several servers that have not proved themselves, after a failure in this address group, or one
        of nobody's.
        """
        self.records.broken.note(group, trio.current_time())
        self._newcomers.try_all(self.records.good(self._candidates()))

    async def wait_for_trials(self, span: Span, avoid: Collection[PeerId] = ()) -> None:
        """If servers are being tried, until some that have computed, or proved themselves before, cover `span`."""
        if self._trials.is_running:
            await self._newcomers.wait(span, self.records.good(self._usable()), avoid)

    def promised_times(self, route: Route) -> list[PromisedTime | None]:
        """The promised time of the peer of each hop; None if no other peer could take its place."""
        usual_s, now_s = self.policy.step_patience_s, trio.current_time()
        return self.records.standing.promised_times(route, self._usable(), usual_s, now_s)

    def instead_s(
        self, hop: Hop, length: int, *, beside: Collection[PeerId], at_once: int, since_s: float = -inf
    ) -> float | None:
        """The time of a position at the best others for the blocks of a hop that have computed lately, and again since
        `since_s`, and have KV for this `length`. None if there are none.
        """
        living = {each.peer for each in self.pool.living() if each.computed_s >= since_s} - {hop.peer}
        others, now_s = self.records.good(self._candidates(length)), trio.current_time()
        usable = [each for each in others if each.peer in living and self._newcomers.has_served(each, now_s)]
        costs = self.records.costs(usable, length, beside=beside, at_once=at_once)
        try:
            return cost_s(find_detour(hop.span, _held(usable), costs, self._ways(usable)), costs)
        except NoRoute:
            return None

    async def has_replacement(self, hop: Hop, length: int, since_s: float) -> bool:
        """Whether others that have computed since then could take the place of a hop for this `length`.

        If there are none, others are tried first: those that have proved themselves, and then newcomers.
        """
        instead_s = partial(self.instead_s, hop, length, beside=(), at_once=0, since_s=since_s)
        if instead_s() is None:
            others = [each for each in self.records.good(self._candidates(length)) if each.peer != hop.peer]
            silent = await self._newcomers.try_again(hop.span, others, self.pool.living(), since_s)
            if instead_s() is None:
                await self.note_slow(hop.span, {hop.peer, *silent})
        return instead_s() is not None

    def note_served(self, result: ChunkResult) -> None:
        """The hops of a session have computed a chunk, and all that we can check was right."""
        now_s, positions = trio.current_time(), result.chunk.length
        for timing in (output.timing for output in result.outputs):
            took_s = timing.elapsed_us / 1e6
            self.records.standing.note_served(timing.peer, len(timing.span), positions, took_s, now_s, timing.beside)
            self.records.own.note_step(timing.peer, (timing.queue_us + timing.compute_us) / 1e6, now_s)

    def group_of(self, peer: PeerId) -> str | None:
        """The address group of a peer that we are connected to."""
        return next((each.source.group for each in self.pool.living() if each.peer == peer), None)

    def suspect(self, peers: Collection[PeerId]) -> None:
        """One of these peers lied, and it is not known which."""
        self.records.suspicion.suspect(peers, trio.current_time())

    async def find(
        self,
        span: Span,
        positions: int,
        avoid: Collection[PeerId],
        *,
        hurry: bool,
        beside: Collection[PeerId] = (),
        at_once: int = 0,
        turn: AskingTurn | None = None,
    ) -> tuple[Route, Mapping[PeerId, PeerConnection]]:
        """Hops that cover `span`, over peers not in `avoid`; in a `hurry` also over those that have failed, if needed.

        If possible they have KV for the first of these `positions`, of which a replay needs `at_once`. If possible they
        are not at the peers `beside`, which have other hops of the session. A `turn` asks them how busy they are, and
        is not waited for. Raises NoRoute, or the PeerError of a peer that could not be reached.
        """
        await self.wait_for_trials(span, avoid)
        others = [each for each in self._candidates(positions) if each.peer not in avoid]
        usable = self.records.good_or_soon(others, span) if hurry else self.records.good(others)
        try:
            costs = self.records.costs(usable, positions, beside=beside, at_once=at_once)
            route = find_detour(span, _held(usable), costs, self._ways(usable))
        except NoRoute as error:
            raise NoRoute(error.missing, self._hint(error.missing, positions, avoid)) from None
        connections = await self.reach(route, usable)
        if turn is not None:
            turn.ask_beside(route, connections, usable, positions, beside, at_once)
        self.warm_standbys(route)
        return route, connections

    async def reach(self, route: Route, usable: Sequence[Announcement]) -> Mapping[PeerId, PeerConnection]:
        """Connections to the peers of `route`, out of the `usable` ones. Raises PeerError if one is not reached."""
        connections, errors = await self.reaching.connect(route, usable)
        if errors:
            raise errors[0]
        return connections

    async def introduce(self, connection: PeerConnection, peer: PeerId) -> None:
        """Tell the server at `connection` about `peer`, unless it was told a moment ago: the sessions of a batch have
        the same hops. Raises PeerUnreachable.
        """
        told, now_s = connection.introduced, trio.current_time()
        if told.get(peer, -inf) + self.policy.route.introduced_s <= now_s:
            if len(told) >= MOST_INTRODUCED:
                told.clear()
            told[peer] = now_s
            await self.swarm.introduce(connection, [peer])

    async def wait_changed(self) -> None:
        """Until other peers are known than now."""
        await self.swarm.wait_changed()

    def distrust(self, peer: PeerId) -> None:
        """The peer computed something else than others did: it is not to be used for a long time."""
        self.records.suspicion.distrust(peer, trio.current_time())

    async def find_twin(
        self, span: Span, avoid: Collection[PeerId], groups: Collection[str]
    ) -> tuple[Hop, PeerConnection]:
        """One peer that computes all of `span` and has not failed lately. Raises as `find` does.

        If possible it is in none of the address `groups`: peers of one group may all be one stranger's.
        """
        good = self.records.good(self._candidates())
        twins = [each for each in good if each.offer.span.covers(span) and each.peer not in avoid]
        if not twins:
            raise NoRoute([span])
        costs = self.records.costs(twins)
        met = self.swarm.met_in()
        twins.sort(key=lambda each: (not groups_of(each, met).isdisjoint(groups), costs[each.peer].hop_s))
        found: list[tuple[Hop, PeerConnection]] = []
        for twin in twins[:MOST_TWINS]:
            hop = Hop(twin.peer, span)
            connections, errors = await self.reaching.connect([hop], twins)
            if errors and not found:
                raise errors[0]
            found += [(hop, connection) for connection in connections.values()]
            if found[-1][1].source.group not in groups:
                return found[-1]
        return found[0]

    async def connected_route(
        self, failed: dict[PeerId, PeerError], positions: int
    ) -> tuple[Route, Mapping[PeerId, PeerConnection]]:
        """A route for that number of positions over peers that have not `failed`, each with a living connection.

        Peers that cannot be reached are added to `failed`. Raises NoRoute or the PeerError that leaves no route, or the
        latest when this has taken too long: strangers can announce any number of peers that do not exist.
        """
        until_s, asking = trio.current_time() + self.policy.route.reach_s, self.asking.turn()
        explored: Collection[PeerId] | None = None
        while True:
            await self.wait_for_trials(Span(0, self.model.blocks))
            usable = [each for each in self._candidates(positions) if each.peer not in failed]
            if explored is None:
                explored = await self._newcomers.explore(self.records.good(usable))
            route = self._route(usable, failed, positions, explored)
            with self.records.own.opening(route):
                connections, errors = await self.reaching.connect(route, usable)
                if not errors and await asking.has_become_dearer(route, connections, usable, positions):
                    continue
            if not errors:
                self.reaching.measure_some([hop.peer for hop in route], usable)
                asking.settle(route)
                return route, connections
            explored = None
            for error in errors:
                self.report(error)
                failed[error.peer or route[0].peer] = error
            if trio.current_time() >= until_s:
                raise errors[-1]
            self.reaching.warm_some([each for each in self.records.good(usable) if each.peer not in failed])

    def _route(
        self,
        usable: Sequence[Announcement],
        failed: dict[PeerId, PeerError],
        positions: int,
        explored: Collection[PeerId],
    ) -> Route:
        """A route over peers that are not banned, or else also over those of `usable` whose bans end first."""
        good = self.records.good(usable)
        with suppress(NoRoute):
            costs = self._tastes.of(self.records.costs(good, positions, explored=explored))
            return find_route(self.model.blocks, _held(good), costs, self._ways(good))
        usable = self.records.good_or_soon(usable, Span(0, self.model.blocks))
        try:
            costs = self._tastes.of(self.records.costs(usable, positions))
            return find_route(self.model.blocks, _held(usable), costs, self._ways(usable))
        except NoRoute as error:
            if failed:
                raise next(reversed(failed.values())) from error
            raise NoRoute(error.missing, self._hint(error.missing, positions)) from None

    def warm_standbys(self, route: Route) -> None:
        """Connect to the peers that would take the place of each hop, unless that was done a moment ago."""
        if not self._standbys.is_due(route):
            return
        peers = {hop.peer for hop in route}
        others = [each for each in self.records.good(self._candidates()) if each.peer not in peers]
        self._standbys.warm(route, others, self.records.costs(others), self._ways(others))

    def _ways(self, announcements: Sequence[Announcement]) -> Ways:
        return believed_ways(announcements, self.reaching.round_trips_s())

    def good(self) -> Sequence[Announcement]:
        """Those that have not failed lately, in a random order."""
        return self.records.good(self._candidates())

    def holders(self) -> list[Announcement]:
        """All that announce blocks of the model, whether or not they can be used now, without those that have left."""
        profile, blocks = self.model.profile, self.model.blocks
        return [
            each
            for each in self.swarm.view.announcements()
            if each.offer.blocks == blocks
            and (each.offer.profile == profile or each.offer.computes(profile))
            and each.offer.state is not PeerState.LEFT
        ]

    def _candidates(self, positions: int = 0) -> list[Announcement]:
        """The same as `_usable` in a random order: clients take different ones of equal peers."""
        usable = self._usable(positions)
        self.rng.shuffle(usable)
        return usable

    def _usable(self, positions: int = 0) -> list[Announcement]:
        """Peers whose KV is large enough for `positions` when all of it is free."""
        profile, blocks, route = self.model.profile, self.model.blocks, self.policy.route
        excluded = self.records.suspicion.excluded(trio.current_time())
        is_told = route.allowed is not None or route.blocked
        usable = [
            each
            for each in online(self.swarm.view.announcements())
            if each.offer.kv_tokens >= positions
            and each.offer.blocks == blocks  # others are false
            and (each.offer.profile == profile or each.offer.computes(profile))
            and each.peer not in excluded
            and (not is_told or route.may_use(each.peer))
        ]
        return self.asking.worse_of(usable)

    def _hint(self, missing: Sequence[Span], positions: int, failed: Collection[PeerId] = ()) -> str:
        """Says what the swarm has instead, if anything, and what to do."""
        known, excluded = self.swarm.view.announcements(), self.records.suspicion.excluded(trio.current_time())
        explain = partial(explain_absence, self.model, missing, known, positions=positions, failed=failed)
        why = explain(clocks=self.swarm.judge_clocks(), excluded=excluded)
        route = self.policy.route
        is_told = route.allowed is not None or route.blocked
        return f"{why}. This client was told to leave out some servers" if is_told else str(why)


def _held(announcements: Sequence[Announcement]) -> list[Held]:
    """All peers with their blocks, as routes are found over them. A `Hop` each would take longer than the search."""
    return [(each.peer, each.offer.span) for each in announcements]
