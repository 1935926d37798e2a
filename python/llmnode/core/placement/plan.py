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
from operator import attrgetter, itemgetter, sub
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.placement.ranks import SpanRanks
from llmnode.core.placement.servers import Move, block_speeds, most_at_lengths, worthwhile_lengths
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
    fleet = _Fleet(blocks, servers)
    tries, plan, most_worth = policy.tries, None, 0.0
    for target in policy.targets:
        search = _Search(fleet, policy, tries)
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


@dataclass(frozen=True, slots=True)
class _Place:
    server: int
    span: Span


class _Lacks(NamedTuple):  # a search makes thousands: sooner than a frozen dataclass
    """The deficits of some blocks, their cubes, and the blocks that nobody serves."""

    deficits: Sequence[float]
    cubes: Sequence[float]
    bare: Sequence[int]

    def with_window(self, start: int, window: _Lacks) -> _Lacks:
        """The same, but for the blocks from `start` on that `window` has."""
        deficits, cubes, end = [*self.deficits], [*self.cubes], start + len(window.deficits)
        deficits[start:end], cubes[start:end] = window.deficits, window.cubes
        if not self.bare and not window.bare:
            return _Lacks(deficits, cubes, self.bare)
        others = [block for block in self.bare if not start <= block < end]
        return _Lacks(deficits, cubes, [*others, *(start + block for block in window.bare)])


class _Fleet:
    """The servers before any move. All searches of a plan begin there."""

    def __init__(self, blocks: int, servers: Iterable[PlacedServer]) -> None:
        self.blocks = blocks
        self.servers = sorted(servers, key=attrgetter("peer"))
        self.lengths = [worthwhile_lengths(server.speeds) for server in self.servers]
        own = zip(self.servers, self.lengths, strict=True)
        self.movable = [number for number, (server, lengths) in enumerate(own) if server.movable and lengths]
        """Those that may be worth a move: a server without a speed is worth nothing anywhere."""
        self.speeds = block_speeds(blocks, self.servers)
        self.most = most_at_lengths(blocks, self.servers, self.lengths)


class _Search:
    """A placement that changes move by move, and the deficits of its blocks."""

    def __init__(self, fleet: _Fleet, policy: PlanPolicy, tries: int) -> None:
        """This many `tries` of a server at a length are made."""
        self.policy = policy
        self.tries = tries
        self.servers, self._lengths, self._movable = fleet.servers, fleet.lengths, fleet.movable
        self.spans = [server.span for server in self.servers]
        self._ranks: SpanRanks | None = None
        self.speeds = [*fleet.speeds]
        self.target = fleet.most or 1.0
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
        if self._ranks is not None:
            self._ranks.move(place.server, former, place.span)
        return former

    def best_start(self, lacks: _Lacks, own: Sequence[float], lengths: Iterable[int]) -> tuple[float, int, int]:
        """The most that a server gains, and its start and length there. `lacks` is without it."""
        best = -1.0, 0, 1
        for length in lengths:
            gains = list(accumulate(self._gains(lacks, own[length - 1]), initial=0.0))
            windows = list(map(sub, gains[length:], gains))
            most = max(windows)
            if most > best[0]:
                best = most, windows.index(most), length
        return best

    def lacks(self, speeds: Sequence[float]) -> _Lacks:
        deficits = [lack if (lack := self.target - speed) > 0.0 else 0.0 for speed in speeds]
        bare = [block for block, speed in enumerate(speeds) if speed <= self.nothing]
        return _Lacks(deficits, [lack * lack * lack for lack in deficits], bare)

    def _least(self) -> float:
        return 1e-6 * self.target**3

    def _tried(self) -> list[tuple[float, _Place]]:
        """The best place of each candidate, and what its move gains."""
        tried, speeds, lacks = [], self.speeds, self.lacks(self.speeds)
        for number in self._candidates():
            lengths = self._lengths[number]
            self.tries -= len(lengths)
            span, own = self.spans[number], self.servers[number].speeds
            start, end = span.start, span.end
            speed = own[end - start - 1]
            mine = self.lacks([each - speed for each in speeds[start:end]])
            without = lacks.with_window(start, mine)
            gain, first, length = self.best_start(without, own, lengths)
            if first != start or length != end - start:
                wanted = Span(first, first + length)
                tried.append((gain - sum(self._gains(mine, speed)), _Place(number, wanted)))
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
        if self._ranks is None:
            self._ranks = SpanRanks(self.servers, self.spans, self._lengths, self._movable)
        return self._ranks.best(list(slopes), most)

    def _gains(self, lacks: _Lacks, more: float) -> list[float]:
        """The cubed deficit that each block loses if `more` tokens a second are added to its speed."""
        gains = [
            cube - after * after * after if (after := lack - more) > 0.0 else cube
            for lack, cube in zip(lacks.deficits, lacks.cubes, strict=True)
        ]
        for block in lacks.bare:
            gains[block] += self._unserved
        return gains

    def _add(self, span: Span, speed: float) -> None:
        speeds = self.speeds
        for block in range(span.start, span.end):
            speeds[block] += speed
