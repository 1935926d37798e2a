"""The standing of peers with a client: what it has seen of them, and how far it believes what they say.

A peer's word costs it nothing: a liar says that it is the fastest, and gets every session. So a peer that has served us
counts as fast as we have seen, or as slow as it says. A step that had others of ours beside it is compared with what
the peer says of a decode in that company. Another peer counts as slow as it says, but hardly faster or nearer than
those that we know, and as slow as its steps were. A small share of new sessions believes such peers, once they have
computed something in a trial, so that fast ones are found. Knows no clock: the time is told.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from statistics import median, median_low
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.peers.peer_speed import PromisedTime
from llmnode.core.route import HopCost, covers
from llmnode.core.speed import KB

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from llmnode.core.announcement import Announcement
    from llmnode.core.ids import PeerId
    from llmnode.core.policy import StandingPolicy
    from llmnode.core.route import Route

new_tuple = tuple.__new__
"""Makes a named tuple in half of the time, where there are thousands."""
LEAST_S = HopCost().hop_s
"""Going to a peer never counts as less."""
SLOW = 2.0
"""A time that nobody has measured counts as this number of times the usual one."""
MOST_SUPPOSED_S = 0.1
"""Sending a hidden state is never supposed to take longer. If few servers have measured it, one of them decides what
the usual time is, and may be a stranger."""
PEERS = 4096
"""A client remembers this many. Those that served it longest ago are forgotten first."""


@dataclass(slots=True)
class _Known:
    positions: int = 0
    """Those of short steps, since it last failed."""
    failures: int = 0
    """Sessions that it took, and then did not serve, since it last served one."""
    short_steps: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=16))
    """The latest ones: the number of blocks, the time that each took, and our positions that were there beside it."""
    short_s: float = 0.0
    """When the latest of them ended."""
    at_s: float = 0.0


class DecodeTime(NamedTuple):
    """The time of a decode through a block, by what a peer says."""

    alone_s: float
    further_s: float
    """The time that each further decode of a forward adds."""
    others: float
    """The decodes that other clients have there at a time."""

    def beside_s(self, own: float) -> float:
        """Beside this number of `own` decodes. It waits for half of a forward that runs when it comes, and then shares
        one with those that are there at a time.
        """
        there = self.others + own
        return self.alone_s + there * self.further_s + min(1.0, there) * self.alone_s / 2

    @property
    def slowdown(self) -> float:
        """The factor by which the others make it longer."""
        return self.beside_s(0.0) / self.alone_s if self.alone_s else 1.0 + self.others


class Candidate(NamedTuple):
    """A peer that could get a session, and what it says. A tuple: each choice makes one for each server of a swarm."""

    peer: PeerId
    said_block_s: float
    """For a decode beside the others that are there; 0 if it says nothing."""
    sessions: int
    """The sessions that this client has there now."""
    round_trip_s: float | None = None
    """Measured by this client; None if it has not."""
    said_upload_s: float = 0.0
    """The time in which it sends one position's hidden state, by its own measurement; 0 if it says nothing."""
    decode: DecodeTime | None = None
    """How its decodes depend on those that are there. None if it says nothing, or is idle and was never used."""
    blocks: int = 1
    """The number of those that it has, as it says."""

    def said_beside_s(self, own: float) -> float:
        """The time of a decode through a block, as the peer says, beside this number of `own` ones."""
        return self.said_block_s if self.decode is None else self.decode.beside_s(own)

    def filled(self, supposed: Supposed) -> Candidate:
        """The same, with what is supposed of it where nothing was measured."""
        peer, block_s, sessions, round_trip_s, upload_s, decode, blocks = self
        block_s, upload_s = block_s or supposed.block_s, upload_s or supposed.upload_s
        round_trip_s = round_trip_s or supposed.round_trip_s or None
        return Candidate(peer, block_s, sessions, round_trip_s, upload_s, decode, blocks)


