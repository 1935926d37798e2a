"""Routes: what `find_route` answers, against trying every set of holders."""

from __future__ import annotations

from itertools import combinations, pairwise, product
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.route import Hop, HopCost, fastest, find_detour, find_route, uncovered
from llmnode.core.span import Span, split_evenly
from llmnode.errors import NoRoute

if TYPE_CHECKING:
    from collections.abc import Sequence

MOST_BLOCKS = 8


@st.composite
def swarms(draw: st.DrawFn) -> tuple[int, list[Hop]]:
    """A model's number of blocks, and peers; some hold blocks past its end, as those of a longer model would."""
    blocks = draw(st.integers(1, MOST_BLOCKS))
    ranges = draw(st.lists(st.tuples(st.integers(0, blocks + 1), st.integers(1, MOST_BLOCKS)), max_size=6))
    return blocks, [Hop(PeerId(f"peer{n}"), Span(start, start + length)) for n, (start, length) in enumerate(ranges)]


def blocks_of(spans: Sequence[Span]) -> list[int]:
    return [block for span in spans for block in range(span.start, span.end)]


def fewest_hops(blocks: int, held: Sequence[Hop]) -> int | None:
    """Try every set of holders, small ones first."""
    for size in range(1, len(held) + 1):
        for chosen in combinations(held, size):
            if set(range(blocks)) <= set(blocks_of([hop.span for hop in chosen])):
                return size
    return None


@given(swarms())
def test_a_route_covers_all_blocks_in_order_with_what_its_peers_hold_in_the_fewest_hops(
    swarm: tuple[int, list[Hop]],
) -> None:
    blocks, held = swarm
    fewest = fewest_hops(blocks, held)
    if fewest is None:
        with pytest.raises(NoRoute):
            find_route(blocks, held)
        return
    route = find_route(blocks, held)
    assert blocks_of([hop.span for hop in route]) == list(range(blocks))
    spans_held = {hop.peer: hop.span for hop in held}
    assert all(spans_held[hop.peer].covers(hop.span) for hop in route)
    assert len(route) == fewest


@given(swarms())
def test_no_route_lists_exactly_the_blocks_that_nobody_holds(swarm: tuple[int, list[Hop]]) -> None:
    blocks, held = swarm
    nobody = sorted(set(range(blocks)) - set(blocks_of([hop.span for hop in held])))
    missing: tuple[Span, ...] = ()
    message = ""
    try:
        find_route(blocks, held)
    except NoRoute as error:
        missing, message = error.missing, str(error)
    assert blocks_of(missing) == nobody
    assert all(str(span) in message for span in missing)
    assert list(missing) == uncovered(blocks, [hop.span for hop in held])


@given(swarms())
def test_gaps_that_touch_are_one_gap(swarm: tuple[int, list[Hop]]) -> None:
    blocks, held = swarm
    assert all(one.end < other.start for one, other in pairwise(uncovered(blocks, [hop.span for hop in held])))


@given(swarms(), st.data())
def test_a_route_is_as_short_whatever_the_order_in_which_peers_are_named(
    swarm: tuple[int, list[Hop]], data: st.DataObject
) -> None:
    blocks, held = swarm
    shuffled = data.draw(st.permutations(held))
    if not uncovered(blocks, [hop.span for hop in held]):
        assert len(find_route(blocks, held)) == len(find_route(blocks, shuffled))


def test_of_equal_peers_the_one_named_first_is_taken() -> None:
    first, second = Hop(PeerId("first"), Span(0, 4)), Hop(PeerId("second"), Span(0, 4))
    assert find_route(4, [first, second]) == (first,)
    assert find_route(4, [second, first]) == (second,)


def test_blocks_beyond_the_end_of_the_model_cost_nothing() -> None:
    """A stranger announces any number of them. None has a place in memory."""
    stranger, other = PeerId("stranger"), Hop(PeerId("other"), Span(0, 3))
    endless = Hop(stranger, Span(1, 2**32))
    costs = {stranger: HopCost(1.0, 1e-6), other.peer: HopCost(1.0, 1.0)}
    assert find_route(4, [endless, other], costs) == (Hop(other.peer, Span(0, 1)), Hop(stranger, Span(1, 4)))
    with pytest.raises(NoRoute):
        find_route(4, [Hop(stranger, Span(4, 2**32))])


PEERS_HELD = {"whole": Span(0, 10), "part": Span(2, 5), "other": Span(8, 12)}


def cost_of(route: Sequence[Hop], costs: dict[PeerId, HopCost]) -> float:
    return sum(costs[hop.peer].hop_s + len(hop.span) * costs[hop.peer].block_s for hop in route)


