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


def test_of_peers_that_came_and_went_nothing_is_kept() -> None:
    bans = fresh_bans()
    for number in range(1000):
        bans.report(PeerId(f"passer-by {number}"), 10.0 * number)
    assert len(bans._bans) <= 4  # those of the last ban_s + longest_ban_s
