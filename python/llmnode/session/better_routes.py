"""Looks for a route that is better than that of a session, if going over to it repays the replay.

The servers of such a route have computed for this client, if only in a trial. Those that only say that they are better
are tried first. Each look is one of a client's. Sessions that wait for each other, as the rows of a batch do, move
together, and others one by one.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import trio

from llmnode.core.moves import NewHop, chance, crowded, find_moves, price_s, repays, steps_left
from llmnode.core.peers.bans import Bans
from llmnode.core.peers.ways import believed_ways
from llmnode.core.route import HopCost

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.moves import Move
    from llmnode.core.peers.standing import DecodeTime
    from llmnode.core.route import Hop, Route
    from llmnode.session.newcomers import Newcomers
    from llmnode.session.peer_records import PeerRecords
    from llmnode.session.reaching import Reaching
    from llmnode.session.trials import Trials
    from llmnode.swarm.pool import ConnectionPool
    from llmnode.wire.session_terms import SessionTerms

FAILED_S, MOST_FAILED_S = 60.0, 3600.0
MOST_CROWD = 64
"""No more decodes are believed to be at a server of the route: its word would keep sessions there for ever."""
LOADS = 2
"""Loads count as the same if they are in the same half of a decode."""


class RowAt(NamedTuple):
    """Where a row stands that is to move."""

    terms: SessionTerms
    position: int


@dataclass(frozen=True, slots=True)
class Standpoint:
    """A session between two steps, and the rows that move with it."""

    route: Route
    rows: Sequence[RowAt]
    """Itself first."""
    without_kv: Callable[[Sequence[Announcement]], Collection[PeerId]]
    """The servers that have no KV for all of them."""
    steps: int
    step_s: float
    """The time of a step, as it has measured it."""

    @property
    def terms(self) -> SessionTerms:
        return self.rows[0].terms

    @property
    def position(self) -> int:
        return self.rows[0].position


@dataclass(frozen=True, slots=True)
class BetterRoute:
    """A move that repays its price."""

    move: Move
    price_s: float
    gain_s: float
    """The time that it is expected to save in all, without the price."""
    usable: Sequence[Announcement]


@dataclass(frozen=True, slots=True)
class Moved:
    """Other peers have taken the place of some that served well, since they are better."""

    left: tuple[PeerId, ...]
    taken_over_by: tuple[PeerId, ...]
    positions: int
    """The number of positions that were replayed."""
    stall_s: float
    """The time that it took, with all rows that moved together."""
    price_s: float
    """The time that it was expected to take."""
    saved_s: float
    """The time that each step was expected to be shorter."""


@dataclass(slots=True)
class LastLook:
    """A session, or one of the rows that wait for each other, saw this when it looked last.

    If nothing is different it need not look again.
    """

    next_s: float | None = None
    """When to look next."""
    tried: int = 0
    """The moves that were tried."""
    route: Route = ()
    news: Collection[object] = ()
    step_s: float = 0.0
    waits: bool = True
    """There was a better route. The session was to wait, or it did not repay its price yet."""
    tries: bool = False
    """Servers are tried that say that they are better."""

    def is_like(self, session: Standpoint, news: Collection[object], drift: float) -> bool:
        """Whether the same servers are known as then, and steps of the same route take the same time."""
        is_same = (self.route, self.news) == (session.route, news)
        return not self.waits and is_same and abs(session.step_s - self.step_s) <= drift * self.step_s


@dataclass(slots=True)
class _Prices:
    """The figures for the price of a move of a session, and of the rows that move with it."""

    session: Standpoint
    servers: Mapping[PeerId, Announcement]
    costs: Mapping[PeerId, HopCost]
    decodes: Mapping[PeerId, DecodeTime]
    pool: ConnectionPool
    upload_bytes_per_s: float
    """The client's own."""
    needs_upload: bool = field(default=False, init=False)
    """The price depended on it."""

    def price_s(self, move: Move) -> float:
        session = self.session
        before = session.route[move.first - 1].peer if move.first else None
        new = []
        for hop in move.hops:
            offer = self.servers[hop.peer].offer
            prefill_s = offer.speed.prefill_s or offer.block_us / 1e6 or HopCost().block_s
            prefill_s *= len(hop.span) * self.decodes[hop.peer].slowdown
            new.append(NewHop(self._input_s(before), prefill_s, self._brought_s(hop)))
            before = hop.peer
        peers = [hop.peer for hop in move.after(session.route)]
        positions = sum(row.position for row in session.rows)
        return price_s(new, positions, max(2 * self.costs[peer].way_s for peer in peers))

    def _input_s(self, sender: PeerId | None) -> float:
        rate = self._own_upload() if sender is None else self.servers[sender].offer.speed.upload_bytes_per_s
        terms = self.session.terms
        return terms.form.bytes_of(1) / (rate or terms.policy.standing.first_bytes_per_s)

    def _brought_s(self, hop: Hop) -> float:
        """The time for the adapters and the prompts that the client brings to `hop`, as far as they are not there.

        Each row brings its own prompts.
        """
        all_terms = [row.terms for row in self.session.rows]
        size_bytes = sum(each.prompts.of_blocks(hop.span.start, hop.span.end).size_bytes for each in all_terms)
        offered = {each.digest for each in self.servers[hop.peer].offer.adapters}
        living = [each.adapters for each in self.pool.living() if each.peer == hop.peer]
        adapters = {each.adapter.digest: each.adapter for each in all_terms if each.adapter is not None}
        for adapter in [each for digest, each in adapters.items() if digest not in offered]:
            parts = sum(len(adapter.parts[each.block]) for each in adapter.manifest.within(hop.span))
            size_bytes += min((each.lacking_bytes(adapter, hop.span) for each in living), default=parts)
        first_bytes_per_s = self.session.terms.policy.standing.first_bytes_per_s
        return size_bytes / (self._own_upload() or first_bytes_per_s) if size_bytes else 0.0

    def _own_upload(self) -> float:
        self.needs_upload = True
        return self.upload_bytes_per_s


