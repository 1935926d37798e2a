"""The time for a pass follows its size and the speed of its peer, within bounds."""

from __future__ import annotations

import math
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.pass_patience import PEERS, PassPatience, PassSize
from llmnode.core.peers.peer_speed import PeerSpeed
from llmnode.core.policy import PassPolicy

POLICY = PassPolicy()
PEER = PeerId("peer")
SMALL, LARGE = PassSize(100, 1 << 10), PassSize(100_000, 8 << 20)

STRANGER = PeerId("stranger")

sizes = st.builds(PassSize, st.integers(1, 10**9), st.integers(0, 1 << 26))


def test_a_larger_pass_has_more_time() -> None:
    patience = PassPatience(POLICY)
    assert POLICY.base_s < patience.timeout_s(PEER, SMALL) < POLICY.base_s + 1
    assert patience.timeout_s(PEER, LARGE) == POLICY.base_s + 100_000 / POLICY.cost_per_s + 128


def test_a_peer_that_was_fast_is_given_up_sooner_and_no_other() -> None:
    patience = PassPatience(POLICY)
    patience.note(PEER, LARGE, 2.0)
    assert patience.timeout_s(PEER, LARGE) == POLICY.patience_s + 2 * POLICY.patience_times
    twice = PassSize(2 * LARGE.cost, LARGE.size_bytes)
    assert patience.timeout_s(PEER, twice) == POLICY.patience_s + 4 * POLICY.patience_times
    assert patience.timeout_s(PeerId("other"), LARGE) == PassPatience(POLICY).timeout_s(PEER, LARGE)


@given(sizes, st.lists(st.tuples(sizes, st.floats(0, 1e6)), max_size=5))
def test_the_time_is_within_bounds(size: PassSize, answered: list[tuple[PassSize, float]]) -> None:
    patience = PassPatience(POLICY)
    unknown_s = patience.timeout_s(PEER, size)
    for each, took_s in answered:
        patience.note(PEER, each, took_s)
    assert min(POLICY.patience_s, unknown_s) <= patience.timeout_s(PEER, size) <= unknown_s <= POLICY.longest_s


def test_a_limited_number_of_peers_is_remembered() -> None:
    patience = PassPatience(POLICY)
    for number in range(PEERS + 10):
        patience.note(PeerId(str(number)), SMALL, 1.0)
    assert len(patience._speeds) == PEERS
    assert PeerId(str(PEERS + 9)) in patience._speeds


def known(*took_s: float, policy: PassPolicy = POLICY) -> tuple[PassPatience, list[PeerId]]:
    """Peers that have answered a large pass in these times."""
    patience, peers = PassPatience(policy), [PeerId(f"known {number}") for number in range(len(took_s))]
    for peer, each in zip(peers, took_s, strict=True):
        patience.note(peer, LARGE, each)
    return patience, peers


def test_a_stranger_is_held_to_the_one_in_the_middle_of_those_that_could_take_its_place() -> None:
    patience, others = known(1.0, 2.0, 90.0)
    first_s = POLICY.first_patience_s + 2.0 * POLICY.first_patience_times
    assert patience.stranger_s(STRANGER, LARGE, others) == first_s < 30 < patience.timeout_s(STRANGER, LARGE) / 10
    assert patience.stranger_s(STRANGER, LARGE, [PeerId("another stranger"), *others]) == first_s
    assert patience.stranger_s(STRANGER, LARGE, []) is None, "nobody could take its place"
    assert patience.stranger_s(STRANGER, LARGE, [PeerId("another stranger")]) is None, "nobody is known"
    assert patience.stranger_s(others[0], LARGE, others) is None, "it is known"


