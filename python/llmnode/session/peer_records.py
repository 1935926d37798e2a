"""A client keeps records of its peers: failures, lies, speed, and what it has there itself.

The cost of a token at each peer follows from that, and from what the peer announces.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from typing import TYPE_CHECKING

import trio

from llmnode.core.peers.absence import ToldReasons
from llmnode.core.peers.bans import Bans
from llmnode.core.peers.broken_promises import BrokenPromises
from llmnode.core.peers.standing import DecodeTime, Standing, candidate_of
from llmnode.core.peers.suspicion import Suspicion
from llmnode.core.peers.whereabouts import groups_of
from llmnode.core.route import HopCost, covers
from llmnode.session.own_use import OwnUses

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.model import ModelInfo
    from llmnode.core.peers.standing import OwnUse
    from llmnode.core.policy import ClientPolicy
    from llmnode.core.route import NoRoute
    from llmnode.core.span import Span
    from llmnode.session.reaching import Reaching
    from llmnode.session.trials import Trials
    from llmnode.swarm.membership import Swarm
    from llmnode.swarm.pool import ConnectionPool

log = logging.getLogger(__name__)


class PeerRecords:
    """Those of the peers of one model."""

    def __init__(
        self,
        model: ModelInfo,
        policy: ClientPolicy,
        pool: ConnectionPool,
        swarm: Swarm,
        reaching: Reaching,
        trials: Trials,
    ) -> None:
        self.own = OwnUses(policy.route.announced_after_s)
        self.bans = Bans(
            policy.route.ban_s, policy.route.longest_ban_s, policy.route.ban_times, policy.route.longest_costly_ban_s
        )
        self.suspicion = Suspicion(policy.trust)
        self.standing = Standing(policy.standing)
        self.broken = BrokenPromises(policy.standing)
        self._told = ToldReasons()
        self._model = model
        self._policy = policy
        self._pool = pool
        self._swarm = swarm
        self._reaching = reaching
        self._trials = trials
        self._crowded = Bans(policy.route.ban_s, policy.route.longest_ban_s)
        self._full_until_s: dict[
            PeerId, float
        ] = {}  # peers without KV, or without a place for our link, by their own word

    def tell_absence(self, absence: NoRoute, until_s: float) -> None:
        """Log why a search that goes on until then has found no peer. All searches of a client say a reason once."""
        now_s = trio.current_time()
        if self._told.is_news(str(absence), now_s):
            log.warning("%s; trying again for %.0f s", absence, until_s - now_s)

    def note_full(self, peer: PeerId, retry_after_s: float, now_s: float) -> None:
        """The peer says that it has no KV for a session, or no place for our link, for this time."""
        still = {each: until_s for each, until_s in self._full_until_s.items() if until_s > now_s}
        self._full_until_s = {**still, peer: now_s + retry_after_s}

    def note_crowded(self, peer: PeerId, now_s: float, retry_after_s: float = 0.0) -> None:
        """The peer has ended our link or a session for others. It counts as full for the time that it says at least,
        and for longer each time: we have its word alone.
        """
        self._crowded.report(peer, now_s)
        self.note_full(peer, max(retry_after_s, self._crowded.left_s(peer, now_s)), now_s)

    def is_full(self, peer: PeerId, now_s: float) -> bool:
        """Whether it has said so, for a time that is not over."""
        return now_s < self._full_until_s.get(peer, now_s)

    def good(self, announcements: Sequence[Announcement]) -> list[Announcement]:
        """Those of peers that have not failed lately."""
        banned = self.bans.banned(trio.current_time())
        return [each for each in announcements if each.peer not in banned]

    def good_or_soon(self, announcements: Sequence[Announcement], span: Span) -> list[Announcement]:
        """Those, and others if the blocks of `span` need them, in the order in which their bans end.

        A peer that has cost much time has the longest ban, so it is used only if nobody else has the blocks. Bans that
        end within `RoutePolicy.ban_s` of each other count as equal.
        """
        now_s = trio.current_time()
        left_s = {each.peer: self.bans.left_s(each.peer, now_s) for each in announcements}
        ordered = sorted(announcements, key=lambda each: left_s[each.peer])
        spans = [each.offer.span for each in ordered]
        needed = bisect_left(range(len(spans)), True, key=lambda number: covers(spans[:number], span))
        longest_s = max((left_s[each.peer] for each in ordered[:needed]), default=0.0)
        most_s = longest_s + self._policy.route.ban_s if longest_s else 0.0
        return [each for each in announcements if left_s[each.peer] <= most_s]

    def costs(
        self,
        announcements: Sequence[Announcement],
        positions: int = 0,
        *,
        explored: Collection[PeerId] = (),
        beside: Collection[PeerId] = (),
        at_once: int = 0,
    ) -> dict[PeerId, HopCost]:
        """Costs by what peers say of themselves, as far as it is believed, and by what we have seen of them.

        Suspected peers, those without KV for the first `positions` (the part that comes `at_once`, and a piece), those
        that have a hop `beside`, and those that were never reached where others could not be are dearer.
        """
        return self.costs_and_doubts(announcements, positions, explored=explored, beside=beside, at_once=at_once)[1]

    def costs_and_doubts(
        self,
        announcements: Sequence[Announcement],
        positions: int = 0,
        *,
        explored: Collection[PeerId] = (),
        beside: Collection[PeerId] = (),
        at_once: int = 0,
        needs_kv: bool = True,
        without_one: Collection[PeerId] = (),
    ) -> tuple[Mapping[PeerId, HopCost], dict[PeerId, HopCost]]:
        """The costs without what makes some peers dearer, and `costs`, be it for what `needs_kv` or not.

        At some peers they are those `without_one` of the client's sessions: for itself it is no load.
        """
        now_s, round_trips_s = trio.current_time(), self._reaching.round_trips_s()
        began_s = {each.peer: [*each.sessions.values()] for each in self._pool.living()}
        own = self.own.at_peers(announcements, began_s, self._swarm.age_s, now_s)
        own |= {peer: own[peer].without_one() for peer in without_one if peer in own}
        row_bytes, first = self._model.row_bytes, min(positions, at_once + self._policy.route.first_positions)
        candidates = [
            candidate_of(each, row_bytes, round_trips_s.get(each.peer), own.get(each.peer)) for each in announcements
        ]
        believed = self.standing.costs(candidates, now_s, explored)
        reached, costs, penalties = {*began_s, *round_trips_s}, dict(believed), self.suspicion.penalties(now_s)
        penalties |= {peer: self._policy.route.second_hop_cost * penalties.get(peer, 1.0) for peer in beside}
        full = {peer for peer in self._full_until_s if self.is_full(peer, now_s)}
        full |= {
            each.peer
            for each in (announcements if needs_kv else ())
            if each.offer.kv_tokens_free < first + each.offer.kv_page  # a quick look: there are thousands
            and each.offer.kv_tokens_free < each.offer.in_pages(first)
        }
        has_doubts, dearer = self.broken.has_any or self._reaching.has_doubts, full.union(penalties)
        met = self._swarm.met_in() if has_doubts else {}
        for each in announcements if has_doubts else [each for each in announcements if each.peer in dearer]:
            peer, doubt_s, wait_s = each.peer, 0.0, self._policy.route.full_cost_s if each.peer in full else 0.0
            if has_doubts and not self.standing.is_proven(peer, now_s):
                groups = groups_of(each, met)
                has_computed = self._trials.has_computed(peer, now_s)
                doubt_s = self.broken.cost_s(groups, now_s, has_computed=has_computed)
                wait_s += 0.0 if peer in reached else self._reaching.doubt_s(groups)
            if wait_s or doubt_s or peer in penalties:
                penalty, cost = penalties.get(peer, 1.0), believed[peer]
                block_s = penalty * cost.block_s + doubt_s / self._model.blocks
                costs[peer] = HopCost(penalty * cost.hop_s + wait_s, block_s, cost.way_s)
        return believed, costs

    def own_uses(self, announcements: Sequence[Announcement]) -> Mapping[PeerId, OwnUse]:
        """The part of the client in the loads that peers announce."""
        return self.own.at_peers(announcements, {}, self._swarm.age_s, trio.current_time())

    def decodes(self, announcements: Sequence[Announcement]) -> dict[PeerId, DecodeTime]:
        """The time of a decode at each peer, by what it says, and the decodes that other clients have there."""
        own, found = self.own_uses(announcements), {}
        for each in announcements:
            load, announced = each.offer.load or 0.0, own[each.peer].announced if each.peer in own else 0.0
            others = max(0.0, load - announced)
            found[each.peer] = DecodeTime(each.offer.block_us / 1e6, each.offer.further_block_s, others)
        return found
