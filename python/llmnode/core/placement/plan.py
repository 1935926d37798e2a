"""The shared plan: a few moves after which the swarm is faster. Every node finds the same ones in the same view.

The objective is the throughput of many sessions, which is that of the slowest block. A search by moves sees more than
that one block: it lowers the sum of the cubed deficits of all blocks below the most that any placement could give.
The moves are taken up to the one where the throughput has grown most, less a price for each move. The search is done
again with targets that are only a little above the throughput of now: those look at the slowest blocks alone.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import accumulate
from operator import itemgetter, sub
from typing import TYPE_CHECKING

from llmnode.core.errors import ConfigError
from llmnode.core.placement.servers import Move, most_throughput, worthwhile_lengths
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llmnode.core.placement.policy import PlanPolicy
    from llmnode.core.placement.servers import PlacedServer

NOTHING = 1e-9
"""A block whose speed is below this share of the target is served by nobody: sums of speeds are not exact."""
UNSERVED = 100.0
"""A block that nobody serves weighs as this many of the greatest deficits: it makes the whole swarm useless."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Moves in the order in which they are to begin, and the throughput of the swarm now and after all of them."""

    moves: Sequence[Move]
    now_tokens_per_s: float
    then_tokens_per_s: float


def plan_moves(blocks: int, servers: Iterable[PlacedServer], policy: PlanPolicy) -> Plan:
    """The moves that are worth their price, at most `policy.moves` of them."""
    servers = list(servers)
    tries, plan, most_worth = policy.tries, None, 0.0
    for target in policy.targets:
        search = _Search(blocks, servers, policy, tries)
        search.aim_at(target * min(search.speeds))
        found, worth = _worthwhile(search, policy)
        if plan is None or worth > most_worth:
            plan, most_worth = found, worth
        tries = search.tries
        if tries <= 0:
            break
    assert plan is not None, "a policy has a target"
    return plan


def _worthwhile(search: _Search, policy: PlanPolicy) -> tuple[Plan, float]:
    """The moves that a search finds, up to where they are worth most, and what they are worth less their prices."""
    now = best = min(search.speeds)
    price = policy.price / max(1, len(search.servers))
    worth, kept = 0.0, 0
    moves: list[Move] = []
    while len(moves) < policy.moves:
        found = search.next_moves(policy.moves - len(moves))
        if not found:
            break
        for place in found:
            search.move(place)
            moves.append(Move(search.servers[place.server].peer, place.span))
        then = min(search.speeds)
        gained = (then - now) / max(now, search.nothing) - price * len(moves)
        if gained > worth:
            worth, kept, best = gained, len(moves), then
    if now <= search.nothing and not kept:
        kept = len(moves)  # fewer gaps are better, even if some stay
    elif now > search.nothing and best < now * (1 + policy.least_prices * price):
        worth, kept = 0.0, 0
    return Plan(moves[:kept], now, best if kept else now), worth


def helps_alone(speeds: Sequence[float], mover: PlacedServer, wanted: Span, plan: Plan) -> bool:
    """Whether a move of `plan` is worth making by itself, though those before it were not made.

    It is if the slowest block, of those that have these `speeds` now, gets no slower, and all that are slower than the
    plan makes them get nearer to it.
    """
    after, target = [*speeds], plan.then_tokens_per_s
    for span, change in ((mover.span, -mover.speed), (wanted, mover.at(wanted).speed)):
        for block in range(span.start, span.end):
            after[block] += change
    deficits = [sum(max(0.0, target - speed) ** 3 for speed in each) for each in (speeds, after)]
    return min(after) >= min(speeds) * (1 - NOTHING) and deficits[1] < deficits[0]


def place_newcomer(blocks: int, servers: Iterable[PlacedServer], speeds: tuple[float, ...], policy: PlanPolicy) -> Span:
    """The span for a node that joins with these `speeds`. Nobody else moves for it."""
    if not 1 <= len(speeds) <= blocks:
        raise ConfigError(f"cannot serve {len(speeds)} blocks: the model has {blocks}")
    search = _Search(blocks, servers, policy, newcomer=len(speeds) * speeds[-1])
    return search.best_place(search.speeds, speeds, worthwhile_lengths(speeds))[1]


@dataclass(frozen=True, slots=True)
class _Place:
    server: int
    span: Span


