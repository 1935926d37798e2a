"""The budget: what a scope holds counts around it, no limit is passed, and everything comes back at the end."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmnode.core import budget
from llmnode.core.account import Account
from llmnode.core.address_groups import address_groups
from llmnode.core.budget import (
    Budget,
    Kind,
    Resource,
    Scope,
    Worth,
    choose_victim,
    limits_of,
)
from llmnode.core.ids import PeerId
from llmnode.core.policy import BudgetPolicy
from llmnode.errors import LocalProtocolError

POLICY = BudgetPolicy(
    memory_bytes=1000,
    work_share=0.0,
    connections=12,
    connections_per_host=6,
    connections_per_peer=3,
    streams=20,
    streams_per_peer=4,
)
ADDRESSES = ["8.8.8.7", "8.8.8.8", "9.9.9.9", "2606:4700::1", "2a00:1450:4001:800::1", "127.0.0.1", "relay"]


class Budgets(RuleBasedStateMachine):
    """Scopes are opened, filled and closed in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(POLICY)
        self.scopes: list[Scope] = []
        self.own: dict[Scope, dict[Resource, int]] = {}

    def _some(self, data: st.DataObject) -> Scope:
        return data.draw(st.sampled_from(self.scopes))

    @rule(address=st.sampled_from(ADDRESSES), peer=st.integers(0, 3), worth=st.sampled_from(Worth))
    def connect(self, address: str, peer: int, worth: Worth) -> None:
        scope = self.budget.connection(address, PeerId(f"peer {peer}"))
        if scope.reserve(Resource.INBOUND, 1) is not None:
            scope.close()
            return
        scope.worth = worth
        self.scopes.append(scope)
        self.own[scope] = {Resource.INBOUND: 1}

    @precondition(lambda self: self.scopes)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        around = self._some(data)
        self.scopes.append(around.open(Kind.SESSION, "a session", {Resource.MEMORY: 300}))
        self.own[self.scopes[-1]] = {}

    @precondition(lambda self: self.scopes)
    @rule(data=st.data(), resource=st.sampled_from([Resource.MEMORY, Resource.STREAMS]), amount=st.integers(0, 400))
    def reserve(self, data: st.DataObject, resource: Resource, amount: int) -> None:
        scope = self._some(data)
        before = [each.held[resource] for each in scope.around]
        full = scope.reserve(resource, amount)
        if full is None:
            self.own[scope][resource] = self.own[scope].get(resource, 0) + amount
        else:
            assert [each.held[resource] for each in scope.around] == before
            assert full.is_closed or full in list(scope.around)

    @precondition(lambda self: self.scopes)
    @rule(data=st.data(), resource=st.sampled_from([Resource.MEMORY, Resource.STREAMS]))
    def release(self, data: st.DataObject, resource: Resource) -> None:
        scope = self._some(data)
        amount = data.draw(st.integers(0, self.own[scope].get(resource, 0)))
        scope.release(resource, amount)
        self.own[scope][resource] = self.own[scope].get(resource, 0) - amount

    @precondition(lambda self: self.scopes)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        self._some(data).close()
        self.scopes = [each for each in self.scopes if not each.is_closed]

    @precondition(lambda self: self.scopes)
    @rule(data=st.data(), resource=st.sampled_from([Resource.MEMORY, Resource.INBOUND]))
    def choose(self, data: st.DataObject, resource: Resource) -> None:
        """A victim is a living connection of others that holds something, and none of ours but for its memory."""
        asker = self._some(data)
        full = data.draw(st.sampled_from(list(asker.around)))
        victim = choose_victim(full, asker, resource)
        if victim is None:
            return
        assert victim.kind is Kind.CONNECTION and not victim.is_closed and victim.held[resource]
        assert victim is not asker.of_kind(Kind.CONNECTION)
        assert victim.worth < Worth.OURS or resource is Resource.MEMORY
        assert full in list(victim.around)
        theirs, ours = victim.of_kind(Kind.GROUP), asker.of_kind(Kind.GROUP)
        assert theirs is not None and ours is not None
        assert theirs is ours or theirs.held[resource] > ours.held[resource]

    @invariant()
    def a_scope_holds_what_is_within_it_and_its_own(self) -> None:
        """So the sum over the children is never more than what the parent holds."""
        for scope in {around for each in self.scopes for around in each.around}:
            within = [each for each in self.scopes if scope in list(each.around)]
            for resource in (Resource.MEMORY, Resource.STREAMS, Resource.INBOUND):
                assert scope.held[resource] == sum(self.own[each].get(resource, 0) for each in within)

    @invariant()
    def no_limit_is_passed(self) -> None:
        for scope in {around for each in self.scopes for around in each.around}:
            for resource, held in scope.held.items():
                limit = scope.limit(resource)
                assert held >= 0 and (limit is None or held <= limit)

    @invariant()
    def nothing_is_left_of_what_has_ended(self) -> None:
        connections = {each for each in self.scopes if each.kind is Kind.CONNECTION}
        assert set(self.budget.process.within(Kind.CONNECTION)) == connections
        groups = {each.of_kind(Kind.GROUP) for each in connections}
        assert set(self.budget.process.within(Kind.GROUP)) == groups

    def teardown(self) -> None:
        for scope in self.scopes:
            scope.close()
        assert not any(self.budget.process.held.values())


