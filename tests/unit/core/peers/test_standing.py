"""A client believes what peers say about their speed only as far as it costs little. Its own experience counts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.ids import PeerId
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.peer_speed import Word
from llmnode.core.peers.standing import (
    MOST_SUPPOSED_S,
    PEERS,
    SLOW,
    Candidate,
    DecodeTime,
    OwnUse,
    Standing,
    candidate_of,
)
from llmnode.core.policy import StandingPolicy
from llmnode.core.route import Hop, HopCost, find_route
from llmnode.core.span import Span
from llmnode.core.speed import SHARED_SESSIONS, AnnouncedSpeed

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICY = StandingPolicy()
HONEST_S = 0.0004
BLOCKS = 30
LIAR = PeerId("liar")
HONEST = [PeerId(f"honest {number}") for number in range(10)]


def candidates(*liars: PeerId, sessions: int = 0) -> list[Candidate]:
    honest = [Candidate(each, HONEST_S, 0) for each in HONEST]
    return [*honest, *(Candidate(each, 1e-6, sessions) for each in liars)]


def total_s(cost: HopCost, blocks: int = BLOCKS) -> float:
    return cost.hop_s + blocks * cost.block_s


def serve(standing: Standing, peer: PeerId, took_s: float, now_s: float = 0.0, beside: float = 0.0) -> None:
    for _ in range(POLICY.proven_positions):
        standing.note_served(peer, BLOCKS, 1, took_s, now_s, beside)


def first_choice(standing: Standing, offers: Sequence[Candidate], now_s: float = 0.0) -> PeerId:
    costs = standing.costs(offers, now_s)
    return find_route(BLOCKS, [Hop(each.peer, Span(0, BLOCKS)) for each in offers], costs)[0].peer


def test_without_lies_costs_are_as_said() -> None:
    costs = Standing(POLICY).costs([Candidate(HONEST[0], 0.001, 0), Candidate(HONEST[1], 0.004, 0)], 0.0)
    assert [costs[each].block_s for each in HONEST[:2]] == [0.001, 0.004]


def busy(load: float | None) -> Announcement:
    """A server of 30 blocks, each of 1 ms alone, and of 0.5 ms more for each further decode."""
    shared = 1e3 * SHARED_SESSIONS / (BLOCKS * (0.001 + 0.0005 * (SHARED_SESSIONS - 1)))
    speed = AnnouncedSpeed(tokens_per_1000_s=round(shared))
    profile = Profile(b"d" * 32, Precision())
    offer = Offer("model", profile, BLOCKS, Span(0, BLOCKS), PeerState.ONLINE, 1000, 99, 99, speed, load=load)
    return Announcement(HONEST[0], (), 1, 2, "llmnode/1", offer)


@pytest.mark.parametrize(
    ("load", "sessions", "lately", "block_ms"),
    [
        (0.0, 0, 0, 1.0),
        (0.0, 8, 0, 1.0),  # they only wait
        (0.0, 8, 8, 5.0),  # the load does not count them yet
        (None, 8, 0, 5.0),  # an older server
        (0.5, 0, 0, 1.5),  # half of a forward for half of the time, and half a decode more in its own
        (4.0, 0, 0, 3.5),
        (4.0, 4, 2, 4.5),
    ],
)
def test_a_decode_shares_its_forwards_with_what_is_there(
    load: float | None, sessions: int, lately: int, block_ms: float
) -> None:
    candidate = candidate_of(busy(load), 4, None, OwnUse(sessions, lately))
    assert 1e3 * candidate.said_block_s == pytest.approx(block_ms, rel=0.01)
    assert candidate.sessions == sessions


@pytest.mark.parametrize(
    ("own", "block_ms"),
    [
        (OwnUse(4, 0, load=2.0, announced=2.0), 3.5),  # as they were
        (OwnUse(0, 0, load=2.0, announced=2.0), 2.5),  # they have ended since
        (OwnUse(1, 0, load=2.0, announced=2.0), 3.0),
        (OwnUse(4, 0, load=0.0, announced=2.0), 2.5),  # they wait for their users since
        (OwnUse(4, 0, load=4.0, announced=2.0), 4.5),
        (OwnUse(0, 0, load=5.0, announced=5.0), 1.0),  # averages of two clocks
    ],
)
def test_the_own_part_of_a_load_is_as_it_is_now(own: OwnUse, block_ms: float) -> None:
    assert 1e3 * candidate_of(busy(4.0), 4, None, own).said_block_s == pytest.approx(block_ms, rel=0.01)


def test_a_decode_that_is_judged_has_the_company_that_it_had_and_others_as_they_are() -> None:
    candidate = candidate_of(busy(4.0), 4, None, OwnUse(4, 0, load=2.0, announced=2.0))
    assert [1e3 * candidate.said_beside_s(own) for own in (0, 2, 6)] == pytest.approx([2.5, 3.5, 5.5], rel=0.01)
    alone = candidate_of(busy(0.0), 4, None, OwnUse())
    assert [1e3 * alone.said_beside_s(own) for own in (0, 0.5, 8)] == pytest.approx([1.0, 1.5, 5.5], rel=0.01)


def company(peer: PeerId, decode: DecodeTime, own: float = 0.0) -> Candidate:
    """The peer, as it is for a session beside this number of the client's own ones."""
    return Candidate(peer, decode.beside_s(own), 0, decode=decode)


