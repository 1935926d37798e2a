"""Adapters make way for others within the shares of their clients, the unused ones of the largest group first."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.budget import Budget, Kind, Resource, Scope
from llmnode.core.ids import AdapterId, PeerId
from llmnode.core.policy import BudgetPolicy
from llmnode.core.serving.adapter_shelf import AdapterShelf, Shelved
from unit.calls import calls_counted

IDLE_S = 100.0
POLICY = BudgetPolicy(adapter_bytes=1000, group_share=0.5, peer_share=0.25)
GROUPS, PEERS = 3, 3


@dataclass
class Server:
    """Its adapters, and the connections of their clients: of `PEERS` peers in each of `GROUPS` groups."""

    policy: BudgetPolicy = POLICY
    shelf: AdapterShelf = field(default_factory=lambda: AdapterShelf(IDLE_S))
    kept: list[Shelved] = field(default_factory=list)
    now_s: float = 0.0
    made: int = 0

    def __post_init__(self) -> None:
        self.budget = Budget(self.policy)
        self.clients = [
            self.budget.connection(f"8.8.{group}.1", PeerId(f"{group}/{peer}"))
            for group in range(GROUPS)
            for peer in range(PEERS)
        ]

    def bring(self, client: int, size: int) -> Shelved | None:
        """Bring a new adapter. None if it is not taken."""
        self.made += 1
        name = AdapterId(self.made.to_bytes(32, "big"))
        unused = {each: each.holding(Kind.GROUP) for each in self.kept if not each.users}
        own = self.clients[client % len(self.clients)]
        shelved = self.shelf.put(name, self.budget.of_peer(own), self.now_s)
        taken, gone = self.shelf.free_memory(shelved, size)
        for each in gone:
            assert each in unused, "one in use stays"
            self.kept.remove(each)
        if gone and gone[0].scope.of_kind(Kind.GROUP) is not own.of_kind(Kind.GROUP):
            assert unused[gone[0]] == max(unused.values()), "the largest group pays"
        if not taken:
            self.shelf.remove(shelved)
            return None
        self.kept.append(shelved)
        return shelved

    def bring_one(self, client: int) -> bool:
        """Bring a small new adapter, and look at nothing else."""
        self.made += 1
        around = self.budget.of_peer(self.clients[client])
        shelved = self.shelf.put(AdapterId(self.made.to_bytes(32, "big")), around, self.now_s)
        return self.shelf.free_memory(shelved, 1)[0]

    def use(self, number: int, more: int) -> None:
        """A session begins to use one of them, or ends to."""
        if self.kept:
            each = self.kept[number % len(self.kept)]
            if more > 0:
                self.shelf.use(each, self.now_s)
            elif each.users:
                self.shelf.release(each, self.now_s)

    def pass_time(self, seconds: float) -> None:
        self.now_s += seconds
        for each in self.shelf.remove_idle(self.now_s):
            assert not each.users and self.now_s - each.used_s >= IDLE_S
            self.kept.remove(each)

    def check(self) -> None:
        held = self.budget.process.held[Resource.ADAPTERS]
        assert len(self.shelf) == len(self.kept)
        assert held == sum(each.scope.held[Resource.ADAPTERS] for each in self.kept)
        for kind, share in ((Kind.PROCESS, 1.0), (Kind.GROUP, 0.5), (Kind.PEER, 0.25)):
            scopes: list[Scope] = list(self.budget.process.within(kind))
            assert all(each.held[Resource.ADAPTERS] <= share * self.policy.adapter_bytes for each in scopes)


EVENTS = st.one_of(
    st.tuples(st.just("bring"), st.integers(0, GROUPS * PEERS - 1), st.integers(1, 300)),
    st.tuples(st.just("use"), st.integers(0, 99), st.sampled_from((1, -1))),
    st.tuples(st.just("pass"), st.integers(0, 60), st.just(0)),
)


@given(st.lists(EVENTS, max_size=80))
def test_shares_hold_and_what_is_in_use_stays_whatever_clients_bring(script: list[tuple[str, int, int]]) -> None:
    server = Server()
    for what, number, more in script:
        if what == "bring":
            server.bring(number, more)
        elif what == "use":
            server.use(number, more)
        else:
            server.pass_time(number)
        server.check()
    for each in server.kept:
        while each.users:
            server.shelf.release(each, server.now_s)
    server.pass_time(IDLE_S)
    server.check()
    assert not server.budget.process.held[Resource.ADAPTERS], "in the end nothing is left"


@pytest.mark.parametrize("seed", range(3))
def test_the_same_with_hundreds_of_them(seed: int) -> None:
    rng, server = random.Random(seed), Server(BudgetPolicy(adapter_bytes=100_000, group_share=0.5, peer_share=0.25))
    for number in range(1200):
        server.bring(rng.randrange(GROUPS * PEERS), rng.randint(50, 400))
        if rng.random() < 0.3:
            server.use(rng.randrange(1000), rng.choice((1, -1, -1)))
        if number % 50 == 0:
            server.pass_time(rng.uniform(0, IDLE_S / 20))
            server.check()
    assert len(server.kept) > 200


@pytest.mark.parametrize("clients", [1, GROUPS * PEERS])
def test_the_work_to_find_what_makes_way_does_not_grow_with_the_number_of_adapters(clients: int) -> None:
    def most_calls(adapters: int) -> int:
        """The most function calls for one adapter, when all places are taken."""
        server, most = Server(BudgetPolicy(adapter_bytes=adapters, group_share=1.0, peer_share=1.0)), 0
        for number in range(2 * adapters):
            with calls_counted() as calls:
                assert server.bring_one(number % clients)
            most = max(most, calls[0])
        return most

    assert most_calls(2000) < 4 * most_calls(50)


def test_one_client_that_fills_its_share_loses_its_own_unused_ones_and_nobody_else_any() -> None:
    server = Server()
    others = [server.bring(number, 100) for number in (3, 6)]
    for _ in range(20):
        assert server.bring(0, 100) is not None
    assert all(each in server.kept for each in others)
    assert len(server.kept) == 4, "a quarter of all is two more"


def test_an_adapter_of_a_small_group_takes_the_place_of_one_of_the_largest_group() -> None:
    server = Server()
    of_largest = [server.bring(number, 240) for number in (0, 1)]
    of_second = [server.bring(number, 200) for number in (3, 4)]
    newcomer = server.bring(6, 200)
    assert newcomer in server.kept
    assert of_largest[0] not in server.kept, "it was unused for as long as the other one, and came first"
    assert all(each in server.kept for each in of_second)