Budgets.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestBudgets = Budgets.TestCase


def _connections(budget: Budget, address: str, amount: int, worth: Worth = Worth.NOTHING) -> list[Scope]:
    made = [budget.connection(address, PeerId(f"{address} {number}")) for number in range(amount)]
    for each in made:
        assert each.reserve(Resource.INBOUND, 1) is None
        each.worth = worth
    return made


def _full(budget: Budget, address: str, worth: Worth = Worth.NOTHING) -> tuple[Scope, Scope]:
    """A connection that exceeds a limit, and the scope that is full."""
    asker = budget.connection(address, PeerId(f"{address} asker"))
    asker.worth = worth
    full = asker.reserve(Resource.INBOUND, 1)
    assert full is not None
    return asker, full


def test_a_newcomer_takes_the_newest_place_of_the_fullest_group() -> None:
    budget = Budget(POLICY)
    many, few = _connections(budget, "8.8.8.7", 6), _connections(budget, "9.9.9.9", 5)
    _connections(budget, "1.1.1.1", 1)
    asker, full = _full(budget, "127.0.0.1")
    assert full is budget.process
    assert choose_victim(full, asker, Resource.INBOUND) is many[-1]
    many[-1].close()
    assert asker.reserve(Resource.INBOUND, 1) is None
    assert len(few) == 5


def test_the_fullest_group_gets_no_more_at_the_cost_of_others() -> None:
    budget = Budget(BudgetPolicy(connections=8, group_share=0.9, connections_per_host=6))
    _connections(budget, "8.8.8.7", 5, Worth.LINK)
    _connections(budget, "9.9.9.9", 3)
    asker, full = _full(budget, "8.8.8.7")
    assert choose_victim(full, asker, Resource.INBOUND) is None


def test_what_nothing_uses_goes_before_what_is_used() -> None:
    budget = Budget(POLICY)
    _connections(budget, "8.8.8.7", 6, Worth.LINK)
    idle = _connections(budget, "9.9.9.9", 4)
    _connections(budget, "1.1.1.1", 2, Worth.OURS)
    asker, full = _full(budget, "127.0.0.1")
    assert choose_victim(full, asker, Resource.INBOUND) is idle[-1]


def test_sessions_go_only_from_a_group_that_holds_more_than_its_share() -> None:
    budget = Budget(POLICY)
    _connections(budget, "9.9.9.9", 6, Worth.USED)
    _connections(budget, "8.8.8.7", 6, Worth.USED)
    asker, full = _full(budget, "127.0.0.1")
    assert choose_victim(full, asker, Resource.INBOUND) is None, "six are the share of each of two groups"

    budget = Budget(POLICY)
    greedy = _connections(budget, "9.9.9.9", 6, Worth.USED)
    _connections(budget, "8.8.8.7", 3, Worth.USED)
    _connections(budget, "1.1.1.1", 3, Worth.USED)
    asker, full = _full(budget, "127.0.0.1")
    assert choose_victim(full, asker, Resource.INBOUND) is greedy[-1]


def test_what_we_have_opened_is_never_dropped() -> None:
    budget = Budget(POLICY)
    for address in ("9.9.9.9", "8.8.8.7"):
        _connections(budget, address, 6, Worth.OURS)
    asker, full = _full(budget, "127.0.0.1")
    assert choose_victim(full, asker, Resource.INBOUND) is None


def _holding(budget: Budget, peer: str, address: str, amount: int, worth: Worth = Worth.OURS) -> Scope:
    scope = budget.connection(address, PeerId(peer))
    scope.worth = worth
    assert scope.reserve(Resource.MEMORY, amount) is None
    return scope