BATCHES = DecodeTime(HONEST_S, HONEST_S / 2, 0.0)
COMPANIES = 0.0, 0.3, 1.0, 7.0, 31.0


@pytest.mark.parametrize("beside", COMPANIES)
def test_a_server_that_is_as_fast_as_it_says_never_seems_slow_for_our_own_company(beside: float) -> None:
    standing, newcomer = Standing(POLICY), Candidate(LIAR, 1e-6, 0)
    serve(standing, HONEST[0], BLOCKS * BATCHES.beside_s(beside), beside=beside)
    costs = standing.costs([company(HONEST[0], BATCHES), newcomer], 0.0)
    assert costs[HONEST[0]] == HopCost(HopCost().hop_s, HONEST_S)
    assert costs[LIAR].block_s == pytest.approx(POLICY.unproven_cost * HONEST_S), "nor do others beside it"


@pytest.mark.parametrize("beside", COMPANIES)
def test_a_server_that_is_slower_than_it_says_is_found_alone_and_in_company(beside: float) -> None:
    standing, times = Standing(POLICY), 3.0
    serve(standing, HONEST[0], times * BLOCKS * BATCHES.beside_s(beside), beside=beside)
    for own in (0.0, beside):
        cost = standing.costs([company(HONEST[0], BATCHES, own)], 0.0)[HONEST[0]]
        assert total_s(cost) >= times * BLOCKS * BATCHES.beside_s(own) * (1 - 1e-9)
    slower = DecodeTime(2 * HONEST_S, HONEST_S, 0.0)
    serve(standing, HONEST[1], BLOCKS * slower.beside_s(beside), beside=beside)
    assert first_choice(standing, [company(HONEST[0], BATCHES), company(HONEST[1], slower)]) == HONEST[1]


@pytest.mark.parametrize("beside", COMPANIES)
def test_a_liar_in_our_company_costs_what_it_takes(beside: float) -> None:
    standing = Standing(POLICY)
    serve(standing, LIAR, 2.0, beside=beside)
    liar = company(LIAR, DecodeTime(1e-6, 1e-6, 0.0))
    assert total_s(standing.costs([liar], 0.0)[LIAR]) == pytest.approx(2.0, rel=0.01)
    assert first_choice(standing, [*candidates(), liar]) in HONEST


def test_a_liar_that_gives_our_company_as_its_reason_costs_what_it_takes_there_and_is_found_when_we_are_alone() -> None:
    """It says that it is quick alone, and that each further decode takes as long as all of them do."""
    standing, beside = Standing(POLICY), 7.0
    reason = DecodeTime(1e-6, 2.0 / BLOCKS / beside, 0.0)
    serve(standing, LIAR, 2.0, beside=beside)
    assert total_s(standing.costs([company(LIAR, reason, beside)], 0.0)[LIAR]) >= 2.0
    for _ in range(9):  # more than half of the steps that count
        standing.note_served(LIAR, BLOCKS, 1, 2.0, 0.0)
    assert total_s(standing.costs([company(LIAR, reason)], 0.0)[LIAR]) == pytest.approx(2.0, rel=0.01)


