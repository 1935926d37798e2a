"""A client believes what peers say about their speed only as far as it costs little. Its own experience counts."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.peer_speed import PromisedTime
from llmnode.core.peers.standing import MOST_SUPPOSED_S, PEERS, SLOW, Candidate, DecodeTime, Standing
from llmnode.core.route import HopCost
from unit.standing_peers import (
    BLOCKS,
    HONEST,
    HONEST_S,
    LIAR,
    POLICY,
    candidates,
    company,
    first_choice,
    serve,
    total_s,
)


def test_without_lies_costs_are_as_said() -> None:
    costs = Standing(POLICY).costs([Candidate(HONEST[0], 0.001, 0), Candidate(HONEST[1], 0.004, 0)], 0.0)
    assert [costs[each].block_s for each in HONEST[:2]] == [0.001, 0.004]


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
        waits_s.append(standing.promised_time(LIAR, 0.1, 15.0, 0.0).patience_s)
        standing.note_failed(LIAR, 0.0)
    assert waits_s[:3] == [POLICY.first_patience_s * times for times in (1, 2, 4)]
    assert waits_s[-1] == waits_s[-2] == POLICY.first_patience_s * 2**POLICY.most_failures
    serve(standing, LIAR, 0.01)
    assert standing.promised_time(LIAR, 0.1, 15.0, 0.0) == PromisedTime(0.1, 15.0), "it has proved itself"


def test_patience_with_a_peer_that_has_computed_in_a_trial_follows_the_time_that_it_took() -> None:
    """So a quick one that then hangs costs less, and a slow one has as long as before."""
    first_s, tried_s = POLICY.first_patience_s, POLICY.tried_patience_s
    for took_s in (0.0, 0.05, 0.2, 1.0):
        standing = Standing(POLICY)
        standing.note_served(LIAR, BLOCKS, 1, took_s, 0.0)
        patience_s = standing.promised_time(LIAR, 0.1, 15.0, POLICY.tried_s).patience_s
        assert patience_s == pytest.approx(min(first_s, tried_s + POLICY.tried_patience_times * took_s))
        assert standing.promised_time(LIAR, 0.1, 15.0, POLICY.tried_s + 1).patience_s == first_s, "it may be busier now"
        standing.note_failed(LIAR, 0.0)
        assert standing.promised_time(LIAR, 0.1, 15.0, 0.0).patience_s == 2 * first_s, "it may just be slow"
        standing.note_served(LIAR, BLOCKS, 1, took_s, 0.0)
        assert standing.promised_time(LIAR, 0.1, 15.0, 0.0).patience_s == 2 * patience_s
        standing.note_served(LIAR, BLOCKS, 500, 9.0, POLICY.tried_s + 1)
        patience_s = standing.promised_time(LIAR, 0.1, 15.0, POLICY.tried_s + 1).patience_s
        assert patience_s == 2 * first_s, "a prefill shows little"
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
