"""A decode beside others takes longer. A client judges a server by the company that its decodes had."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmnode.core.announcement import Announcement, Offer, PeerState
from llmnode.core.model import Precision, Profile
from llmnode.core.peers.standing import Candidate, DecodeTime, OwnUse, Standing, candidate_of
from llmnode.core.route import HopCost
from llmnode.core.span import Span
from llmnode.core.speed import SHARED_SESSIONS, AnnouncedSpeed
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


def test_a_server_that_has_not_measured_many_sessions_gains_nothing_by_that() -> None:
    measured, told = busy(4.0), []
    for load in (0.0, 4.0):
        unmeasured = replace(measured.offer, speed=AnnouncedSpeed(), load=load)
        told.append(1e3 * candidate_of(replace(measured, offer=unmeasured), 4).said_block_s)
    assert told == pytest.approx([1.0, 5.5], rel=0.01)
    assert told[1] > 1e3 * candidate_of(measured, 4).said_block_s