def test_a_stranger_is_believed_to_be_a_few_times_as_fast_as_others_at_most() -> None:
    costs = Standing(POLICY).costs(candidates(LIAR), 0.0)
    assert costs[LIAR].block_s == HONEST_S / POLICY.believed_times


def test_a_stranger_does_not_take_over_from_a_peer_that_serves_us() -> None:
    standing = Standing(POLICY)
    assert first_choice(standing, candidates(LIAR)) == LIAR
    serve(standing, HONEST[3], 0.005 + BLOCKS * HONEST_S)
    assert first_choice(standing, candidates(LIAR, PeerId("another"))) == HONEST[3]


def test_a_liar_that_serves_costs_what_it_takes() -> None:
    standing = Standing(POLICY)
    serve(standing, LIAR, 2.0)
    costs = standing.costs(candidates(LIAR), 0.0)
    assert total_s(costs[LIAR]) == pytest.approx(2.0)
    assert first_choice(standing, candidates(LIAR)) in HONEST


def test_a_peer_that_says_that_it_is_slow_is_believed() -> None:
    standing = Standing(POLICY)
    serve(standing, HONEST[0], 0.01)
    cost = standing.costs([Candidate(HONEST[0], 1.0, 0)], 0.0)[HONEST[0]]
    assert total_s(cost) >= BLOCKS


def test_an_exploring_session_finds_a_fast_newcomer() -> None:
    standing = Standing(POLICY)
    serve(standing, HONEST[0], BLOCKS * HONEST_S)
    usual, exploring = (standing.costs(candidates(LIAR), 0.0, each)[LIAR] for each in ((), (LIAR,)))
    assert usual.block_s == HONEST_S * POLICY.unproven_cost
    assert exploring.block_s == HONEST_S / POLICY.believed_times


def test_a_stranger_gets_one_session_at_a_time() -> None:
    standing = Standing(POLICY)
    alone, busy = (standing.costs(candidates(LIAR, sessions=number), 0.0)[LIAR] for number in (0, 1))
    assert total_s(busy) == pytest.approx(POLICY.entrusted_cost * total_s(alone))
    serve(standing, LIAR, 0.01)
    alone, busy = (standing.costs(candidates(LIAR, sessions=number), 0.0)[LIAR] for number in (0, 1))
    assert total_s(busy) == total_s(alone), "it has proved itself"


def test_a_peer_that_does_not_serve_what_it_took_proves_itself_anew() -> None:
    standing = Standing(POLICY)
    serve(standing, LIAR, 0.01)
    standing.note_failed(LIAR, 0.0)
    assert not standing.is_proven(LIAR, 0.0)
    once = total_s(standing.costs(candidates(LIAR), 0.0)[LIAR])
    standing.note_failed(LIAR, 0.0)
    assert total_s(standing.costs(candidates(LIAR), 0.0)[LIAR]) == pytest.approx(2 * once)
    assert total_s(standing.costs(candidates(LIAR), POLICY.keeps_s + 1)[LIAR]) < once, "it is forgotten"
    serve(standing, LIAR, 0.01)
    assert standing.is_proven(LIAR, 0.0)


def test_a_peer_with_slow_steps_counts_as_slow_before_it_has_proved_itself() -> None:
    standing = Standing(POLICY)
    standing.note_served(LIAR, BLOCKS, 1, 2.0, 0.0)
    assert total_s(standing.costs(candidates(LIAR), 0.0)[LIAR]) >= 2.0
    assert first_choice(standing, candidates(LIAR)) in HONEST
    assert first_choice(standing, candidates(LIAR), POLICY.keeps_s + 1) == LIAR, "it is forgotten"


def test_patience_with_a_stranger_doubles_with_each_failure() -> None:
    standing = Standing(POLICY)
    waits_s = []
    for _ in range(POLICY.most_failures + 2):
        waits_s.append(standing.word(LIAR, 0.1, 15.0, 0.0).patience_s)
        standing.note_failed(LIAR, 0.0)
    assert waits_s[:3] == [POLICY.first_patience_s * times for times in (1, 2, 4)]
    assert waits_s[-1] == waits_s[-2] == POLICY.first_patience_s * 2**POLICY.most_failures
    serve(standing, LIAR, 0.01)
    assert standing.word(LIAR, 0.1, 15.0, 0.0) == Word(0.1, 15.0), "it has proved itself"