class Supposed(NamedTuple):
    """The times of a peer that itself, or this client, has not measured: `SLOW` times what they usually are.

    So nobody is preferred for want of a measurement, and one that says that it is very slow changes nothing for others,
    or little if it alone has measured: an upload is supposed to take at most `MOST_SUPPOSED_S`.
    """

    block_s: float
    round_trip_s: float
    """0 if none is known."""
    upload_s: float

    @staticmethod
    def of(candidates: Sequence[Candidate]) -> Supposed:
        return Supposed(
            _slow([each.said_block_s for each in candidates]) or HopCost().block_s,
            _slow([each.round_trip_s for each in candidates]),
            min(_slow([each.said_upload_s for each in candidates]), MOST_SUPPOSED_S),
        )


class Usual(NamedTuple):
    """The medians of what peers cost that have proved themselves. They are the measure for newcomers."""

    hop_s: float
    block_s: float
    blocks: float

    def times(self, times: float) -> Usual:
        return Usual(times * self.hop_s, times * self.block_s, self.blocks)

    def least_block_s(self, blocks: int) -> float:
        """The least cost of a block at a newcomer that says that it has this number of `blocks`.

        If these are more than usual, they would save a way. That is a word of the newcomer, too.
        """
        return self.block_s + self.hop_s * max(0.0, 1 / self.blocks - 1 / blocks)


class OwnUse(NamedTuple):
    """Says what the client itself has at a peer."""

    sessions: int = 0
    lately: int = 0
    """Those of its sessions which the load does not count yet."""
    load: float = 0.0
    """The steps of its sessions that are there at a time, now."""
    announced: float = 0.0
    """The same when the peer announced its load, which has them in it: the most that it may have been."""

    def without_one(self) -> OwnUse:
        """The same if one of the sessions were not there."""
        others = max(0, self.sessions - 1)
        share = others / self.sessions if self.sessions else 1.0
        return OwnUse(others, min(self.lately, others), self.load * share, self.announced)


def candidate_of(
    announcement: Announcement, row_bytes: int, round_trip_s: float | None = None, own: OwnUse | None = None
) -> Candidate:
    """The peer of an announcement, with what the client has measured. `row_bytes` is the size of a hidden state.

    `own` is None at peers that have computed nothing for this client, and at which it has no session. The decodes of
    others are in the load that the peer announces. Those of this client are counted anew, since its sessions may have
    ended since then. Each that came lately is there for the share of the time in which it is not on its way. If the
    peer announces no load, all do so. So sessions spread over peers of the same blocks.
    """
    offer = announcement.offer
    block_s, decode, sessions = offer.block_us / 1e6, None, 0
    if block_s and (own is not None or offer.load):
        own = own or OwnUse()
        others = max(0.0, offer.load - own.announced) if offer.load else 0.0
        decode, sessions = DecodeTime(block_s, offer.further_block_s, others), own.sessions
        if sessions or others:
            alone_s = block_s * len(offer.span)
            share = alone_s / (alone_s + (round_trip_s or 0.0))
            settled = 0 if offer.load is None else sessions - own.lately
            block_s = decode.beside_s(min(own.load, settled * share))
            block_s += (sessions - settled) * share * decode.further_s
    upload_kb_per_s = offer.speed.upload_kb_per_s
    upload_s = row_bytes / (KB * upload_kb_per_s) if upload_kb_per_s else 0.0
    blocks = offer.span.end - offer.span.start
    return new_tuple(Candidate, (announcement.peer, block_s, sessions, round_trip_s, upload_s, decode, blocks))


def settled_costs(candidates: Sequence[Candidate]) -> dict[PeerId, HopCost]:
    """The cost of a token at each of the peers, for a client to which they have proved to be as fast as they say."""
    return {
        each.peer: HopCost(
            max(LEAST_S, (each.round_trip_s or 0.0) + each.said_upload_s),
            each.said_block_s,
            (each.round_trip_s or 0.0) / 2,
        )
        for each in unmeasured_as_slow(candidates)
    }


