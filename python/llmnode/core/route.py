"""Routes: which peers a session goes through.

Knows no network: what peers hold is told, a route is answered.
"""

from __future__ import annotations

from math import inf
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from llmnode.core.errors import SwarmError
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llmnode.core.ids import PeerId


class Hop(NamedTuple):
    """A peer and the blocks it computes for one session; at most the span that it holds.

    A tuple, as `HopCost` is: each choice makes one for each server of a swarm.
    """

    peer: PeerId
    span: Span


Held: TypeAlias = tuple["PeerId", Span]
"""A peer and all that it holds. A `Hop` is one."""
Route: TypeAlias = tuple[Hop, ...]
"""Hops that cover a model's blocks, in order ("chain" in the papers)."""


class HopCost(NamedTuple):
    """The cost of a token at a peer, in seconds: once for going there, and for each block that it computes.

    `way_s` is the time of one way between the client and the peer, twice of which is in `hop_s`; 0 if it is not known.
    Some of it is saved where the way from the hop before is known, and shorter.
    """

    hop_s: float = 0.005
    block_s: float = 0.001
    way_s: float = 0.0


Ways: TypeAlias = "Mapping[tuple[PeerId, PeerId], float]"
"""The times from one peer to another, in seconds, for the pairs of which they are known."""


class NoRoute(SwarmError):
    """No known peer holds some of the blocks.

    `missing` lists the spans without a holder, lowest block first; `hint` says what is there instead.
    """

    def __init__(self, missing: Sequence[Span], hint: str = "") -> None:
        self.missing = tuple(missing)
        spans = ", ".join(f"[{span.start}, {span.end})" for span in self.missing)
        fix = hint or "start a server for them or name more peers with --peers"
        super().__init__(f"no peer holds blocks {spans}; {fix}")


def find_route(
    blocks: int, held: Iterable[Held], costs: Mapping[PeerId, HopCost] | None = None, ways: Ways | None = None
) -> Route:
    """The fastest way for a token through blocks 0 to `blocks`, over `held`: peers and all that they hold.

    Peers cost the same without `costs`. Between two peers without one of `ways`, a token goes by way of the client. At
    equal cost it takes the fewest hops, and the peers that are named first. No peer comes twice. Raises NoRoute with
    every span that nobody holds.
    """
    known, default, ways = costs or {}, HopCost(), ways or {}
    within = [  # a stranger may announce any number of blocks
        (peer, span if span.end <= blocks else Span(span.start, blocks)) for peer, span in held if span.start < blocks
    ]
    holders = fastest(within, known, ways)
    missing = uncovered(blocks, [hop.span for hop in holders])
    if missing:
        raise NoRoute(missing)
    cost = [known.get(hop.peer, default) for hop in holders]
    before = _savings(holders, cost, ways)
    begin: list[list[int]] = [[] for _ in range(blocks)]
    for index, hop in enumerate(holders):
        begin[hop.span.start].append(index)
    ends = [hop.span.end for hop in holders]
    # The cheapest way through the blocks until now that ends at each holder, and the one that ends soonest of all.
    best: dict[int, float] = {}
    arriving, cheapest = 0.0, -1
    came_from: list[dict[int, int]] = []  # for each block, the holders that it is entered at, and the ones before them
    holding: list[int] = []
    for block in range(blocks):
        holding = sorted([*(index for index in holding if ends[index] > block), *begin[block]])
        reached: dict[int, float] = {}
        entered: dict[int, int] = {}
        least, nearest = inf, -1
        for index in holding:
            hop_s, block_s, _ = cost[index]
            fresh, came = arriving + hop_s, cheapest
            for former, saved_s in before.get(index, ()):
                if (direct := best.get(former, inf) + hop_s - saved_s) < fresh:
                    fresh, came = direct, former
            taken_s = best.get(index, inf)
            if fresh < taken_s:
                taken_s, entered[index] = fresh, came
            reached[index] = taken_s = taken_s + block_s
            if taken_s < least:
                least, nearest = taken_s, index
        came_from.append(entered)
        best, arriving, cheapest = reached, least, nearest
    index = cheapest
    taken: list[int] = []
    for entered in reversed(came_from):
        taken.append(index)
        index = entered.get(index, index)
    return _hops([holders[index].peer for index in reversed(taken)])


def cost_s(route: Route, costs: Mapping[PeerId, HopCost]) -> float:
    """The time of a token through `route` by way of the client."""
    return sum(costs[hop.peer].hop_s + len(hop.span) * costs[hop.peer].block_s for hop in route)