class BetterRoutes:
    """For one client. `candidates` names the servers with KV for a number of positions."""

    def __init__(
        self,
        pool: ConnectionPool,
        records: PeerRecords,
        reaching: Reaching,
        proofs: tuple[Trials, Newcomers],
        candidates: Callable[[int], list[Announcement]],
        rng: random.Random,
    ) -> None:
        self.rng = rng
        self.is_busy = False
        """A session of the client looks, or moves."""
        self.failed = Bans(FAILED_S, MOST_FAILED_S)
        """Peers that did not take over a session. They are no better route for a while, whatever they say."""
        self._pool = pool
        self._records = records
        self._reaching = reaching
        self._trials, self._newcomers = proofs
        self._candidates = candidates

    @contextmanager
    def looking(self) -> Iterator[None]:
        """While one session looks and moves, no other one does."""
        self.is_busy = True
        try:
            yield
        finally:
            self.is_busy = False

    def find(self, session: Standpoint, last: LastLook) -> BetterRoute | None:
        """The move that saves most of those that repay, if the session is to make it now. Changes `last`."""
        policy, now_s = session.terms.policy.moves, trio.current_time()
        current = {hop.peer for hop in session.route}
        usable = self._records.good(self._candidates(session.terms.max_length))
        unfit = {*self.failed.banned(now_s), *session.without_kv(usable), *self._full_links(session)}
        usable = [each for each in usable if each.peer in current or each.peer not in unfit]
        servers = {each.peer: each for each in usable}
        if not current <= servers.keys():  # one is about to leave, or has failed others
            return None
        self._reaching.measure_some(current, usable)
        served = {each.peer for each in usable if each.peer in current or self._newcomers.has_served(each, now_s)}
        news = self._news(usable, served)
        if last.is_like(session, news, policy.drift):
            return None
        last.route, last.news, last.step_s, last.waits = session.route, news, session.step_s, False
        has_tried, last.tries = last.tries, False
        decodes = self._records.decodes(usable)
        others = min(MOST_CROWD, max(decodes[peer].others for peer in current))
        # Where there are other servers there are other clients, which see the same newcomer.
        share = chance(max(others, 1.0) if len(usable) > len(current) + 1 else others, policy)
        proven = [each for each in usable if each.peer in served]
        known = self._best(session, proven, decodes, others * share, last)
        if known is not None:
            last.waits = True
            return known if self.rng.random() < share else None
        if len(served) < len(usable):
            said = self._best(session, usable, decodes, others * share, last)
            if said is not None:  # next time one knows whether it is true
                last.waits, last.tries = True, not has_tried
                self._trials.begin([servers[hop.peer] for hop in said.move.hops if hop.peer not in served])
                self._reaching.measure_some([hop.peer for hop in said.move.hops], usable)
        return None

    def _full_links(self, session: Standpoint) -> list[PeerId]:
        """The servers that do not take all rows over the connection that they would come over."""
        most = session.terms.policy.route.sessions_per_link - len(session.rows)
        return [each.peer for each in self._pool.living() if len(each.sessions) > most]

    def _best(
        self,
        session: Standpoint,
        chosen: Sequence[Announcement],
        decodes: Mapping[PeerId, DecodeTime],
        crowd: float,
        last: LastLook,
    ) -> BetterRoute | None:
        """The best move that repays among the `chosen` servers, which are believed as if they had been tried."""
        terms, policy, now_s = session.terms, session.terms.policy.moves, trio.current_time()
        current = {hop.peer for hop in session.route}
        believed, costs = self._records.costs_and_doubts(
            chosen,
            terms.max_length,
            explored=[each.peer for each in chosen if not self._records.standing.is_proven(each.peer, now_s)],
            at_once=session.position,
            without_one=current,
        )
        # The session has KV where it is, and what makes its peers dearer is meant for new sessions. The other rows come
        # along, and their steps are there at the same time.
        crowd += len(session.rows) - 1
        costs = {
            peer: believed[peer] if peer in current else crowded(cost, decodes[peer], crowd)
            for peer, cost in costs.items()
        }
        held = [(each.peer, each.offer.span) for each in chosen]
        ways = believed_ways(chosen, self._reaching.round_trips_s())
        servers = {each.peer: each for each in chosen}
        left = steps_left(terms.max_length, session.position, session.steps)
        for move in find_moves(session.route, held, costs, ways, session.step_s):
            prices = _Prices(session, servers, costs, decodes, self._pool, self._reaching.upload_bytes_per_s())
            price = prices.price_s(move)
            is_much = move.saved_s >= policy.least_share * session.step_s
            if prices.needs_upload and is_much:
                self._reaching.measure_upload(servers[move.hops[0].peer], policy.upload_again_s)
            if repays(move, session.step_s, price, left, policy):
                return BetterRoute(move, price, move.saved_s * left, chosen)
            last.waits = last.waits or is_much
        return None

    def _news(self, usable: Sequence[Announcement], served: Collection[PeerId]) -> frozenset[object]:
        """All that the choice of a route depends on, as coarsely as it matters."""
        near = self._reaching.round_trips_s()
        return frozenset(
            (
                each.peer,
                each.offer.span.start,
                each.offer.span.end,
                each.offer.block_us,
                round(LOADS * (each.offer.load or 0.0)),
                each.peer in served,
                each.peer in near,
            )
            for each in usable
        )
