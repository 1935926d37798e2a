"""Bans: told a history of failures, which peers are banned, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId
from llmnode.core.peers.bans import Bans

FIRST_S, LONGEST_S = 2.0, 30.0
PEERS = [PeerId(name) for name in "abc"]
PEER = PEERS[0]

failures = st.lists(st.tuples(st.sampled_from(PEERS), st.integers(0, 40)), max_size=30)
"""The peer that fails, and the seconds since the failure before."""


def fresh_bans() -> Bans:
    return Bans(FIRST_S, LONGEST_S)


def ban_length_s(bans: Bans, now_s: float) -> int:
    """For how many whole seconds from now on PEER is banned without a break."""
    return next(later_s for later_s in range(1000) if not bans.is_banned(PEER, now_s + later_s))


def test_nobody_is_banned_without_a_failure() -> None:
    assert not fresh_bans().is_banned(PEER, 0.0)


def test_each_ban_is_twice_as_long_as_the_one_before_up_to_the_longest() -> None:
    bans, now_s, lengths = fresh_bans(), 100, []
    for _ in range(7):
        bans.report(PEER, now_s)
        lengths.append(ban_length_s(bans, now_s))
        now_s += lengths[-1]
    assert lengths == [2, 4, 8, 16, 30, 30, 30]


def test_what_a_dozen_sessions_report_of_one_death_counts_once() -> None:
    bans = fresh_bans()
    for _ in range(12):
        bans.report(PEER, 0.0)
        bans.report(PEER, 1.9)
    assert ban_length_s(bans, 0) == 2
    bans.report(PEER, 2.0)
    assert ban_length_s(bans, 2) == 4


def test_who_has_not_failed_for_the_longest_time_after_its_ban_is_as_good_as_new() -> None:
    bans = fresh_bans()
    bans.report(PEER, 0)
    bans.report(PEER, 31)
    assert ban_length_s(bans, 31) == 4
    bans.report(PEER, 35 + 30)
    assert ban_length_s(bans, 65) == 2


@given(failures)
def test_a_failure_bans_its_peer_for_some_time_and_nobody_else(history: list[tuple[PeerId, int]]) -> None:
    bans, now_s = fresh_bans(), 0
    for peer, later_s in history:
        now_s += later_s
        others = [(other, bans.is_banned(other, now_s)) for other in PEERS if other != peer]
        bans.report(peer, now_s)
        assert bans.is_banned(peer, now_s)
        assert not bans.is_banned(peer, now_s + LONGEST_S)
        assert [(other, bans.is_banned(other, now_s)) for other, _ in others] == others


@given(failures)
def test_what_others_do_changes_nothing_for_a_peer(history: list[tuple[PeerId, int]]) -> None:
    together, alone, now_s = fresh_bans(), fresh_bans(), 0
    for peer, later_s in history:
        now_s += later_s
        together.report(peer, now_s)
        if peer == PEER:
            alone.report(peer, now_s)
        assert ban_length_s(together, now_s) == ban_length_s(alone, now_s)


def costly_bans() -> Bans:
    return Bans(FIRST_S, LONGEST_S, times=4.0, longest_costly_s=200.0)


def test_a_ban_lasts_for_some_times_what_the_failure_cost_and_twice_as_long_each_time_up_to_a_limit() -> None:
    bans, now_s, lengths = costly_bans(), 0, []
    for cost_s in (0.1, 16.0, 16.0, 16.0, 0.1):
        bans.report(PEER, now_s, cost_s)
        lengths.append(ban_length_s(bans, now_s))
        now_s += lengths[-1]
    assert lengths == [2, 64, 128, 200, 30]  # the last failure cost nothing


def test_a_costly_failure_makes_a_ban_longer_that_a_cheap_one_began() -> None:
    bans = costly_bans()
    bans.report(PEER, 0, 0.1)
    bans.report(PEER, 1, 16.0)
    bans.report(PEER, 1, 16.0)  # of another session: the same event
    assert ban_length_s(bans, 1) == 64
    bans.report(PEER, 65, 16.0)
    assert ban_length_s(bans, 65) == 128


def test_a_peer_is_forgotten_only_as_long_after_its_ban_as_that_lasted() -> None:
    for later_s, length_s in ((63, 128), (64, 64)):
        bans = costly_bans()
        bans.report(PEER, 0, 16.0)
        bans.report(PEER, 64 + later_s, 16.0)
        assert ban_length_s(bans, 64 + later_s) == length_s


@given(st.lists(st.tuples(st.sampled_from(PEERS), st.floats(0, 300), st.floats(0, 60)), max_size=30))
def test_a_peer_is_banned_for_at_least_some_times_its_cost_and_at_most_the_limit(
    history: list[tuple[PeerId, float, float]],
) -> None:
    bans, now_s = costly_bans(), 0.0
    for peer, later_s, cost_s in history:
        now_s += later_s
        before_s = bans.left_s(peer, now_s)
        bans.report(peer, now_s, cost_s)
        assert min(4 * cost_s, 200.0) - 1e-6 <= bans.left_s(peer, now_s) <= 200.0 + 1e-6
        assert bans.left_s(peer, now_s) >= before_s


def test_peers_that_cost_much_each_time_come_round_again_only_after_those_that_cost_nothing() -> None:
    """Three silent peers are preferred whenever they are not banned, else an honest one is used, for a second."""
    bans, now_s, used = costly_bans(), 0.0, []
    while now_s < 240:
        peer = next((each for each in PEERS if not bans.is_banned(each, now_s)), None)
        used.append(peer)
        now_s += 1.0 if peer is None else 16.0
        if peer is not None:
            bans.report(peer, now_s, 16.0)
    assert used[:3] == PEERS
    assert used[3] is None
    assert used.count(None) > 120


def test_of_peers_that_came_and_went_nothing_is_kept() -> None:
    bans = fresh_bans()
    for number in range(1000):
        bans.report(PeerId(f"passer-by {number}"), 10.0 * number)
    assert len(bans._bans) <= 4  # those of the last ban_s + longest_ban_s
