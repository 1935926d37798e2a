"""A session that is served well goes over to a better route: which hops it leaves, the price, and whether that repays.

Its inputs are replayed to the new hops, which costs time once. Each later step is shorter. Nobody knows how long a
text will be: a session is expected to get twice as long as it is. Knows no clock and no network.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.route import NoRoute, cost_s, find_detour, find_route
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.peers.standing import DecodeTime
    from llmnode.core.policy import MovePolicy
    from llmnode.core.route import Held, HopCost, Route, Ways

EXCHANGES = 5
"""The round trips of a move beside the replay: a connection, the opening, TRUNCATE, neighbours, and one to spare."""
MOST_STEPS = 256
"""A session looks at the clock after this number of steps at the latest."""


@dataclass(frozen=True, slots=True)
class Move:
    """Other `hops` take the place of those that are `left`. These are the route's from number `first` on."""

    first: int
    left: Route
    hops: Route
    saved_s: float
    """The time that each step is shorter."""

    def after(self, route: Route) -> Route:
        """The route after it."""
        return (*route[: self.first], *self.hops, *route[self.first + len(self.left) :])


class NewHop(NamedTuple):
    """The times of a replay at one of the new hops. Each is for one position."""

    input_s: float
    """The hop before, or the client, sends its input."""
    prefill_s: float
    """It computes it, as part of a prompt, beside others that are there."""
    brought_s: float = 0.0
    """The client brings adapter and prompts. This is once, and not for each position."""


def step_s(route: Route, costs: Mapping[PeerId, HopCost], ways: Ways) -> float:
    """The time of a token through `route`, as `find_route` counts it."""
    saved_s = 0.0
    for one, other in pairwise(route):
        if (way_s := ways.get((one.peer, other.peer))) is not None:
            by_client_s = costs[one.peer].way_s + costs[other.peer].way_s
            saved_s += min(max(0.0, by_client_s - way_s), costs[other.peer].hop_s)
    return cost_s(route, costs) - saved_s


def find_moves(
    route: Route, held: Sequence[Held], costs: Mapping[PeerId, HopCost], ways: Ways, taken_s: float
) -> list[Move]:
    """All moves from `route` towards the fastest one over `held`, whose peers have `costs`; those that save most first.

    Steps have `taken_s` lately. If that is less than the costs say, a move saves the same share of it.

    Hops of both routes stay. A peer of the route gets no second hop: it would hold KV for the session twice. If the
    fastest route has one, the hops at these peers stay, and the best others are looked for between them.
    """
    current = {hop.peer for hop in route}
    others = [each for each in held if each[0] not in current]
    try:  # those of the route first: they stay if others cost the same
        best = find_route(route[-1].span.end, [*route, *others], costs, ways)
    except NoRoute:
        return []
    now_s = step_s(route, costs, ways)
    scale = min(1.0, taken_s / now_s)
    found = []
    for first, left in _differing(route, best):
        hops = tuple(hop for hop in best if left[0].span.start <= hop.span.start < left[-1].span.end)
        if again := {hop.peer for hop in hops} & current:
            first, left = _without_ends(first, left, again)
            if not left:
                continue
            try:
                hops = find_detour(Span(left[0].span.start, left[-1].span.end), others, costs, ways)
            except NoRoute:
                continue
        move = Move(first, left, hops, 0.0)
        found.append(Move(first, left, hops, scale * (now_s - step_s(move.after(route), costs, ways))))
    return sorted((each for each in found if each.saved_s > 0), key=lambda each: -each.saved_s)


def steps_left(max_length: int, position: int, steps: int) -> int:
    """The steps that a session is expected to do, which stands at `position` after this number of `steps`.

    It is expected to do the same number once more. The lengths of texts are spread widely, and the greatest length may
    be a guess.
    """
    return max(0, min(max_length - position, steps))


def price_s(new: Sequence[NewHop], positions: int, round_trip_s: float) -> float:
    """The time that a move to the `new` hops takes, which are to compute that number of `positions`.

    `round_trip_s` is the longest one to a hop of the route. The hops compute chunks at the same time, and are counted
    as if they did so one after another.
    """
    replay_s = positions * sum(each.input_s + each.prefill_s for each in new)
    return EXCHANGES * round_trip_s + sum(each.brought_s for each in new) + replay_s


def repays(move: Move, now_s: float, price: float, left: int, policy: MovePolicy) -> bool:
    """Whether to make `move`, from a route whose steps take `now_s`, for a `price` in seconds and the steps `left`."""
    if move.saved_s < policy.least_share * now_s or price > policy.longest_s:
        return False
    return move.saved_s * left > policy.repays_times * price


def chance(others: float, policy: MovePolicy) -> float:
    """The share of the sessions that are to move at the same time, where `others` have this number of decodes."""
    return max(policy.least_chance, 1 / (1 + others))


def crowded(cost: HopCost, decode: DecodeTime, crowd: float) -> HopCost:
    """The cost of a hop to which a `crowd` of other sessions may come at the same time, beside those that are there."""
    longer_s = decode.beside_s(crowd) - decode.beside_s(0.0)
    return cost._replace(block_s=cost.block_s + longer_s)


def steps_until(wait_s: float, step_time_s: float) -> int:
    """The number of steps after which to look at the clock again, when half of the wait should be over."""
    if step_time_s <= 0:
        return MOST_STEPS
    return max(1, min(MOST_STEPS, int(wait_s / step_time_s / 2)))


def _differing(route: Route, best: Route) -> list[tuple[int, Route]]:
    """The longest runs of hops of `route` that `best` has not, each with the number of its first one."""
    same = set(best)
    differ = groupby(enumerate(route), key=lambda each: each[1] in same)
    runs = [list(run) for is_same, run in differ if not is_same]
    return [(run[0][0], tuple(hop for _, hop in run)) for run in runs]


def _without_ends(first: int, left: Route, staying: set[PeerId]) -> tuple[int, Route]:
    """A run of hops without those at its ends whose peers are `staying`."""
    while left and left[0].peer in staying:
        first, left = first + 1, left[1:]
    while left and left[-1].peer in staying:
        left = left[:-1]
    return first, left