def test_a_stranger_takes_parts_of_adapters_in_the_time_of_the_one_in_the_middle_or_at_a_least_rate() -> None:
    patience, others = known(1.0, 1.0, 1.0)
    least_s = LARGE.size_bytes / POLICY.bytes_per_s
    assert patience.stranger_parts_s(STRANGER, LARGE.size_bytes, others) == least_s, "they have taken none"
    for peer, took_s in zip(others, (0.1, 2.0, 1000.0), strict=True):
        parts = PeerSpeed()
        parts.note(LARGE.size_bytes // 2, took_s)
        patience.note(peer, LARGE, 1.0, parts)
    assert patience.stranger_parts_s(STRANGER, LARGE.size_bytes, others) == 4.0 * POLICY.first_patience_times
    assert patience.stranger_parts_s(STRANGER, LARGE.size_bytes, []) == least_s
    patience.note_overdue(STRANGER, 1.0, 100.0)
    assert patience.stranger_parts_s(STRANGER, LARGE.size_bytes, others) == 8.0 * POLICY.first_patience_times


def test_a_stranger_that_is_overdue_rests_and_has_twice_the_time_after_that() -> None:
    patience, others = known(1.0)
    first_s = patience.stranger_s(STRANGER, LARGE, others)
    assert first_s is not None
    for now_s in (100.0, 101.0, 102.0):  # passes that were there together
        patience.note_overdue(STRANGER, first_s, now_s)
    assert patience.stranger_s(STRANGER, LARGE, others) == 2 * first_s
    rests_until_s = 100.0 + POLICY.rest_times * first_s
    assert patience.resting(rests_until_s - 0.1) == {STRANGER}
    assert patience.resting(rests_until_s) == set()
    patience.note_overdue(STRANGER, 2 * first_s, rests_until_s + 1)
    assert patience.stranger_s(STRANGER, LARGE, others) == 4 * first_s
    patience.note(STRANGER, LARGE, 300.0)
    assert patience.stranger_s(STRANGER, LARGE, others) is None
    assert patience.resting(rests_until_s + 2) == set(), "it is only slow"


@given(st.lists(st.tuples(sizes, st.floats(0, 1e3)), min_size=1, max_size=5), sizes, st.integers(0, 12))
def test_a_stranger_has_no_less_time_than_the_policy_says_and_twice_that_when_it_was_overdue(
    answered: list[tuple[PassSize, float]], size: PassSize, cuts: int
) -> None:
    patience, others = PassPatience(POLICY), [PeerId(str(number)) for number in range(len(answered))]
    for peer, (each, took_s) in zip(others, answered, strict=True):
        patience.note(peer, each, took_s)
    before_s, now_s = 0.0, 0.0
    for _ in range(cuts + 1):
        most_s = patience.stranger_s(STRANGER, size, others)
        assert most_s is not None
        assert most_s >= max(2 * before_s, POLICY.first_patience_s), "a slow one has enough in the end"
        before_s, now_s = most_s, now_s + most_s
        patience.note_overdue(STRANGER, most_s, now_s)
        now_s += POLICY.rest_times * most_s


@given(st.floats(0.01, 1e3), st.floats(1e3, 1e6))
def test_a_silent_stranger_holds_up_passes_for_a_twentieth_of_the_time(usual_s: float, until_s: float) -> None:
    """One that never answers has a pass whenever it does not rest."""
    patience, others = known(usual_s)
    first_s = patience.stranger_s(STRANGER, LARGE, others)
    assert first_s is not None
    now_s = waited_s = 0.0
    while now_s < until_s:
        if patience.resting(now_s):
            now_s = math.nextafter(patience._rests[STRANGER].until_s, math.inf)
            continue
        each_s = patience.stranger_s(STRANGER, LARGE, others)
        assert each_s is not None
        waited_s, now_s = waited_s + each_s, now_s + each_s
        patience.note_overdue(STRANGER, each_s, now_s)
        assert waited_s <= now_s / POLICY.rest_times + each_s


def test_a_limited_number_of_peers_rests() -> None:
    patience = PassPatience(replace(POLICY, rest_times=1e6))
    for number in range(PEERS + 10):
        patience.note_overdue(PeerId(str(number)), 1.0, 0.0)
    assert len(patience.resting(1.0)) == PEERS