def _savings(holders: Sequence[Hop], cost: Sequence[HopCost], ways: Ways) -> dict[int, list[tuple[int, float]]]:
    """For each holder, those before it from which a direct way is shorter than that by way of the client, and by how
    much.
    """
    numbers: dict[PeerId, list[int]] = {}
    for index, hop in enumerate(holders):
        numbers.setdefault(hop.peer, []).append(index)
    savings: dict[int, list[tuple[int, float]]] = {}
    for (former, peer), way_s in ways.items():
        for start in numbers.get(former, ()):
            for end in numbers.get(peer, ()):
                saved_s = cost[start].way_s + cost[end].way_s - way_s
                if saved_s > 0 and start != end:
                    savings.setdefault(end, []).append((start, min(saved_s, cost[end].hop_s)))
    return savings


def find_detour(
    span: Span, held: Iterable[Held], costs: Mapping[PeerId, HopCost] | None = None, ways: Ways | None = None
) -> Route:
    """The same as `find_route`, through the blocks of `span` alone. Raises NoRoute with what of it nobody holds."""
    start = span.start
    inside = [
        (peer, Span(max(own.start, start) - start, min(own.end, span.end) - start))
        for peer, own in held
        if own.meets(span)
    ]
    try:
        route = find_route(len(span), inside, costs, ways)
    except NoRoute as error:
        raise NoRoute([_shifted(missing, start) for missing in error.missing]) from None
    return tuple(Hop(hop.peer, _shifted(hop.span, start)) for hop in route)


def fastest(held: Iterable[Held], costs: Mapping[PeerId, HopCost], ways: Ways) -> list[Hop]:
    """Returns `held` without those that another one, which holds all of their blocks, is never slower than.

    The first of equal ones stays, and peers that have `ways` to others stay too.
    """
    default, kept = HopCost(), {peer for pair in ways for peer in pair}
    holders = list(held)
    in_turn: list[tuple[float, float, int]] = []
    for number, (peer, _) in enumerate(holders):
        hop_s, block_s, _ = costs.get(peer, default)
        in_turn.append((block_s, hop_s, number))
    in_turn.sort()
    best: list[int] = []
    ends: dict[int, list[tuple[int, float]]] = {}  # of those that hold each block, with what going costs
    for _, hop_s, number in in_turn:
        peer, span = holders[number]
        start, end = span.start, span.end
        for other_end, other_s in ends.get(start, ()):
            if end <= other_end and other_s <= hop_s and peer not in kept:
                break
        else:
            best.append(number)
            for block in range(start, end):
                others = [each for each in ends.get(block, ()) if end < each[0] or each[1] < hop_s]
                ends[block] = [(end, hop_s), *others]
    return [Hop(*holders[number]) for number in sorted(best)]


def _shifted(span: Span, by: int) -> Span:
    return Span(span.start + by, span.end + by)


def _hops(peers: Sequence[PeerId]) -> Route:
    """From the peer of each block to hops. A peer that would come twice keeps what is between: its span has no gap."""
    route: list[Hop] = []
    for block, peer in enumerate(peers):
        again = next((number for number, hop in enumerate(route) if hop.peer == peer), len(route))
        start = route[again].span.start if again < len(route) else block
        route[again:] = [Hop(peer, Span(start, block + 1))]
    return tuple(route)


def uncovered(blocks: int, spans: Sequence[Span]) -> list[Span]:
    """The maximal spans of a model of `blocks` blocks that none of `spans` covers."""
    gaps: list[Span] = []
    reached = 0
    for span in sorted(spans, key=attrgetter("start")):
        if span.start > reached:
            gaps.append(Span(reached, min(span.start, blocks)))
        reached = max(reached, span.end)
        if reached >= blocks:
            return gaps
    if reached < blocks:
        gaps.append(Span(reached, blocks))
    return gaps


def covers(spans: Iterable[Span], span: Span) -> bool:
    """Whether `spans` have all blocks of `span` together."""
    gaps = uncovered(span.end, [each for each in spans if each.start < span.end and span.start < each.end])
    return not any(gap.end > span.start for gap in gaps)


def replaceable(route: Route, held: Iterable[Held]) -> list[Hop]:
    """The hops of which others of `held` have all blocks, so that one may choose."""
    peers = {hop.peer for hop in route}
    others = [span for peer, span in held if peer not in peers]
    return [hop for hop in route if covers(others, hop.span)]
