"""The answer of a server makes it look worse and never better, for a while. Clients of one moment spread."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.asked_loads import PEERS, AskedLoads, LoadNow, expected
from llmnode.core.peers.standing import OwnUse
from llmnode.core.peers.tastes import Tastes, draw_numbers
from llmnode.core.route import HopCost
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

A, B, C = (PeerId(name) for name in "abc")
KEEPS_S, SILENT_S = 5.0, 60.0
OFFER = Offer("m", Profile(bytes(32), Precision("float32")), 6, Span(0, 6), PeerState.ONLINE, 1000, 400, 300, load=1.0)


def announced(peer: PeerId, **offered: float) -> Announcement:
    return Announcement(peer, (), 0, 0, "llmnode/1", replace(OFFER, **offered))  # type: ignore[arg-type]


def seen(loads: AskedLoads, now_s: float, own: Mapping[PeerId, OwnUse] | None = None, near_s: float = 0.0) -> Offer:
    """The offer of A as it is believed."""
    (worse,) = loads.worse_of([announced(A)], lambda _: own or {}, {A: near_s}, now_s)
    return worse.offer


def test_an_answer_counts_where_it_is_worse_and_for_a_while() -> None:
    loads = AskedLoads(KEEPS_S, SILENT_S)
    loads.note(A, LoadNow(2.0, 1.0, 0, 100), 0.0, 10.0)
    assert (seen(loads, 10.0).load, seen(loads, 10.0).kv_tokens_free) == (3.0, 100)
    assert seen(loads, 10.0 + KEEPS_S) == OFFER
    loads.note(A, LoadNow(0.0, 0.0, 0, 4000), 0.0, 20.0)
    assert seen(loads, 20.0) == OFFER


def test_a_session_that_comes_counts_for_the_share_of_its_time_there() -> None:
    loads = AskedLoads(KEEPS_S, SILENT_S)
    loads.note(A, LoadNow(2.0, 1.0, 0, 400), 0.0, 10.0)
    assert seen(loads, 10.0, near_s=0.018).load == pytest.approx(2.25)
    loads.note_coming(A, 3, 10.0)
    assert seen(loads, 10.0, near_s=0.018).load == pytest.approx(3.0)


def test_what_the_client_has_there_itself_is_taken_from_the_answer_and_is_still_in_what_is_announced() -> None:
    loads = AskedLoads(KEEPS_S, SILENT_S)
    loads.note(A, LoadNow(2.5, 0.0, 0, 400), 1.5, 10.0)
    assert seen(loads, 10.0, {A: OwnUse(2, 0, 1.5, 0.5)}).load == pytest.approx(1.0 + 0.5)


def test_one_that_is_silent_is_left_alone_until_it_answers_or_a_while_later() -> None:
    loads = AskedLoads(KEEPS_S, SILENT_S)
    assert not loads.is_silent(A, 0.1)
    loads.note_silent(A, 0.1)
    assert loads.is_silent(A, SILENT_S) and not loads.is_silent(A, SILENT_S + 0.1)
    loads.note(A, LoadNow(0.0, 0.0, 0, 0), 0.0, 1.0)
    assert not loads.is_silent(A, 2.0)
    assert loads.age_s(A, 2.0) == 1.0 and loads.age_s(A, 1.0 + KEEPS_S) is None and loads.age_s(B, 2.0) is None


def test_few_answers_are_remembered() -> None:
    loads = AskedLoads(KEEPS_S, SILENT_S)
    for number in range(2 * PEERS):
        loads.note(PeerId(str(number)), LoadNow(1.0, 0.0, 0, 0), 0.0, 1.0)
        loads.note_silent(PeerId(str(number)), 1.0)
    assert sum(loads.age_s(PeerId(str(number)), 1.0) is not None for number in range(2 * PEERS)) == PEERS
    assert sum(loads.is_silent(PeerId(str(number)), 1.0) for number in range(2 * PEERS)) == PEERS


def test_clients_that_asked_the_same_server_spread_as_if_they_had_come_one_by_one() -> None:
    alone_s = {A: 1.0, B: 1.3, C: 1.3}
    taken: Counter[PeerId] = Counter()

    def cost_s(peer: PeerId, beside: int) -> float:
        return alone_s[peer] * (1 + beside)

    for before in range(12):
        there = expected(A, before, (B, C), cost_s)
        assert there.total() == before
        taken[min((A, B, C), key=lambda peer: cost_s(peer, there[peer]))] += 1
    assert taken == {A: 5, B: 4, C: 3}
    assert expected(A, 10**9, (), cost_s).total() < 100, "a number is a claim"


def drawn(numbers: list[float]) -> Callable[[int], list[float]]:
    return lambda count: numbers[:count]


@given(st.integers(0, 100), st.integers(1, 20))
def test_numbers_that_are_drawn_together_are_those_that_would_be_drawn_one_by_one(seed: int, count: int) -> None:
    one, other = random.Random(seed), random.Random(seed)
    assert draw_numbers(one, count) == [other.random() for _ in range(count)]
    assert one.random() == other.random()


def test_each_client_prefers_others_of_nearly_equal_servers_and_no_much_dearer_one() -> None:
    costs = {A: HopCost(0.01, 0.001, 0.004), B: HopCost(0.0101, 0.00101), C: HopCost(0.011, 0.0011)}
    chosen: Counter[PeerId] = Counter()
    for number in range(100):
        tastes = Tastes(0.05, drawn([number / 100, number * 37 % 100 / 100, 0.0]))
        liked = tastes.of(costs)
        assert liked == tastes.of(costs), "it stays the same"
        assert liked[A].way_s == 0.004
        chosen[min(costs, key=lambda peer: liked[peer].hop_s)] += 1
    assert 10 < chosen[B] < chosen[A] and not chosen[C]
