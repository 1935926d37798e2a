"""Placement of a node that joins: `choose_span` against the paper's rule written out, and the claims that count."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.placement.claims import before_moves, counted
from llmnode.core.placement.joining import choose_span, choose_together
from llmnode.core.placement.policy import RebalancePolicy
from llmnode.core.placement.servers import PlacedServer, block_speeds, one_speed
from llmnode.core.span import Span
from llmnode.core.speed import AnnouncedSpeed
from llmnode.errors import ConfigError

BLOCKS = 10
POLICY = RebalancePolicy()
speeds_of_blocks = st.lists(st.integers(0, 3).map(float), min_size=BLOCKS, max_size=BLOCKS)


@given(speeds_of_blocks, st.integers(1, BLOCKS))
def test_the_first_of_the_slowest_windows_is_chosen(speeds: list[float], length: int) -> None:
    windows = [sorted(speeds[start : start + length]) for start in range(BLOCKS - length + 1)]
    first = windows.index(min(windows))
    assert choose_span(length, speeds) == Span(first, first + length)


@st.composite
def crowds(draw: st.DrawFn) -> tuple[list[PlacedServer], list[PlacedServer]]:
    """Servers that were there before, and others that have all chosen without knowing of each other."""
    there = [
        PlacedServer(PeerId(f"there-{number}"), span, one_speed(draw(st.floats(1, 9)), len(span)))
        for number, span in enumerate(draw(st.lists(spans(), max_size=4)))
    ]
    lengths = draw(st.lists(st.integers(1, BLOCKS), min_size=1, max_size=6))
    names = draw(st.permutations(range(len(lengths))))
    speeds = block_speeds(BLOCKS, there)
    newcomers = [
        PlacedServer(PeerId(f"new-{name}"), choose_span(length, speeds), (1.0,) * length)
        for name, length in zip(names, lengths, strict=True)
    ]
    return there, newcomers


@st.composite
def spans(draw: st.DrawFn) -> Span:
    start = draw(st.integers(0, BLOCKS - 1))
    return Span(start, draw(st.integers(start + 1, BLOCKS)))


@given(crowds())
def test_nodes_that_load_the_same_blocks_choose_as_if_they_came_one_after_the_other_the_longest_first(
    crowd: tuple[list[PlacedServer], list[PlacedServer]],
) -> None:
    there, newcomers = crowd
    contending = [each for each in newcomers if sum(each.span.meets(other.span) for other in newcomers) > 1]
    one_by_one = [*there, *(each for each in newcomers if each not in contending)]
    for each in sorted(contending, key=lambda each: (-len(each.span), each.peer)):
        span = choose_span(len(each.span), block_speeds(BLOCKS, one_by_one))
        one_by_one.append(PlacedServer(each.peer, span, each.speeds))
    wanted = {each.peer: each.span for each in one_by_one}
    joining = {each.peer for each in newcomers}
    for me in newcomers:
        others = [*there, *(each for each in newcomers if each.peer != me.peer)]
        assert choose_together(BLOCKS, me.peer, me.span, others, joining) == wanted[me.peer]


@given(st.lists(spans(), max_size=4), st.lists(spans(), max_size=4), spans())
def test_a_node_goes_on_with_its_load_if_nobody_that_joins_with_it_loads_any_of_its_blocks(
    there: list[Span], newcomers: list[Span], mine: Span
) -> None:
    """Speeds change while it loads, and others would be slower by now. That is worth no second load."""
    newcomers = [each for each in newcomers if not each.meets(mine)]
    others = [
        PlacedServer(PeerId(str(number)), span, (1.0,) * len(span)) for number, span in enumerate(there + newcomers)
    ]
    joining = {each.peer for each in others[len(there) :]}
    assert choose_together(BLOCKS, PeerId("me"), mine, others, joining) == mine


def test_servers_that_come_one_after_the_other_cover_the_model() -> None:
    swarm: list[PlacedServer] = []
    for number in range(5):
        swarm.append(PlacedServer(PeerId(str(number)), choose_span(2, block_speeds(BLOCKS, swarm)), (1.0, 1.0)))
    assert sorted(server.span for server in swarm) == [Span(start, start + 2) for start in range(0, BLOCKS, 2)]


@pytest.mark.parametrize("length", [0, 11])
def test_a_number_of_blocks_that_the_model_does_not_have_is_refused(length: int) -> None:
    with pytest.raises(ConfigError, match="the model has 10"):
        choose_span(length, [0.0] * BLOCKS)


def offered(
    name: str, span: Span, state: PeerState, block_us: int, age_s: float = 1.0, tokens_per_s: float = 0.0
) -> tuple[PeerId, Offer, float]:
    profile, speed = Profile(b"d" * 32, Precision()), AnnouncedSpeed(round(1000 * tokens_per_s))
    offer = Offer("model", profile, BLOCKS, span, state, block_us, kv_tokens=9, kv_tokens_free=9, speed=speed)
    return PeerId(name), offer, age_s


def test_one_that_only_says_that_it_joins_counts_for_a_while_and_at_most_at_the_usual_speed() -> None:
    serving = [offered(f"s{us}", Span(0, 5), PeerState.ONLINE, us) for us in (100, 200, 400)]
    usual = serving[1][1].speed_tokens_per_s
    for block_us in (0, 1):  # not measured, or boasted
        joining = offered("j", Span(5, 10), PeerState.JOINING, block_us, 599.0)
        assert counted([*serving, joining], POLICY)[-1].speed == pytest.approx(usual)
    late = offered("j", Span(5, 10), PeerState.JOINING, 1, 600.0)
    assert len(counted([*serving, late], POLICY)) == len(serving)
    speeds = block_speeds(BLOCKS, counted([*serving, late], POLICY))
    assert choose_span(5, speeds) == Span(5, 10), "the hole is filled"
    assert counted([offered("j", Span(5, 10), PeerState.JOINING, 0)], POLICY)[0].speed == 1.0


def test_a_speed_counts_for_a_few_medians_at_most() -> None:
    honest = [offered(f"s{number}", Span(0, 5), PeerState.ONLINE, 200) for number in range(3)]
    liar = offered("liar", Span(0, 5), PeerState.ONLINE, 1)
    believed = counted([*honest, liar], POLICY)[-1].speed
    assert believed == pytest.approx(POLICY.claim_limit * honest[0][1].speed_tokens_per_s)


def test_a_server_that_did_not_measure_itself_counts_as_slow() -> None:
    assert counted([offered("s", Span(0, 5), PeerState.ONLINE, 0)], POLICY)[0].speed == 0.0


def test_one_that_did_not_measure_its_network_counts_as_slow_beside_others_that_did() -> None:
    span, online = Span(0, 5), PeerState.ONLINE
    alone = [offered("u", span, online, 100), offered("v", span, online, 200)]
    assert [each.speed for each in counted(alone, POLICY)] == [2000.0, 1000.0], "nobody has measured it"
    measured = [offered(f"m{number}", span, online, 100, tokens_per_s=800.0) for number in range(3)]
    assert [each.speed for each in counted([*alone, *measured], POLICY)] == [400.0, 400.0, 800.0, 800.0, 800.0]
    slow = offered("w", span, online, 1000)
    assert counted([*measured, slow], POLICY)[-1].speed == 200.0, "it says itself that it is slower"


def test_a_narrow_network_counts_however_fast_the_device_is() -> None:
    servers = [offered("wide", Span(0, 5), PeerState.ONLINE, 100, tokens_per_s=1500.0)]
    servers.append(offered("narrow", Span(0, 5), PeerState.ONLINE, 10, tokens_per_s=50.0))
    assert counted(servers, POLICY)[-1].speed == 50.0


@pytest.mark.parametrize("state", [PeerState.DRAINING, PeerState.LEFT, PeerState.UNKNOWN])
def test_one_that_will_not_serve_does_not_count(state: PeerState) -> None:
    assert counted([offered("s", Span(0, 5), state, 100)], POLICY) == []


def test_one_that_moves_counts_where_it_moves_to_but_not_for_ever() -> None:
    peer, offer, _ = offered("m", Span(0, 5), PeerState.ONLINE, 100)
    for state in (PeerState.ONLINE, PeerState.DRAINING):
        moving = replace(offer, state=state, moves_to=Span(4, 9))
        (server,) = counted([(peer, moving, 1.0)], POLICY)
        assert (server.span, server.online) == (Span(4, 9), False)
    (server,) = counted([(peer, replace(offer, moves_to=Span(4, 9)), POLICY.joins_within_s)], POLICY)
    assert (server.span, server.online) == (Span(0, 5), True)


def test_of_two_that_move_in_each_others_way_the_later_one_counts_the_earlier_one_as_gone() -> None:
    (a, first, age_s), (b, second, _) = (offered(each, Span(0, 5), PeerState.ONLINE, 100) for each in "ab")
    first, second = replace(first, moves_to=Span(5, 10)), replace(second, moves_to=Span(5, 10))
    offers = [(a, first, age_s), (b, second, age_s)]
    assert [each.moves_to for _, each, _ in before_moves(offers, a, Span(5, 10))] == [None, None]
    assert [each.moves_to for _, each, _ in before_moves(offers, b, Span(5, 10))] == [Span(5, 10), None]
    apart = [(a, replace(first, span=Span(20, 25)), age_s), (b, replace(second, moves_to=Span(30, 35)), age_s)]
    assert [each.moves_to for _, each, _ in before_moves(apart, a, Span(5, 10))] == [None, Span(30, 35)]