def all_routes(blocks: int, held: Sequence[Hop], start: int = 0) -> list[list[Hop]]:
    """Every way through the blocks in which no peer comes twice."""
    if start >= blocks:
        return [[]]
    return [
        [Hop(hop.peer, Span(start, end)), *rest]
        for hop in held
        if hop.span.start <= start
        for end in range(start + 1, min(hop.span.end, blocks) + 1)
        for rest in all_routes(blocks, [other for other in held if other != hop], end)
    ]


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(1, 9), st.integers(0, 9)), max_size=4),
)
def test_no_route_is_faster(blocks: int, peers: list[tuple[int, int, int, int]]) -> None:
    held = [Hop(PeerId(f"peer{n}"), Span(start, start + length)) for n, (start, length, _, _) in enumerate(peers)]
    costs = {PeerId(f"peer{n}"): HopCost(hop_s, block_s) for n, (_, _, hop_s, block_s) in enumerate(peers)}
    routes = all_routes(blocks, held)
    if routes:
        route = find_route(blocks, held, costs)
        assert len({hop.peer for hop in route}) == len(route)
        fastest = min(cost_of(each, costs) for each in routes)
        # A detour that comes back to a peer is cut short: that may cost what the detour would have saved, no more.
        revisits = any(one.span.covers(other.span) and one != other for one in held for other in held)
        assert cost_of(route, costs) == fastest or (revisits and cost_of(route, costs) >= fastest)


def test_a_fast_peer_is_worth_a_hop_and_a_slow_one_is_not() -> None:
    held = [Hop(PeerId("whole"), Span(0, 10)), Hop(PeerId("half"), Span(5, 10))]
    fast = {PeerId("half"): HopCost(hop_s=0.01, block_s=0.0001), PeerId("whole"): HopCost(0.01, 0.01)}
    assert [hop.peer for hop in find_route(10, held, fast)] == ["whole", "half"]
    slow = {PeerId("half"): HopCost(hop_s=0.1, block_s=0.0001), PeerId("whole"): HopCost(0.01, 0.01)}
    assert [hop.peer for hop in find_route(10, held, slow)] == ["whole"]


@st.composite
def detours(draw: st.DrawFn) -> tuple[Span, list[Hop], dict[PeerId, HopCost]]:
    """A span of a model, peers, and what they cost."""
    blocks, held = draw(swarms())
    start = draw(st.integers(0, blocks - 1))
    span = Span(start, draw(st.integers(start + 1, blocks)))
    costs = {hop.peer: HopCost(draw(st.integers(1, 9)), draw(st.integers(0, 9))) for hop in held}
    return span, held, costs


def test_a_peer_whose_blocks_a_faster_one_holds_too_is_not_looked_at() -> None:
    whole, part, other = (Hop(PeerId(name), span) for name, span in PEERS_HELD.items())
    costs = {whole.peer: HopCost(1, 1), part.peer: HopCost(1, 1), other.peer: HopCost(2, 2)}
    assert fastest([whole, part, other], costs, {}) == [whole, other]
    assert fastest([whole, part, other], costs, {(part.peer, other.peer): 0.1}) == [whole, part, other]
    assert fastest([whole, part, other], costs | {part.peer: HopCost(1, 0.5)}, {}) == [whole, part, other]
    assert fastest([whole, part, other], costs | {part.peer: HopCost(0.5, 1)}, {}) == [whole, part, other]


@given(detours())
def test_exactly_those_are_not_looked_at_that_a_faster_one_covers(
    detour: tuple[Span, list[Hop], dict[PeerId, HopCost]],
) -> None:
    _, held, costs = detour
    ranks = {hop: (costs[hop.peer].block_s, costs[hop.peer].hop_s, number) for number, hop in enumerate(held)}
    looked_at = [
        hop
        for hop in held
        if not any(
            other.span.covers(hop.span)
            and costs[other.peer].hop_s <= costs[hop.peer].hop_s
            and ranks[other] < ranks[hop]
            for other in held
        )
    ]
    assert fastest(held, costs, {}) == looked_at


def test_neighbours_that_hold_a_block_twice_compute_it_once() -> None:
    held = [Hop(PeerId("low"), Span(0, 6)), Hop(PeerId("high"), Span(4, 10))]
    assert [hop.peer for hop in find_route(10, held)] == ["low", "high"]
    assert sum(len(hop.span) for hop in find_route(10, held)) == 10


def test_a_swarm_split_evenly_is_its_own_route() -> None:
    held = [Hop(PeerId(f"peer{n}"), span) for n, span in enumerate(split_evenly(30, 7))]
    assert find_route(30, reversed(held)) == tuple(held)


def test_an_empty_swarm_misses_every_block() -> None:
    with pytest.raises(NoRoute) as caught:
        find_route(30, [])
    assert caught.value.missing == (Span(0, 30),)
    assert str(caught.value) == "no peer holds blocks [0, 30); start a server for them or name more peers with --peers"