class _Search:
    """A placement that changes move by move, and the deficits of its blocks."""

    def __init__(
        self,
        blocks: int,
        servers: Iterable[PlacedServer],
        policy: PlanPolicy,
        tries: int = 0,
        newcomer: float = 0.0,
    ) -> None:
        """This many `tries` of a server at a length are made. A `newcomer` raises the target by its tokens a second."""
        self.policy = policy
        self.tries = tries
        self.servers = sorted(servers, key=lambda server: server.peer)
        self.spans = [server.span for server in self.servers]
        self._lengths = [worthwhile_lengths(server.speeds) for server in self.servers]
        self._movable = [number for number, server in enumerate(self.servers) if server.movable]
        self.speeds = [0.0] * blocks
        for server in self.servers:
            self._add(server.span, server.speed)
        self.target = most_throughput(blocks, self.servers) + newcomer / blocks or 1.0
        self.nothing = NOTHING * self.target
        self._unserved = UNSERVED * self.target**3

    def aim_at(self, tokens_per_s: float) -> None:
        """Blocks that are faster than this have no deficit. Without a throughput, the bound stays the target."""
        if tokens_per_s > self.nothing:
            self.target = min(self.target, tokens_per_s)
            self._unserved = UNSERVED * self.target**3

    def next_moves(self, most: int) -> list[_Place]:
        """The best single move, or else the best pair of moves. Empty if neither helps."""
        single = max(self._tried(), key=itemgetter(0), default=None)
        if single is not None and single[0] > self._least():
            return [single[1]]
        return self._best_pair() if most > 1 else []

    def move(self, place: _Place) -> Span:
        """Carries a move out. Returns the span that the server had."""
        server, former = self.servers[place.server], self.spans[place.server]
        self._add(former, -server.speeds[len(former) - 1])
        self._add(place.span, server.speeds[len(place.span) - 1])
        self.spans[place.server] = place.span
        return former

    def best_place(self, speeds: Sequence[float], own: Sequence[float], lengths: Iterable[int]) -> tuple[float, Span]:
        """Where a server that is not in `speeds` helps most, and how much. The first of equals."""
        best = (-1.0, Span(0, 1))
        for length in lengths:
            gains = list(accumulate(self._gains(speeds, own[length - 1]), initial=0.0))
            windows = list(map(sub, gains[length:], gains))
            most = max(windows)
            if most > best[0]:
                start = windows.index(most)
                best = most, Span(start, start + length)
        return best

    def _least(self) -> float:
        return 1e-6 * self.target**3

    def _tried(self) -> list[tuple[float, _Place]]:
        """The best place of each candidate, and what its move gains."""
        tried = []
        for number in self._candidates():
            self.tries -= len(self._lengths[number])
            server, span = self.servers[number], self.spans[number]
            speed = server.speeds[len(span) - 1]
            speeds = self.speeds[:]
            for block in range(span.start, span.end):
                speeds[block] -= speed
            gain, wanted = self.best_place(speeds, server.speeds, self._lengths[number])
            if wanted != span:
                tried.append((gain - sum(self._gains(speeds[span.start : span.end], speed)), _Place(number, wanted)))
        return tried

    def _best_pair(self) -> list[_Place]:
        before, best = self._least(), []
        for gain, place in heapq.nlargest(self.policy.pairs, self._tried(), key=itemgetter(0)):
            former = self.move(place)
            for more, other in self._tried():
                if gain + more > before and other.server != place.server:
                    before, best = gain + more, [place, other]
            self.move(_Place(place.server, former))
        return best

    def _candidates(self) -> list[int]:
        """The servers whose moves gain most by the slopes of the deficits: an estimate in few operations for each."""
        most = min(self.policy.candidates, max(0, self.tries))
        if len(self._movable) <= most:
            return self._movable
        target, nothing, unserved = self.target, self.nothing, self._unserved / self.target
        slopes = accumulate(
            (3 * max(0.0, target - speed) ** 2 + (unserved if speed <= nothing else 0.0) for speed in self.speeds),
            initial=0.0,
        )
        upto = list(slopes)
        lengths = {length for own in self._lengths for length in own}
        best = {length: max(map(sub, upto[length:], upto)) for length in lengths}
        estimates = []
        for number in self._movable:
            span, speeds, own = self.spans[number], self.servers[number].speeds, self._lengths[number]
            lost = speeds[span.end - span.start - 1] * (upto[span.end] - upto[span.start])
            if len(own) == 1:
                estimates.append(speeds[-1] * best[own[0]] - lost)
            else:
                estimates.append(max(speeds[length - 1] * best[length] for length in own) - lost)
        order = sorted(range(len(estimates)), key=estimates.__getitem__, reverse=True)
        return [self._movable[place] for place in order[:most]]

    def _gains(self, speeds: Sequence[float], more: float) -> list[float]:
        """The cubed deficit that each block loses if `more` tokens a second are added to its speed."""
        target = self.target
        gains = [
            before * before * before - (after * after * after if (after := before - more) > 0.0 else 0.0)
            if (before := target - speed) > 0.0
            else 0.0
            for speed in speeds
        ]
        if min(speeds) <= self.nothing:
            for block, speed in enumerate(speeds):
                if speed <= self.nothing:
                    gains[block] += self._unserved
        return gains

    def _add(self, span: Span, speed: float) -> None:
        speeds = self.speeds
        for block in range(span.start, span.end):
            speeds[block] += speed
