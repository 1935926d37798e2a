"""A node that may choose its precision: it closes gaps, else adds where it adds most, and no stranger leads it away."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.model import EXACT, PRECISIONS, Precision
from llmnode.core.placement.own_precision import (
    Candidate,
    Prospect,
    choose_own,
    describe_own,
    paced,
    prospects_of,
)
from llmnode.core.placement.precisions import BACKERS
from llmnode.core.placement.servers import PlacedServer, one_speed, throughput
from llmnode.core.span import Span

BLOCKS = 8
WHOLE, FRONT, BACK = Span(0, 8), Span(0, 4), Span(4, 8)
BF16, NF4, INT8 = (PRECISIONS[name] for name in ("bfloat16", "float32+nf4", "float32+int8"))
Servers = dict[Precision, list[PlacedServer]]


def server(name: str, span: Span = WHOLE, speed: float = 10.0, *, online: bool = True) -> PlacedServer:
    return PlacedServer(PeerId(name), span, one_speed(speed, len(span)), online=online)


def all_met(servers: Servers) -> dict[PeerId, str]:
    """Each that is online, in an address group of its own: servers that load are not asked."""
    return {each.peer: f"group of {each.peer}" for own in servers.values() for each in own if each.online}


def prospects(
    candidates: list[Candidate], servers: Servers, met: dict[PeerId, str] | None = None, unit: float = 80.0
) -> list[Prospect]:
    return prospects_of(BLOCKS, candidates, servers, all_met(servers) if met is None else met, unit)


def chosen(candidates: list[Candidate], servers: Servers, met: dict[PeerId, str] | None = None) -> str:
    return choose_own(prospects(candidates, servers, met)).precision.name


def alike(*precisions: Precision, blocks: int = 4) -> list[Candidate]:
    """A device that is as fast in each."""
    return [Candidate(each, blocks, 1.0) for each in precisions]


def test_a_gap_that_it_closes_comes_before_speed_where_there_is_a_whole_model() -> None:
    servers = {EXACT: [server("a"), server("b")], BF16: [server("c", FRONT), server("e", FRONT)]}
    assert chosen(alike(EXACT, BF16), servers) == "bfloat16"
    assert choose_own(prospects(alike(EXACT, BF16), servers)).span == BACK
    assert chosen(alike(EXACT, BF16, blocks=3), servers) == "float32", "one block would still be missing"
    servers[BF16].append(server("d", BACK, online=False))
    assert chosen(alike(EXACT, BF16), servers) == "float32", "another one that loads closes it"


def test_a_device_that_is_slow_in_it_leaves_the_gap_to_others_unless_it_could_add_nowhere_else() -> None:
    slow = [Candidate(EXACT, 4, 1.0), Candidate(BF16, 4, 0.1)]
    servers = {EXACT: [server("a"), server("b")], BF16: [server("c", FRONT)]}
    assert chosen(slow, servers) == "float32"
    assert chosen(slow, {BF16: [server("c", FRONT)]}) == "bfloat16", "float32 would be half of a model, and unused"
    able = [Candidate(EXACT, 8, 1.0), Candidate(BF16, 8, 0.1)]
    assert chosen(able, {BF16: [server("c", FRONT)]}) == "float32", "it serves a whole one alone"


def test_else_it_adds_where_the_throughput_grows_most() -> None:
    front, back = (
        [server(f"{each}{span.start}", span, speed) for each in "cd"] for span, speed in ((FRONT, 50.0), (BACK, 2.5))
    )
    weak = {EXACT: [server("a"), server("b")], BF16: [*front, *back]}
    assert chosen(alike(EXACT, BF16), weak) == "bfloat16", "at its weak blocks"
    even = {EXACT: [server("a"), server("b")], BF16: [server("c"), server("d")]}
    assert chosen([Candidate(EXACT, 4, 1.0), Candidate(BF16, 4, 1.3)], even) == "bfloat16", (
        "where this device is faster"
    )
    assert chosen([Candidate(EXACT, 4, 1.0), Candidate(BF16, 4, 1.05)], even) == "float32", "that is no difference"
    assert chosen(alike(NF4, INT8, BF16), dict.fromkeys((NF4, INT8, BF16), even[EXACT])) == "bfloat16"


def test_it_begins_no_precision_of_its_own_beside_one_that_it_can_help() -> None:
    assert chosen([Candidate(INT8, 8, 2.4), Candidate(EXACT, 8, 1.0)], {EXACT: [server("a")]}) == "float32"
    assert chosen(alike(INT8, EXACT, blocks=3), {EXACT: [server("a", FRONT)]}) == "float32"
    assert chosen(alike(INT8), {}) == "float32+int8"


def test_if_nothing_is_whole_it_goes_where_fewest_blocks_are_missing_then() -> None:
    servers = {EXACT: [server("a", Span(0, 2))], BF16: [server("b", Span(0, 3))]}
    assert chosen(alike(EXACT, BF16, blocks=2), servers) == "bfloat16"
    servers[EXACT].append(server("c", Span(2, 5), online=False))
    assert chosen(alike(EXACT, BF16, blocks=2), servers) == "float32", "others that load count"


def test_one_stranger_draws_nobody_away_from_servers_at_two_addresses() -> None:
    """It answers, and claims that one of its blocks is weak, or that it lacks some."""
    honest = [server("a"), server("b")]
    sybils = [server("c", FRONT, 20.0), server("d", BACK, 0.01)]
    servers = {EXACT: honest, BF16: sybils}
    met = {**all_met(servers), PeerId("c"): "stranger", PeerId("d"): "stranger"}
    assert chosen(alike(EXACT, BF16), servers, met) == "float32"
    other = {BF16: [*sybils, server("e", FRONT, 20.0), server("f", BACK, 0.01)]}
    assert chosen(alike(EXACT, BF16), servers | other, {**met, PeerId("e"): "e", PeerId("f"): "e"}) == "bfloat16", "two"
    for gap in ([server("c", FRONT)], [server("c", Span(0, 2)), server("d", Span(2, 4))]):
        assert chosen(alike(EXACT, BF16), {EXACT: honest, BF16: gap}, met) == "float32", "its gap is its own matter"
    gap = [server("c", FRONT), server("e", FRONT)]
    assert chosen(alike(EXACT, BF16), {EXACT: honest, BF16: gap}, {**met, PeerId("e"): "e"}) == "bfloat16", "two"
    assert chosen(alike(EXACT, BF16), {EXACT: honest[:1], BF16: gap[:1]}, met) == "bfloat16", "one against one"


@pytest.mark.parametrize("gap", range(BLOCKS))
def test_servers_that_say_they_load_draw_nobody_from_those_that_answer(gap: int) -> None:
    """Nobody asks them, and new identities are free."""
    honest = {EXACT: [server(each, span) for each, span in zip("abcdef", (FRONT, BACK) * 3, strict=True)]}
    spans = [Span(start, end) for start, end in ((0, gap), (gap + 1, BLOCKS)) if start < end]
    invented = [server(f"invention {each}", each, online=False) for each in spans]
    far = Span(0, 1) if gap >= BLOCKS // 2 else Span(BLOCKS - 1, BLOCKS)
    for begun in ([], [server("stranger", far)]):
        servers = honest | {BF16: [*begun, *invented]}
        assert chosen(alike(EXACT, BF16), servers) == "float32"
        assert chosen(alike(EXACT, BF16), {EXACT: honest[EXACT][:2], BF16: [*begun, *invented]}) == "float32"


def test_it_believes_that_others_load_if_nobody_answers_yet() -> None:
    """The nodes of a new swarm start together."""
    servers = {EXACT: [server("a", FRONT, online=False)]}
    assert chosen(alike(INT8, EXACT), servers) == "float32"
    servers[BF16] = [server("b", Span(0, 2))]
    assert chosen(alike(INT8, EXACT, BF16), servers, {}) == "float32", "this one should have answered"
    assert chosen(alike(INT8, EXACT, BF16), servers) == "bfloat16"


SPANS = st.tuples(st.integers(0, BLOCKS - 1), st.integers(1, BLOCKS)).map(
    lambda drawn: Span(drawn[0], min(BLOCKS, drawn[0] + drawn[1]))
)
DRAWN = st.sampled_from([EXACT, BF16, NF4])


@st.composite
def swarms(draw: st.DrawFn) -> Servers:
    servers: Servers = {}
    for number in range(draw(st.integers(0, 6))):
        own = server(f"s{number}", draw(SPANS), draw(st.floats(0, 100)), online=draw(st.booleans()))
        servers.setdefault(draw(DRAWN), []).append(own)
    return servers


@st.composite
def devices(draw: st.DrawFn) -> list[Candidate]:
    precisions = draw(st.lists(DRAWN, min_size=1, unique=True))
    return [Candidate(each, draw(st.integers(1, BLOCKS)), draw(st.floats(0.05, 3.0))) for each in precisions]


@given(swarms(), devices(), st.randoms(use_true_random=False))
def test_the_choice_does_not_depend_on_any_order(
    servers: Servers, candidates: list[Candidate], rng: random.Random
) -> None:
    first = choose_own(prospects(candidates, servers))
    mixed = {each: rng.sample(own, len(own)) for each, own in servers.items()}
    assert choose_own(prospects(rng.sample(candidates, len(candidates)), mixed)) == first


@given(swarms(), devices())
def test_the_node_closes_what_it_can_and_never_lowers_a_throughput(
    servers: Servers, candidates: list[Candidate]
) -> None:
    found = prospects(candidates, servers)
    choice = choose_own(found)
    for each in found:
        own = servers.get(each.precision, [])
        with_it = [*own, server("newcomer", each.span, 80.0)]
        assert throughput(BLOCKS, with_it) >= throughput(BLOCKS, own)
        assert each.gain_tokens_per_s > 0
        assert sum(map(len, each.still_missing)) <= sum(map(len, each.missing))
    if any(each.closes and not each.is_slow and each.groups >= BACKERS for each in found):
        assert choice.closes
        assert not choice.is_slow
    if any(each.is_usable for each in found):
        assert choice.is_usable, "sessions can be opened in it"


@given(swarms(), devices(), st.lists(SPANS, min_size=1, max_size=4))
def test_strangers_that_do_not_answer_change_nothing(
    servers: Servers, candidates: list[Candidate], spans: list[Span]
) -> None:
    """They announce a precision that nobody else has. Those that claim to load count only if nobody else answers."""
    alone = prospects(candidates, servers)
    answers = any(each.is_usable or each.answering for each in alone)
    for online in (True, False) if answers else (True,):
        invented = {
            INT8: [server(f"invention {number}", span, 200.0, online=online) for number, span in enumerate(spans)]
        }
        more = [*candidates, Candidate(INT8, BLOCKS, 3.0)]
        found = prospects(more, servers | invented, all_met(servers))
        assert choose_own(found) == choose_own(alone)


def test_a_speed_that_was_measured_replaces_the_usual_one() -> None:
    candidates = [Candidate(EXACT, 4, 1.0), Candidate(BF16, 4, 0.25), Candidate(NF4, 4, 0.1)]
    servers = [server("a", FRONT, 10.0), server("b", WHOLE, 10.0), server("c", WHOLE, 0.0)]
    assert paced(candidates, {}, servers) == (candidates, 60.0)
    assert paced(candidates, {}, []) == (candidates, 1.0)
    found, unit = paced(candidates, {EXACT: 100.0, BF16: 75.0, NF4: 0.0}, servers)
    assert unit == 100.0, "float32 is what paces are shares of"
    assert [each.pace for each in found] == [1.0, 0.75, 0.1]


def test_a_wrong_guess_makes_no_measured_precision_slow() -> None:
    exact, bf16 = Candidate(EXACT, 4, 1.0), Candidate(BF16, 4, 0.05, is_emulated=True)
    int8, nf4 = Candidate(INT8, 4, 2.5), Candidate(NF4, 4, 0.1)

    def paces(candidates: list[Candidate], measured: dict[Precision, float]) -> tuple[list[float], float]:
        found, unit = paced(candidates, measured, [server("a", WHOLE, 7.5)])
        return [each.pace for each in found], unit

    assert paces([exact, bf16], {EXACT: 100.0, BF16: 100.0}) == ([1.0, 1.0], 100.0)
    assert paces([bf16], {EXACT: 100.0, BF16: 80.0}) == ([0.8], 100.0), "float32 need not fit"
    assert paces([int8, bf16], {INT8: 250.0, BF16: 10.0}) == ([2.5, 0.1], 100.0), "an emulated one tells nothing"
    assert paces([nf4, int8], {INT8: 250.0, NF4: 100.0}) == ([1.0, 2.5], 100.0), "the one nearest to float32 does"
    assert paces([exact, bf16], {BF16: 240.0}) == ([1.0, 1.0], 240.0), "float32 is no slower than that"
    found, unit = paced([exact, bf16], {BF16: 6.0}, [server("a", WHOLE, 7.5)])
    assert (found[1].pace * unit, unit) == (6.0, 60.0)
    assert not any(each.is_slow for each in prospects(found, {}, unit=unit)), "the device may be as slow in float32"


def test_the_user_hears_why() -> None:
    def said(candidates: list[Candidate], servers: Servers, met: dict[PeerId, str] | None = None) -> str:
        found = prospects(candidates, servers, met)
        return describe_own(choose_own(found), found)

    both = alike(EXACT, BF16)
    servers = {EXACT: [server("a"), server("b")], BF16: [server("c", FRONT), server("d", FRONT)]}
    assert said(both, servers) == (
        "bfloat16: the swarm lacks blocks [4, 8) in it, and this node serves them; float32 is whole without it"
    )
    assert said(alike(EXACT, BF16, blocks=3), servers) == (
        "float32: 2 servers have the whole model in it, and this node may add up to 10 tokens/s; "
        "bfloat16 lacks blocks [7, 8) even with this node"
    )
    assert said(both, servers, {PeerId("a"): "a", PeerId("b"): "b"}).endswith("; too few servers of bfloat16 answer")
    slow = [Candidate(EXACT, 4, 1.0), replace(both[1], pace=0.1)]
    assert said(slow, servers).endswith("; this device is slow in bfloat16")
    assert said([Candidate(BF16, 4, 0.1)], {BF16: servers[BF16]}).endswith("them, though this device is slow in it")
    assert said(alike(INT8), {}) == "float32+int8: nobody serves the model in it, and it suits this device"
    assert said(alike(EXACT, blocks=2), {EXACT: [server("a", FRONT)]}) == (
        "float32: no precision is served whole, and this one lacks blocks [6, 8) with this node"
    )
    assert said(both, dict.fromkeys((EXACT, BF16), servers[EXACT])).endswith("; in bfloat16 it would add 10")


@pytest.mark.parametrize("span", [Span(0, 4), Span(2, 6)])
def test_blocks_that_the_owner_chose_are_those_that_count(span: Span) -> None:
    servers = {EXACT: [server("a"), server("b")], BF16: [server("c", BACK), server("d", BACK)]}
    found = prospects_of(BLOCKS, alike(EXACT, BF16), servers, all_met(servers), 80.0, span)
    assert choose_own(found).precision == (BF16 if span == FRONT else EXACT)
