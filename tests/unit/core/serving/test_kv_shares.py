"""KV goes from holders above their share to those below it, and never the other way; nobody is moved in turn."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.kv_shares import KvClaim, KvLease, KvShares, fair_share

POLICY = AdmissionPolicy(first_positions=8)
NOW_S = 1000.0
IDLE_S, BUSY_S, NEW_S = 0.0, inf, NOW_S - 1


def lease(
    group: str, peer: str, positions: int, used_s: float = BUSY_S, since_s: float = 0.0, wanted: int = 0
) -> KvLease:
    """Either has `positions`, or waits for the `wanted` ones."""
    claim = KvClaim(PeerId(peer), group, Priority.INTERACTIVE, positions or wanted)
    return KvLease(SessionId(b""), claim, since_s, bool(positions), used_s, has_computed=True)


HELD = st.builds(
    lease,
    st.sampled_from("AB"),
    st.sampled_from("xyz"),
    st.integers(1, 40),
    st.sampled_from((IDLE_S, BUSY_S, NEW_S)),
    st.sampled_from((0.0, NEW_S)),
)
WAITING = st.builds(
    lambda group, peer, wanted: lease(group, peer, 0, BUSY_S, NOW_S, wanted),
    st.sampled_from("ABC"),
    st.sampled_from("xyw"),
    st.integers(1, 60),
)


@given(st.lists(st.integers(0, 100), max_size=10), st.integers(1, 300))
def test_a_share_gives_out_all_that_there_is_and_nobody_more_than_it_wants(wanted: list[int], total: int) -> None:
    share = fair_share(wanted, total)
    given_out = sum(min(each, share) for each in wanted)
    if sum(wanted) > total:
        assert given_out == pytest.approx(total)
    else:
        assert share == inf


@given(st.lists(HELD, max_size=12), WAITING)
def test_only_holders_above_their_share_give_way_and_only_for_those_that_stay_within_theirs(
    held: list[KvLease], waiting: KvLease
) -> None:
    total = sum(each.positions for each in held)
    if not total:
        return
    shares = KvShares([*held, waiting], total, POLICY)
    moved = shares.choose_moves(waiting, waiting.claim.positions, NOW_S)
    assert not moved or sum(each.positions for each in moved) >= waiting.claim.positions, (
        "all that is needed, or nobody"
    )
    groups, peers = Counter(shares.of_group), Counter(shares.of_peer)
    if any(each.peer == waiting.peer for each in moved):
        assert all(each.peer == waiting.peer and NOW_S - each.used_s >= POLICY.own_idle_s for each in moved)
        return
    for each in moved:
        within = shares.share_within(each.group)
        assert peers[each.peer] > within, "the peer is above its share"
        is_idle = NOW_S - each.used_s >= POLICY.idle_s
        groups[each.group] -= each.positions
        peers[each.peer] -= each.positions
        if each.group != waiting.group:
            assert groups[each.group] + each.positions > shares.share, "and its group is"
        if not is_idle:
            assert NOW_S - each.since_s >= POLICY.keeps_s
            left, gets = peers[each.peer], shares.of_peer[waiting.peer] + waiting.claim.positions
            if each.group != waiting.group:
                left, gets = groups[each.group], shares.of_group[waiting.group] + waiting.claim.positions
            assert left >= gets, "its holder has no less than the one that waited"
    if moved:
        own, of_group = shares.of_peer[waiting.peer], shares.of_group[waiting.group]
        is_first = waiting.claim.positions <= POLICY.first_positions
        assert own + waiting.claim.positions <= shares.share_within(waiting.group) or (is_first and not own)
        if any(each.group != waiting.group for each in moved):
            assert of_group + waiting.claim.positions <= shares.share or (is_first and not of_group)


@given(st.lists(HELD, max_size=12), WAITING)
def test_what_was_moved_while_all_are_busy_moves_nobody_to_come_back(held: list[KvLease], waiting: KvLease) -> None:
    for each in held:
        each.used_s = BUSY_S
    total = sum(each.positions for each in held)
    moved = KvShares([*held, waiting], max(1, total), POLICY).choose_moves(waiting, waiting.claim.positions, NOW_S)
    inside = [each for each in held if each not in moved]
    came_in = lease(waiting.group, waiting.claim.client, waiting.claim.positions, BUSY_S, since_s=0.0)
    for each in moved:
        back = lease(each.group, each.claim.client, 0, BUSY_S, NOW_S, each.positions)
        others = [other for other in moved if other is not each]
        wanting = [lease(other.group, other.claim.client, 0, BUSY_S, NOW_S, other.positions) for other in others]
        shares = KvShares([*inside, came_in, back, *wanting], total, POLICY)
        assert not [other for other in shares.choose_moves(back, back.claim.positions, NOW_S) if other is came_in]


def test_a_session_in_use_makes_way_if_its_holder_has_more_and_not_if_it_has_only_this_one() -> None:
    honest = lease("B", "y", 0, wanted=50)
    several = [lease("A", "x", 100) for _ in range(4)]
    assert len(KvShares([*several, honest], 400, POLICY).choose_moves(honest, 50, NOW_S)) == 1
    for each in several:
        each.since_s = NEW_S
    assert not KvShares([*several, honest], 400, POLICY).choose_moves(honest, 50, NOW_S)
    alone = lease("A", "x", 400)
    assert not KvShares([alone, honest], 400, POLICY).choose_moves(honest, 50, NOW_S)


def test_identities_of_one_group_share_what_one_peer_would_have() -> None:
    hogs = [lease("hog", f"hog {number}", 10, IDLE_S) for number in range(10)]
    honest = lease("honest", "honest", 0, wanted=50)
    moved = KvShares([*hogs, honest], 100, POLICY).choose_moves(honest, 50, NOW_S)
    assert len(moved) == 5
    more = lease("honest", "another", 0, wanted=10)
    left = [each for each in hogs if each not in moved]
    assert not KvShares([*left, lease("honest", "honest", 50), more], 100, POLICY).choose_moves(more, 10, NOW_S)


def test_a_peer_among_many_of_its_group_still_gets_a_first_session() -> None:
    hogs = [lease("group", f"hog {number}", 8, IDLE_S) for number in range(10)]
    for wanted, are_moved in ((POLICY.first_positions, 1), (POLICY.first_positions + 1, 0)):
        honest = lease("group", "honest", 0, wanted=wanted)
        assert len(KvShares([*hogs, honest], 80, POLICY).choose_moves(honest, wanted, NOW_S)) == are_moved


def test_a_peer_with_little_does_not_pay_for_another_one_of_its_group() -> None:
    hogs, bystander = [lease("hog", "hog", 10, IDLE_S) for _ in range(9)], lease("hog", "bystander", 10, IDLE_S)
    honest = lease("honest", "honest", 0, wanted=40)
    moved = KvShares([*hogs, bystander, honest], 100, POLICY).choose_moves(honest, 40, NOW_S)
    assert len(moved) == 4 and bystander not in moved


def test_idle_sessions_go_before_busy_ones_and_the_longest_idle_first() -> None:
    busy, idle = lease("A", "x", 10), [lease("A", "x", 10, used_s) for used_s in (500.0, 300.0, 400.0)]
    honest = lease("B", "y", 0, wanted=20)
    assert KvShares([busy, *idle, honest], 40, POLICY).choose_moves(honest, 20, NOW_S) == [idle[1], idle[2]]


def test_idle_sessions_of_a_peer_make_way_for_its_own() -> None:
    """Otherwise a program with several texts would wait for what its idle ones hold, for as long as they are open."""
    busy, idle = lease("A", "x", 10), [lease("A", "x", 10, used_s) for used_s in (500.0, 300.0, 400.0)]
    others = [lease("A", "y", 40, IDLE_S), lease("B", "z", 40, IDLE_S)]
    for wanted, moved in ((10, [idle[1]]), (15, [idle[1], idle[2]]), (30, [idle[1], idle[2], idle[0]]), (31, [])):
        waiting = lease("A", "x", 0, wanted=wanted)
        assert KvShares([busy, *idle, *others, waiting], 120, POLICY).choose_moves(waiting, wanted, NOW_S) == moved
    now_s = 300.0 + POLICY.own_idle_s - 1
    waiting = lease("A", "x", 0, wanted=10)
    assert not KvShares([busy, *idle, *others, waiting], 120, POLICY).choose_moves(waiting, 10, now_s)


def test_no_idle_session_makes_way_for_one_of_its_peer_that_has_less_priority() -> None:
    """A text that somebody reads does not go for a batch."""
    idle, batch = lease("A", "x", 10, IDLE_S), lease("A", "x", 0, wanted=10)
    batch.claim = replace(batch.claim, priority=Priority.BATCH)
    assert not KvShares([idle, batch], 10, POLICY).choose_moves(batch, 10, NOW_S)
    idle.claim = batch.claim
    assert KvShares([idle, batch], 10, POLICY).choose_moves(batch, 10, NOW_S) == [idle]


def test_sessions_that_have_computed_nothing_go_first() -> None:
    """They are idle sooner than others, and not before that."""
    idle, unused, new = [lease("A", "x", 10, used_s) for used_s in (IDLE_S, NOW_S - POLICY.unused_s, NOW_S - 1)]
    unused.has_computed = new.has_computed = False
    larger, honest = lease("C", "z", 40, IDLE_S), lease("B", "y", 0, wanted=10)
    others = [honest, lease("D", "w", 0, wanted=60)]
    for held in ([idle, unused, new, larger], [new, unused, idle], [larger, idle, unused, new]):
        total = sum(each.positions for each in held)
        assert KvShares([*held, *others], total, POLICY).choose_moves(honest, 10, NOW_S) == [unused]


def test_a_choice_among_thousands_of_small_sessions_looks_at_each_only_a_few_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = [lease("A", "x", 4, IDLE_S) for _ in range(4000)]
    waiting = lease("B", "y", 0, BUSY_S, NOW_S, 2048)
    looks, rank = 0, KvShares._rank

    def counted(*arguments: Any) -> Any:
        nonlocal looks
        looks += 1
        return rank(*arguments)

    monkeypatch.setattr(KvShares, "_rank", counted)
    shares = KvShares([*held, waiting], 16_000, POLICY)
    assert len(shares.choose_moves(waiting, 2048, NOW_S)) == 512
    assert looks < 2 * len(held)