class Standing:
    """The peers of one client."""

    def __init__(self, policy: StandingPolicy) -> None:
        self._policy = policy
        self._known: dict[PeerId, _Known] = {}

    def note_served(
        self, peer: PeerId, blocks: int, positions: int, took_s: float, now_s: float, beside: float = 0.0
    ) -> None:
        """A step of ours went through the peer, and everything that we can check was right.

        Meanwhile the peer had this number of our positions `beside` it, on average.
        """
        known = self._remember(peer, now_s)
        if positions > self._policy.short_step:
            return
        known.short_steps.append((blocks, took_s, beside))
        known.short_s = now_s
        known.positions += positions
        if known.positions >= self._policy.proven_positions:
            known.failures = 0

    def note_failed(self, peer: PeerId, now_s: float) -> None:
        """The peer took a session of ours, and did not serve it: it refused, hung, or answered nonsense.

        It has to prove itself anew.
        """
        known = self._remember(peer, now_s)
        known.positions = 0
        known.failures += 1

    def is_proven(self, peer: PeerId, now_s: float) -> bool:
        """Whether the peer has served us enough, not too long ago."""
        known = self._fresh(peer, now_s)
        return known is not None and known.positions >= self._policy.proven_positions

    def promised_time(self, peer: PeerId, position_s: float, usual_s: float, now_s: float) -> PromisedTime:
        """The deadline of a peer in the first step of a session, if it announces `position_s` for a position.

        `usual_s` is the patience with one that has proved itself. One that has computed something lately, in a trial
        for example, was quick or slow then: a quick one that answers no step is given up sooner.
        """
        if self.is_proven(peer, now_s):
            return PromisedTime(position_s, usual_s)
        known, policy = self._fresh(peer, now_s), self._policy
        patience_s = policy.first_patience_s
        if known is not None and known.positions and now_s <= known.short_s + policy.tried_s:
            slowest_s = max(took_s for _, took_s, _ in known.short_steps)
            patience_s = min(patience_s, policy.tried_patience_s + policy.tried_patience_times * slowest_s)
        return PromisedTime(position_s, patience_s * 2.0 ** self._failures(known))

    def promised_times(
        self, route: Route, usable: Sequence[Announcement], usual_s: float, now_s: float
    ) -> list[PromisedTime | None]:
        """The promised time of the peer of each hop; None if no other of the `usable` ones could take its place."""
        offers = {each.peer: each.offer for each in usable}
        found: list[PromisedTime | None] = []
        for hop in route:
            offer, others = offers.get(hop.peer), [each.span for peer, each in offers.items() if peer != hop.peer]
            if offer is None or not covers(others, hop.span):
                found.append(None)
            else:
                block_s = offer.block_us / 1e6 or HopCost().block_s
                found.append(self.promised_time(hop.peer, len(hop.span) * block_s, usual_s, now_s))
        return found

    def costs(
        self, candidates: Sequence[Candidate], now_s: float, explored: Collection[PeerId] = ()
    ) -> Mapping[PeerId, HopCost]:
        """The cost of a token at each peer. Newcomers that are `explored` are to be believed more than usual."""
        policy, supposed = self._policy, Supposed.of(candidates)
        costs, seen = {}, []
        for each in candidates:
            if each.peer in self._known and self.is_proven(each.peer, now_s):
                filled = each.filled(supposed)._replace(said_upload_s=each.said_upload_s)
                costs[each.peer] = self._measured(filled, now_s)
                way_s = (each.round_trip_s or 0.0) + min(each.said_upload_s, MOST_SUPPOSED_S)
                if (block_s := self._seen_block_s(filled, way_s)) is not None:
                    seen.append(Usual(max(LEAST_S, way_s), block_s, each.blocks))
        usual = Usual(*map(median_low, zip(*seen, strict=True))) if seen else None
        said_s = [usual.block_s] if usual else [each.said_block_s or supposed.block_s for each in candidates]
        believed = Usual(LEAST_S, median(said_s or [0.0]) / policy.believed_times, math.inf)
        unexplored = usual.times(policy.unproven_cost) if usual else believed
        least_block_s = {blocks: unexplored.least_block_s(blocks) for blocks in {each.blocks for each in candidates}}
        for each in candidates:  # thousands of them
            peer, block_s, sessions, round_trip_s, upload_s, _, blocks = each
            if peer in costs:
                continue
            way_s, hop_least_s, least_s = round_trip_s or supposed.round_trip_s, unexplored.hop_s, least_block_s[blocks]
            if peer in explored:
                hop_least_s, least_s = believed.hop_s, believed.block_s
            hop_s, block_s = way_s + (upload_s or supposed.upload_s), block_s or supposed.block_s
            hop_s, block_s = hop_s if hop_s > hop_least_s else hop_least_s, block_s if block_s > least_s else least_s
            if sessions or peer in self._known:  # it is so for few of them
                known = self._fresh(peer, now_s)
                times, hop_s = self._distrust(each, known), max(hop_s, _excess_s(each.filled(supposed), known))
                hop_s, block_s = times * hop_s, times * block_s
            costs[peer] = new_tuple(HopCost, (hop_s, block_s, way_s / 2))
        return costs

    def _measured(self, candidate: Candidate, now_s: float) -> HopCost:
        """The time beyond what the peer says is the way there, or a lie: it is paid for at each visit."""
        way_s = candidate.round_trip_s or 0.0  # a hop that is pushed to seems nearer to the client than it is
        excess_s = _excess_s(candidate, self._fresh(candidate.peer, now_s))
        hop_s = max(LEAST_S, excess_s, way_s + candidate.said_upload_s)
        return HopCost(hop_s, candidate.said_block_s, way_s / 2)

    def _seen_block_s(self, candidate: Candidate, way_s: float) -> float | None:
        """The time of a token for each block, without the way there. None if the peer is much slower than it says.

        Such a peer says nothing about what others can do. Nor does its way, of which we have measured `way_s`. Steps
        that are pushed to a peer have no such way in them: the peer then counts as fast as it says.
        """
        known, policy = self._known[candidate.peer], self._policy
        if _excess_s(candidate, known, policy.believed_times) >= policy.way_s:
            return None
        said_s, steps = candidate.said_beside_s, known.short_steps
        seen_s = median((took_s - way_s) / blocks - said_s(beside) + said_s(0.0) for blocks, took_s, beside in steps)
        return max(candidate.said_block_s, seen_s)

    def _distrust(self, candidate: Candidate, known: _Known | None) -> float:
        """The factor for the cost of a peer that has not served us."""
        policy, times = self._policy, 2.0 ** self._failures(known)
        return times * policy.entrusted_cost if candidate.sessions >= policy.unproven_sessions else times

    def _failures(self, known: _Known | None) -> int:
        """Those that count."""
        return 0 if known is None else min(known.failures, self._policy.most_failures)

    def _fresh(self, peer: PeerId, now_s: float) -> _Known | None:
        """Knowledge of the peer that is not too old."""
        known = self._known.get(peer)
        return None if known is None or known.at_s + self._policy.keeps_s < now_s else known

    def _remember(self, peer: PeerId, now_s: float) -> _Known:
        known = self._fresh(peer, now_s) or _Known()
        self._known.pop(peer, None)  # to the end
        known.at_s = now_s
        self._known[peer] = known
        if len(self._known) > PEERS:
            del self._known[next(iter(self._known))]
        return known


def _excess_s(candidate: Candidate, known: _Known | None, times: float = 1.0) -> float:
    """The time that its steps took beyond this number of `times` what it says, in the company that they had; 0 if we
    have seen none.
    """
    said_s, steps = candidate.said_beside_s, () if known is None else known.short_steps
    return median(took_s - times * blocks * said_s(beside) for blocks, took_s, beside in steps) if steps else 0.0


def unmeasured_as_slow(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """The same, with what is `Supposed` of them where nothing was measured."""
    supposed = Supposed.of(candidates)
    return [each.filled(supposed) for each in candidates]


def _slow(times_s: Iterable[float | None]) -> float:
    """0 or None stands for one that is not known. The result is 0 then."""
    known = [each for each in times_s if each]
    return SLOW * median(known) if known else 0.0
