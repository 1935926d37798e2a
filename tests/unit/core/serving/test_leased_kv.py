"""Sessions without their clients share a part of the KV: by address groups, and in these by clients."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.serving.leased_kv import Leased, LeasedKv

MOST = 1000


def lease(number: int, group: str, client: str, positions: int) -> Leased:
    return Leased(SessionId(number.to_bytes(16, "big")), group, PeerId(client), positions)


def test_one_address_group_has_all_until_others_come_whatever_its_identities() -> None:
    leased = LeasedKv()
    strangers = [lease(number, "stranger", f"sybil {number}", 100) for number in range(20)]
    ended = [leased.put(each, MOST) for each in strangers]
    assert ended == [[]] * 10 + [[each.session] for each in strangers[10:]]
    honest = lease(100, "home", "honest", 300)
    assert len(leased.put(honest, MOST)) == 3
    assert leased.positions == MOST
    assert leased.put(lease(200, "stranger", "one more", 100), MOST) == [lease(200, "", "", 0).session]


def test_the_clients_of_one_group_share_it() -> None:
    leased = LeasedKv()
    greedy = [lease(number, "nat", "greedy", 250) for number in range(4)]
    for each in greedy:
        assert not leased.put(each, MOST)
    assert leased.put(lease(10, "nat", "other", 250), MOST) == [greedy[3].session]
    assert leased.put(lease(11, "nat", "other", 250), MOST) == [greedy[2].session]
    own = lease(12, "nat", "other", 250)
    assert leased.put(own, MOST) == [own.session], "each has half of it"


def test_a_large_session_makes_way_for_a_small_one_of_others_and_not_the_other_way_round() -> None:
    leased = LeasedKv()
    large, small = lease(1, "stranger", "large", MOST), lease(2, "home", "small", 1)
    assert not leased.put(large, MOST)
    assert leased.put(small, MOST) == [large.session]
    assert leased.put(large, MOST) == [large.session]


def test_what_a_session_holds_may_change_and_it_may_leave() -> None:
    leased = LeasedKv()
    assert not leased.put(lease(1, "a", "a", 100), MOST)
    assert not leased.put(lease(1, "a", "a", 600), MOST)
    assert leased.positions == 600
    assert not leased.put(lease(2, "b", "b", 300), MOST)
    assert leased.put(lease(1, "a", "a", 800), MOST) == [lease(1, "", "", 0).session]
    leased.remove(lease(2, "", "", 0).session)
    leased.remove(lease(2, "", "", 0).session)
    assert leased.positions == 0
    assert (leased._leases, leased._groups, leased._held) == ({}, {}, {}), "nothing is left of it"


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3), st.integers(0, 2), st.integers(0, 400)), max_size=60))
def test_no_more_is_held_than_may_be_and_nobody_pays_for_a_group_that_holds_more(
    drawn: list[tuple[int, int, int, int]],
) -> None:
    leased, held = LeasedKv(), dict[SessionId, Leased]()
    for number, group, client, positions in drawn:
        each = lease(100 * group + 1000 * client + number, str(group), str(client), positions)
        held.pop(each.session, None)
        before = {name: sum(it.positions for it in held.values() if it.group == name) for name in "0123"}
        ended = leased.put(each, MOST)
        held[each.session] = each
        for session in ended:
            victim = held.pop(session)
            if victim.group != each.group:
                assert before[victim.group] > before[each.group] + positions
        assert leased.positions == sum(it.positions for it in held.values()) <= MOST