@pytest.mark.parametrize("worth", [Worth.OURS, Worth.USED])
def test_connections_that_we_have_opened_give_way_with_memory_above_their_share(worth: Worth) -> None:
    """A stranger has only to be named to us, and is dialled."""
    budget = Budget(POLICY)
    hostile = [
        _holding(budget, "first", "9.9.9.9", 210, worth),
        _holding(budget, "second", "9.9.9.9", 230, worth),
        _holding(budget, "third", "8.8.8.8", 240, worth),
        _holding(budget, "fourth", "8.8.8.8", 190, worth),
    ]
    newcomer = budget.connection("127.0.0.1", PeerId("newcomer"))
    assert newcomer.take(Resource.MEMORY, 100)
    assert [each.is_closed for each in hostile] == [False, True, False, False], "the largest of the fullest group"


def test_connections_that_we_have_opened_keep_memory_within_their_share() -> None:
    budget = Budget(POLICY)
    ours = [_holding(budget, "somebody", f"9.9.{number}.9", 200) for number in range(4)]
    newcomer = _holding(budget, "newcomer", "127.0.0.1", 0, Worth.LINK)
    assert not newcomer.take(Resource.MEMORY, 150)
    assert not any(each.is_closed for each in ours)
    ours[2].runs = Worth.NOTHING
    assert newcomer.take(Resource.MEMORY, 150)
    assert [each.is_closed for each in ours] == [False, False, True, False], "unless nothing uses it"


@pytest.mark.parametrize("worths", [*itertools.product([Worth.OURS, Worth.USED], repeat=2)])
def test_in_a_group_the_larger_holder_of_memory_gives_way_whichever_side_has_opened_it(
    worths: tuple[Worth, Worth],
) -> None:
    budget = Budget(POLICY)
    large, small = (
        _holding(budget, f"peer {amount}", "9.9.9.9", amount, worth)
        for amount, worth in zip((240, 100), worths, strict=True)
    )
    rest = _holding(budget, "rest", "9.9.9.8", 90, Worth.USED)
    assert small.take(Resource.MEMORY, 100, has_waited=worths == (Worth.OURS, Worth.OURS))
    assert [each.is_closed for each in (large, small, rest)] == [True, False, False]


@pytest.mark.parametrize("addresses", [("9.9.9.9", "9.9.9.9"), ("9.9.9.9", "8.8.8.8")])
def test_connections_that_we_have_opened_wait_for_each_other_s_memory_first(addresses: tuple[str, str]) -> None:
    """A client's servers may be behind one relay, or on one machine."""
    budget = Budget(POLICY)
    large, small = (
        _holding(budget, f"peer {amount}", each, amount) for each, amount in zip(addresses, (240, 100), strict=True)
    )
    rest = _holding(budget, "rest", "9.9.9.8", 150)
    _holding(budget, "another", "8.8.8.7", 40)
    most = large.around[-2 if addresses[0] == addresses[1] else -1]
    most.set_limit(Resource.MEMORY, most.held[Resource.MEMORY])
    assert not small.take(Resource.MEMORY, 100)
    assert not any(each.is_closed for each in (large, small, rest))
    assert small.take(Resource.MEMORY, 100, has_waited=True)
    assert [each.is_closed for each in (large, small, rest)] == [True, False, False]
    stranger = _holding(budget, "stranger", "9.9.9.7", 0, Worth.USED)
    assert stranger.take(Resource.MEMORY, 200), "it does not wait"
    assert sum(each.is_closed for each in (small, rest)) == 1


def test_what_nothing_uses_makes_way_at_once_also_if_we_have_opened_it() -> None:
    budget = Budget(POLICY)
    unused, small = (_holding(budget, f"peer {amount}", "9.9.9.9", amount) for amount in (240, 100))
    _holding(budget, "rest", "9.9.9.8", 100)
    unused.runs = Worth.NOTHING
    assert small.take(Resource.MEMORY, 100)
    assert unused.is_closed


def test_nobody_holds_most_by_an_answer_that_is_being_made() -> None:
    """We choose when that is, and others ask at the same time."""
    budget = Budget(POLICY)
    asking = _holding(budget, "asking", "9.9.9.9", 60, Worth.USED)
    assert asking.take_all({Resource.MEMORY: 180, Resource.ANSWERS: 180})
    others = [_holding(budget, f"other {number}", f"9.9.{number}.9", 190, Worth.USED) for number in range(3)]
    newcomer = _holding(budget, "newcomer", "127.0.0.1", 0, Worth.LINK)
    assert newcomer.take(Resource.MEMORY, 200)
    assert not asking.is_closed
    assert sum(each.is_closed for each in others) == 1