def test_patience_with_a_peer_that_has_computed_in_a_trial_follows_the_time_that_it_took() -> None:
    """So a quick one that then hangs costs less, and a slow one has as long as before."""
    first_s, tried_s = POLICY.first_patience_s, POLICY.tried_patience_s
    for took_s in (0.0, 0.05, 0.2, 1.0):
        standing = Standing(POLICY)
        standing.note_served(LIAR, BLOCKS, 1, took_s, 0.0)
        patience_s = standing.word(LIAR, 0.1, 15.0, POLICY.tried_s).patience_s
        assert patience_s == pytest.approx(min(first_s, tried_s + POLICY.tried_patience_times * took_s))
        assert standing.word(LIAR, 0.1, 15.0, POLICY.tried_s + 1).patience_s == first_s, "it may be busier now"
        standing.note_failed(LIAR, 0.0)
        assert standing.word(LIAR, 0.1, 15.0, 0.0).patience_s == 2 * first_s, "it may just be slow"
        standing.note_served(LIAR, BLOCKS, 1, took_s, 0.0)
        assert standing.word(LIAR, 0.1, 15.0, 0.0).patience_s == 2 * patience_s
        standing.note_served(LIAR, BLOCKS, 500, 9.0, POLICY.tried_s + 1)
        assert standing.word(LIAR, 0.1, 15.0, POLICY.tried_s + 1).patience_s == 2 * first_s, "a prefill shows little"
    assert tried_s < first_s


def test_a_long_prefill_proves_nothing_since_it_does_not_show_the_time_of_a_token() -> None:
    standing = Standing(POLICY)
    standing.note_served(LIAR, BLOCKS, 500, 0.01, 0.0)
    assert not standing.is_proven(LIAR, 0.0)
    standing.note_served(LIAR, BLOCKS, POLICY.short_step, 2.0, 0.0)
    assert not standing.is_proven(LIAR, 0.0)
    standing.note_served(LIAR, BLOCKS, POLICY.proven_positions, 0.01, 0.0)
    standing.note_served(LIAR, BLOCKS, POLICY.short_step, 2.0, 0.0)
    assert standing.is_proven(LIAR, 0.0)
    assert total_s(standing.costs(candidates(LIAR), 0.0)[LIAR]) == pytest.approx(2.0)


def test_what_a_peer_did_not_measure_counts_as_slow() -> None:
    measured = [Candidate(each, HONEST_S, 0, 0.02, 0.001) for each in HONEST]
    costs = Standing(POLICY).costs([*measured, Candidate(LIAR, 0.0, 0)], 0.0)
    assert costs[LIAR].block_s == SLOW * HONEST_S
    assert costs[LIAR].hop_s == pytest.approx(SLOW * (0.02 + 0.001))
    assert costs[HONEST[0]] == HopCost(0.021, HONEST_S, 0.01)


def test_one_peer_that_says_that_it_is_very_slow_makes_nobody_else_dear() -> None:
    measured = [Candidate(each, HONEST_S, 0, 0.02, 0.001) for each in HONEST]
    slow = Candidate(LIAR, 100.0, 0, 4.0, 100.0)
    costs = Standing(POLICY).costs([*measured, slow, Candidate(PeerId("old"), 0.0, 0)], 0.0)
    assert total_s(costs[PeerId("old")]) < 2.1 * total_s(costs[HONEST[0]])


def test_a_stranger_with_a_tiny_upload_is_not_preferred_to_proven_peers_that_measured_none() -> None:
    standing = Standing(POLICY)
    serve(standing, HONEST[0], 0.005 + BLOCKS * HONEST_S)
    offers = [Candidate(HONEST[0], HONEST_S, 0, 0.02), Candidate(LIAR, HONEST_S, 0, 0.02, 0.5)]
    before = standing.costs(offers[:1], 0.0)[HONEST[0]]
    assert standing.costs(offers, 0.0)[HONEST[0]] == before
    assert first_choice(standing, offers) == HONEST[0]