def clipped(span: Span, held: Sequence[Hop]) -> list[Hop]:
    """The holders of a model that is `span` alone."""
    inside = [(hop.peer, sorted(set(blocks_of([hop.span])) & set(blocks_of([span])))) for hop in held]
    return [Hop(peer, Span(blocks[0] - span.start, blocks[-1] + 1 - span.start)) for peer, blocks in inside if blocks]


@given(detours())
def test_a_detour_is_the_route_through_a_model_that_has_no_other_blocks(
    detour: tuple[Span, list[Hop], dict[PeerId, HopCost]],
) -> None:
    span, held, costs = detour
    inside = clipped(span, held)
    try:
        expected = find_route(len(span), inside, costs)
    except NoRoute:
        with pytest.raises(NoRoute):
            find_detour(span, held, costs)
        return
    route = find_detour(span, held, costs)
    assert [(hop.peer, hop.span.start - span.start, hop.span.end - span.start) for hop in route] == [
        (hop.peer, hop.span.start, hop.span.end) for hop in expected
    ]
    assert blocks_of([hop.span for hop in route]) == blocks_of([span])
    spans_held = {hop.peer: hop.span for hop in held}
    assert all(spans_held[hop.peer].covers(hop.span) for hop in route)


@given(swarms())
def test_a_detour_through_the_whole_model_is_a_route(swarm: tuple[int, list[Hop]]) -> None:
    blocks, held = swarm
    if not uncovered(blocks, [hop.span for hop in held]):
        assert find_detour(Span(0, blocks), held) == find_route(blocks, held)


@given(detours())
def test_no_detour_lists_exactly_the_blocks_of_its_span_that_nobody_holds(
    detour: tuple[Span, list[Hop], dict[PeerId, HopCost]],
) -> None:
    span, held, costs = detour
    missing: tuple[Span, ...] = ()
    message = ""
    try:
        find_detour(span, held, costs)
    except NoRoute as error:
        missing, message = error.missing, str(error)
    nobody = set(blocks_of([span])) - set(blocks_of([hop.span for hop in held]))
    assert blocks_of(missing) == sorted(nobody)
    assert all(str(each) in message for each in missing)
    assert all(one.end < other.start for one, other in pairwise(missing))


def test_no_detour_counts_blocks_from_the_start_of_the_model() -> None:
    with pytest.raises(NoRoute) as caught:
        find_detour(Span(10, 20), [Hop(PeerId("low"), Span(0, 12)), Hop(PeerId("high"), Span(15, 30))])
    assert caught.value.missing == (Span(12, 15),)


@given(swarms(), st.data())
def test_with_ways_between_peers_no_route_is_faster(swarm: tuple[int, list[Hop]], data: st.DataObject) -> None:
    blocks, held = min(swarm[0], 4), swarm[1][:4]
    times = st.integers(0, 40).map(float)
    costs = {
        each.peer: HopCost(2 * way_s + 1, data.draw(times), way_s) for each in held for way_s in [data.draw(times)]
    }
    peers = sorted(costs)
    pairs = data.draw(st.lists(st.sampled_from([*product(peers, peers)] or [None]), unique=True, max_size=6))
    ways = {pair: data.draw(times) for pair in pairs if pair is not None and pair[0] != pair[1]}
    holders = [[each.peer for each in held if each.span.start <= block < each.span.end] for block in range(blocks)]

    def cost_s(peers_of_blocks: Sequence[PeerId]) -> float:
        total_s, former = 0.0, None
        for peer in peers_of_blocks:
            if peer != former:
                total_s += costs[peer].hop_s
                if former is not None and (former, peer) in ways:
                    saved_s = costs[former].way_s + costs[peer].way_s - ways[former, peer]
                    total_s -= min(max(0.0, saved_s), costs[peer].hop_s)
            total_s += costs[peer].block_s
            former = peer
        return total_s

    if not all(holders):
        return
    route = find_route(blocks, held, costs, ways)
    found = [hop.peer for hop in route for _ in range(len(hop.span))]
    fastest = min(product(*holders), key=cost_s)
    comes_twice = len({*fastest}) < 1 + sum(one != other for one, other in pairwise(fastest))
    assert comes_twice or cost_s(found) == pytest.approx(cost_s(fastest))


def test_of_equal_peers_the_one_that_is_near_to_the_hop_before_is_taken() -> None:
    first, near, far = (PeerId(each) for each in ("first", "near", "far"))
    held = [Hop(first, Span(0, 2)), Hop(far, Span(2, 4)), Hop(near, Span(2, 4))]
    costs = {peer: HopCost(0.1, 0.001, 0.05) for peer in (first, near, far)}
    assert find_route(4, held, costs)[1].peer == far
    assert find_route(4, held, costs, {(first, near): 0.01, (first, far): 0.04})[1].peer == near