def test_in_a_group_nobody_holds_most_by_an_answer_that_is_being_made() -> None:
    budget = Budget(POLICY)
    asking = _holding(budget, "asking", "9.9.9.9", 60, Worth.USED)
    assert asking.take_all({Resource.MEMORY: 180, Resource.ANSWERS: 180})
    neighbour = _holding(budget, "neighbour", "9.9.9.9", 100, Worth.USED)
    _holding(budget, "third", "9.9.9.9", 90, Worth.USED)
    assert not neighbour.take(Resource.MEMORY, 150)
    assert not asking.is_closed


def test_who_takes_a_place_ends_the_connection_that_had_it() -> None:
    budget, ended = Budget(POLICY), []
    for address in ("8.8.8.7", "9.9.9.9"):
        for scope in _connections(budget, address, 6, Worth.LINK):
            scope.on_evict = partial(ended.append, scope)
    newcomers = [budget.connection("127.0.0.1", PeerId(f"newcomer {number}")) for number in range(5)]
    taken = []
    for each in newcomers:
        taken.append(each.take(Resource.INBOUND, 1))
        each.worth = Worth.LINK
    assert taken == [True] * 4 + [False], "then each of the three groups has four"
    assert len(ended) == 4 and all(each.is_closed for each in ended)
    assert budget.process.held[Resource.INBOUND] == 12


def test_a_connection_with_sessions_is_used() -> None:
    (scope,) = _connections(Budget(POLICY), "127.0.0.1", 1, Worth.LINK)
    session = scope.open(Kind.LINK, "a link").open(Kind.SESSION, "a session")
    assert scope.use is Worth.USED
    session.close()
    assert scope.use is Worth.LINK


def test_many_half_open_connections_of_one_address_are_few() -> None:
    budget = Budget(POLICY)
    half_open = [budget.connection("8.8.8.7") for _ in range(9)]
    taken = [each.take(Resource.INBOUND, 1) for each in half_open]
    assert taken == [True] * 9, "the oldest makes way"
    assert sum(not each.is_closed for each in half_open) == POLICY.connections_per_host
    assert budget.connection("9.9.9.9").take(Resource.INBOUND, 1)


def test_at_one_address_the_longest_unused_makes_way_for_a_newcomer() -> None:
    budget = Budget(POLICY)
    used, idle = _connections(budget, "8.8.8.7", 4, Worth.USED), _connections(budget, "8.8.8.7", 2)
    asker, full = _full(budget, "8.8.8.7")
    assert full.kind in (Kind.HOST, Kind.GROUP)
    assert choose_victim(full, asker, Resource.INBOUND) is idle[0]
    idle[0].close()
    idle[1].worth = Worth.LINK
    assert len(used) == 4


def test_the_largest_holder_of_memory_goes_first() -> None:
    budget = Budget(POLICY)
    holders = [(100, *_connections(budget, "8.8.8.7", 1)), (240, *_connections(budget, "8.8.8.8", 1))]
    holders.append((250, *_connections(budget, "9.9.9.9", 1)))
    holders.append((250, *_connections(budget, "1.1.1.1", 1)))
    for amount, scope in holders:
        scope.worth = Worth.LINK
        assert scope.reserve(Resource.MEMORY, amount) is None
    (asker,) = _connections(budget, "127.0.0.1", 1, Worth.LINK)
    full = asker.reserve(Resource.MEMORY, 200)
    assert full is budget.process
    assert choose_victim(full, asker, Resource.MEMORY) is holders[1][1], "its /24 holds 340"


def test_many_identities_at_one_address_have_what_the_address_has() -> None:
    """The product of limits per peer is bounded by that of the group."""
    budget = Budget(BudgetPolicy())
    chunk, held = 1 << 20, 0
    for number in range(2000):
        scope = budget.connection("8.8.8.7", PeerId(f"sybil {number}"))
        if scope.reserve(Resource.INBOUND, 1) is not None:
            break
        while scope.reserve(Resource.MEMORY, chunk) is None:
            held += chunk
    assert held == BudgetPolicy().memory_bytes // 2
    honest = budget.connection("9.9.9.9", PeerId("honest"))
    assert honest.reserve(Resource.MEMORY, 64 << 20) is None


def test_a_closed_scope_takes_nothing_and_gives_back_nothing() -> None:
    budget = Budget(POLICY)
    (scope,) = _connections(budget, "127.0.0.1", 1)
    session = scope.open(Kind.SESSION, "s")
    assert session.reserve(Resource.MEMORY, 10) is None
    scope.close()
    session.release(Resource.MEMORY, 10)
    assert session.reserve(Resource.MEMORY, 1) is session
    assert scope.open(Kind.SESSION, "late").is_closed
    assert not any(budget.process.held.values())