def test_a_stranger_with_a_tiny_upload_makes_servers_that_measured_none_little_dearer() -> None:
    offers = [Candidate(HONEST[0], HONEST_S, 0, 0.02), Candidate(LIAR, HONEST_S, 0, 0.02, 0.5)]
    costs = Standing(POLICY).costs(offers, 0.0)
    assert costs[HONEST[0]].hop_s == pytest.approx(0.02 + MOST_SUPPOSED_S)
    assert first_choice(Standing(POLICY), offers) == HONEST[0]


def test_the_round_trip_to_a_peer_that_serves_us_counts_even_if_steps_are_pushed_to_it() -> None:
    standing = Standing(POLICY)
    serve(standing, HONEST[0], BLOCKS * HONEST_S)
    cost = standing.costs([Candidate(HONEST[0], HONEST_S, 0, 0.1)], 0.0)[HONEST[0]]
    assert cost == HopCost(0.1, HONEST_S, 0.05)


PLACES_S = [0.01, 0.05, 0.12]


def far_swarm(way_s: float, *newcomers: Candidate, upload_s: float = 0.0) -> tuple[HopCost, list[HopCost]]:
    """The cost of peers that have proved themselves, all at one place, and those of newcomers beside them."""
    standing = Standing(POLICY)
    proven = [Candidate(each, HONEST_S, 0, way_s, upload_s, blocks=BLOCKS) for each in HONEST]
    for each in HONEST:
        serve(standing, each, way_s + upload_s + BLOCKS * HONEST_S)
    costs = standing.costs([*proven, *newcomers], 0.0)
    return costs[HONEST[0]], [costs[each.peer] for each in newcomers]


@pytest.mark.parametrize("upload_s", [0.0, 0.01])
@pytest.mark.parametrize("way_s", PLACES_S)
def test_the_way_to_a_newcomer_counts_once(way_s: float, upload_s: float) -> None:
    newcomer = Candidate(LIAR, HONEST_S / 2, 0, way_s, upload_s, blocks=BLOCKS)
    proven, (cost,) = far_swarm(way_s, newcomer, upload_s=upload_s)
    assert total_s(proven) == pytest.approx(way_s + upload_s + BLOCKS * HONEST_S)
    assert total_s(cost) == pytest.approx(POLICY.unproven_cost * total_s(proven))
    farther = newcomer._replace(round_trip_s=2 * way_s)
    _, (cost,) = far_swarm(way_s, farther, upload_s=upload_s)
    assert cost.hop_s == pytest.approx(2 * way_s + upload_s)
    assert cost.block_s == pytest.approx(POLICY.unproven_cost * HONEST_S)


@pytest.mark.parametrize("way_s", PLACES_S)
def test_of_two_newcomers_at_a_far_place_the_faster_one_is_preferred(way_s: float) -> None:
    fast, slow = (Candidate(PeerId(str(times)), times * HONEST_S, 0, way_s, blocks=BLOCKS) for times in (1.5, 2.0))
    _, costs = far_swarm(way_s, fast, slow)
    assert [each.block_s for each in costs] == pytest.approx([1.5 * HONEST_S, 2 * HONEST_S])


@pytest.mark.parametrize("blocks", [1, 10, 29, 30, 31, 60, 1000])
@pytest.mark.parametrize("near_s", [0.001, 0.01, 0.05])
def test_a_newcomer_gains_nothing_by_being_near_or_by_many_blocks_that_it_says_that_it_has(
    near_s: float, blocks: int
) -> None:
    proven, (cost,) = far_swarm(0.05, Candidate(LIAR, 1e-6, 0, near_s, blocks=blocks))
    routes_s = max(1.0, blocks / BLOCKS) * proven.hop_s + blocks * proven.block_s
    assert total_s(cost, blocks) >= POLICY.unproven_cost * routes_s * (1 - 1e-9)


@pytest.mark.parametrize("way_s", [None, 0.02, 0.05])
def test_what_a_proven_peer_takes_beyond_its_word_counts_once_for_newcomers(way_s: float | None) -> None:
    standing, said_s, took_s = Standing(POLICY), 0.001, 0.14
    serve(standing, HONEST[0], took_s)
    proven = Candidate(HONEST[0], said_s, 0, way_s, blocks=BLOCKS)
    cost = standing.costs([proven, Candidate(LIAR, 1e-6, 0, way_s, blocks=BLOCKS)], 0.0)[LIAR]
    least_s = HopCost().hop_s if way_s is None else 0.0
    assert total_s(cost) == pytest.approx(POLICY.unproven_cost * (took_s + least_s))


@pytest.mark.parametrize("honest", [1, 2, 3])
def test_the_words_of_one_proven_peer_about_its_way_make_newcomers_little_dearer(honest: int) -> None:
    standing, way_s = Standing(POLICY), 0.05
    usual = [Candidate(each, HONEST_S, 0, way_s, 0.001, blocks=BLOCKS) for each in HONEST[:honest]]
    far = Candidate(PeerId("far"), HONEST_S, 0, 9.0, 16.0, blocks=BLOCKS)
    for each in (*usual, far):
        serve(standing, each.peer, way_s + 0.001 + BLOCKS * HONEST_S)
    newcomer = Candidate(LIAR, HONEST_S, 0, way_s, 0.001, blocks=BLOCKS)
    costs = standing.costs([*usual, far, newcomer], 0.0)
    assert total_s(costs[LIAR]) == pytest.approx(POLICY.unproven_cost * total_s(costs[HONEST[0]]))


def test_a_way_that_was_not_measured_may_be_a_lie_about_blocks() -> None:
    """Most of a peer's time beyond what it says is then not taken away from what others are compared with."""
    standing = Standing(POLICY)
    serve(standing, HONEST[0], 0.1 + BLOCKS * HONEST_S)
    costs = standing.costs([Candidate(HONEST[0], HONEST_S, 0), Candidate(LIAR, 1e-6, 0)], 0.0)
    assert costs[LIAR].block_s == pytest.approx(POLICY.unproven_cost * (HONEST_S + 0.1 / BLOCKS))


def test_proofs_are_forgotten() -> None:
    standing = Standing(POLICY)
    serve(standing, LIAR, 0.01, now_s=5.0)
    assert standing.is_proven(LIAR, POLICY.keeps_s)
    assert not standing.is_proven(LIAR, POLICY.keeps_s + 6.0)


def test_a_client_remembers_a_limited_number_of_peers() -> None:
    standing = Standing(POLICY)
    for number in range(PEERS + 50):
        standing.note_failed(PeerId(f"peer {number}"), float(number) / 1e3)
    assert len(standing._known) == PEERS


@given(
    said=st.lists(st.floats(0, 10), min_size=1, max_size=8),
    further=st.floats(0, 10),
    served=st.lists(st.tuples(st.integers(0, 7), st.floats(0, 100), st.integers(1, 40), st.floats(0, 40)), max_size=20),
    refused=st.lists(st.integers(0, 7), max_size=6),
    explores=st.booleans(),
)
def test_nobody_gains_by_saying_less_than_it_takes(
    said: list[float],
    further: float,
    served: list[tuple[int, float, int, float]],
    refused: list[int],
    explores: bool,
) -> None:
    """A peer that has proved itself never costs less than what it took, in the median, and never less than it says.

    That is so in the company that it had, and alone if it says nothing of company.
    """
    standing, peers = Standing(POLICY), [PeerId(str(number)) for number in range(8)]
    for number, took_s, positions, beside in served:
        standing.note_served(peers[number], BLOCKS, positions, took_s, 0.0, beside)
    for number in refused:
        standing.note_failed(peers[number], 0.0)
    most = max((beside for *_, beside in served), default=0.0)
    offers = [
        Candidate(peer, said_s, 0) if number % 2 else company(peer, DecodeTime(said_s, further, 0.0), most)
        for number, (peer, said_s) in enumerate(zip(peers, said, strict=False))
    ]
    costs = standing.costs(offers, 0.0, peers if explores else ())
    assert costs.keys() == {each.peer for each in offers}
    for each in offers:
        assert costs[each.peer].block_s >= each.said_block_s
        assert costs[each.peer].hop_s >= HopCost().hop_s
        took = (
            sorted(took_s for _, took_s, _ in standing._known[each.peer].short_steps)
            if each.peer in standing._known
            else []
        )
        if standing.is_proven(each.peer, 0.0) and took:
            assert total_s(costs[each.peer]) >= took[(len(took) - 1) // 2] - 1e-9