def test_a_release_that_nobody_waits_for_allocates_nothing() -> None:
    process = (scope := Budget(POLICY).connection("8.8.8.8", PeerId("somebody"))).of_kind(Kind.PROCESS)
    assert process is not None and scope.take(Resource.MEMORY, 100)
    watchers = process._watchers
    scope.release(Resource.MEMORY, 50)
    scope.close()
    assert process._watchers is watchers


def test_an_account_holds_its_last_size_within_the_limits() -> None:
    budget = Budget(POLICY)
    (scope,) = _connections(budget, "127.0.0.1", 1)
    account = Account(scope, Resource.MEMORY)
    assert account.resize(100)
    assert account.resize(40)
    assert not account.resize(10_000)
    assert (account.amount, budget.process.held[Resource.MEMORY]) == (40, 40)


@pytest.mark.parametrize("amount", [-1, 11])
def test_more_than_was_taken_cannot_be_given_back(amount: int) -> None:
    (scope,) = _connections(Budget(POLICY), "127.0.0.1", 1)
    assert scope.reserve(Resource.MEMORY, 10) is None
    with pytest.raises(LocalProtocolError):
        scope.release(Resource.MEMORY, amount)


def test_groups_are_what_one_owner_has_at_hand() -> None:
    assert address_groups("8.8.8.8") == ("8.8.8.0/24", "8.8.8.8")
    assert address_groups("::ffff:8.8.8.8") == ("8.8.8.0/24", "8.8.8.8")
    assert address_groups("2a00:1450:4001:8aa::1") == ("2a00:1450:4001::/48", "2a00:1450:4001:800::/56")
    assert address_groups("127.0.0.2") == ("127.0.0.2", "127.0.0.2")
    assert address_groups("192.168.1.9") == ("192.168.1.9", "192.168.1.9")
    assert address_groups("fe80::1%eth0") == ("fe80::/64", "fe80::/64")
    assert address_groups("2002:808:808::1") == address_groups("2001:0:1:2::f7f7:f7f7") == address_groups("8.8.8.8")
    assert address_groups("a relay") == ("a relay", "a relay")


@given(st.ip_addresses())
def test_an_address_is_in_its_groups_and_so_are_its_neighbours(ip: object) -> None:
    group, host = address_groups(str(ip))
    assert address_groups(str(ip)) == (group, host)
    assert group and host


def test_every_limit_is_no_narrower_than_that_of_a_scope_within() -> None:
    policy = BudgetPolicy()
    kinds = [limits_of(policy, kind) for kind in Kind]
    for outer, inner in itertools.pairwise(kinds):
        for resource in outer.keys() & inner.keys():
            assert inner[resource] <= outer[resource]


def test_links_that_wait_for_memory_search_seldom_and_others_still_find_what_makes_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stranger may have a hundred, and each look at all of them took a millisecond."""
    looks = 0

    def counted(*asked: Any, **more: Any) -> Scope | None:
        nonlocal looks
        looks += 1
        return choose_victim(*asked, **more)

    monkeypatch.setattr(budget, "choose_victim", counted)
    whole = Budget(policy := BudgetPolicy())
    accounts = []
    for number in range(64):
        connection = whole.connection("8.8.8.8", PeerId(f"sybil {number}"))
        connection.worth = Worth.LINK
        accounts.append(Account(connection.open(Kind.LINK, "link"), Resource.MEMORY))
    share = int(policy.group_share * policy.memory_bytes) // len(accounts)  # none is larger than another
    assert all(each.resize(share) for each in accounts)
    looks = 0
    for _ in range(80):
        assert not any(each.resize(2 * share) for each in accounts)
    assert looks <= budget.SEARCHES_IN_VAIN
    assert not accounts[0].resize(2 * share, has_waited=True)
    assert looks <= budget.SEARCHES_IN_VAIN + 1, "one that has waited looks for itself"
    rest = whole.process.limit(Resource.MEMORY) or 0
    assert whole.process.open(Kind.PEER, "the rest").reserve(Resource.MEMORY, rest - 64 * share) is None
    honest = whole.connection("9.9.9.9", PeerId("honest"))
    assert honest.take(Resource.MEMORY, 1)
    for _ in range(budget.CHANGES_FOR_SEARCH):
        honest.release(Resource.MEMORY, 0)
    before = looks
    assert not any(each.resize(2 * share) for each in accounts if not each.scope.is_closed)
    assert looks <= before + 2
