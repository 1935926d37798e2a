"""KV grows at once, or somebody leaves for it: nobody within a share for one beyond it, and never all."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.core.serving.kv_shares import KvClaim
from unit.core.serving.plain_ledger import check_ledger

if TYPE_CHECKING:
    from collections.abc import Iterable

POSITIONS = 120
PIECE = 8
POLICY = AdmissionPolicy(first_positions=PIECE, most_waiting=99, most_waiting_per_client=99, growth_share=0)


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def claim(positions: int, client: int, at_once: int = 0) -> KvClaim:
    return KvClaim(PeerId(f"client {client}"), f"group {client % 4}", Priority.INTERACTIVE, positions, at_once)


@dataclass
class Server:
    """A queue, and sessions that do what it says. `used` has those that have come in, and their positions."""

    queue: AdmissionQueue
    now_s: float = 0.0
    claims: dict[int, KvClaim] = field(default_factory=dict)
    used: dict[int, int] = field(default_factory=dict)

    def ask(self, positions: int, client: int, at_once: int = 0) -> int:
        number = len(self.claims)
        self.claims[number] = claim(positions, client, min(at_once, positions))
        self.queue.add(name(number), self.claims[number], self.now_s)
        self.admit()
        return number

    def admit(self) -> list[int]:
        admitted = [int.from_bytes(each, "big") for each in self.queue.admit(self.now_s)]
        for number in admitted:
            self.used.setdefault(number, 0)
            self.queue.use(name(number), self.now_s, ends=True)
        return admitted

    def copy(self, number: int, positions: int) -> list[int]:
        """Become a copy of a session that uses this many. Returns the sessions that had to leave."""
        self.queue.copy(name(number), positions)
        return self.step(number, positions - self.used[number])

    def step(self, number: int, positions: int) -> list[int]:
        """Use this many more positions. Returns the sessions that had to leave."""
        wanted = min(self.claims[number].positions, self.used[number] + positions)
        gone: list[int] = []
        self.queue.use(name(number), self.now_s, ends=False)
        if wanted > self.queue.held(name(number)):
            self.queue.grow(name(number), wanted)
            if number not in self.admit():
                gone = [int.from_bytes(each, "big") for each in self.queue.choose_leaving(name(number), self.now_s)]
                assert gone, "growth does not wait"
                for each in gone:
                    self.leave(each)
                assert number in gone or self.queue.held(name(number)) >= wanted, "it has that as soon as others go"
        if number in self.used:
            self.used[number] = wanted
            self.queue.use(name(number), self.now_s, ends=True)
        return gone

    def leave(self, number: int) -> None:
        self.queue.remove(name(number), self.now_s)
        del self.used[number]
        self.admit()

    def check(self) -> None:
        held = {number: self.queue.held(name(number)) for number in self.used}
        assert sum(held.values()) == POSITIONS - self.queue.free <= POSITIONS
        page = self.queue.in_pages(1)
        for number, positions in held.items():
            most = self.claims[number].at_once + self.used[number] + PIECE
            assert self.used[number] <= positions <= self.queue.in_pages(self.claims[number].positions)
            assert positions % page == 0 and positions < most + PIECE + page, "it holds what it uses, and a piece"
        check_ledger(self.queue)


EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, POSITIONS), st.integers(0, 5), st.integers(0, 30)),
    st.tuples(st.sampled_from(("step", "copy")), st.integers(0, 99), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("leave"), st.integers(0, 99), st.just(0), st.just(0)),
    st.tuples(st.just("pass"), st.integers(0, 6), st.just(0), st.just(0)),
)


@given(st.lists(EVENTS, max_size=60), st.sampled_from((1, 4)))
def test_growth_comes_at_once_or_somebody_leaves_and_nobody_within_a_share_for_one_beyond_it(
    script: list[tuple[str, int, int, int]], page: int
) -> None:
    play(script, page)


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(20))
def test_the_same_of_servers_that_are_full_for_long(seed: int, page: int) -> None:
    rng = random.Random(seed)
    kinds = rng.choices(("ask", "step", "copy", "leave", "pass"), (2, 2, 1, 1, 1), k=60)
    play([_drawn(rng, kind) for kind in kinds], page)


def _drawn(rng: random.Random, kind: str) -> tuple[str, int, int, int]:
    match kind:
        case "ask":
            return kind, rng.randint(20, POSITIONS), rng.randrange(6), rng.randrange(30)
        case "pass":
            return kind, rng.randrange(7), 0, 0
        case _:
            return kind, rng.randrange(99), rng.randint(1, 40), 0


def play(script: Iterable[tuple[str, int, int, int]], page: int) -> None:
    server = Server(AdmissionQueue(POSITIONS, POLICY, page))
    for what, number, amount, at_once in script:
        server.now_s += 0.5
        if what == "ask":
            server.ask(number, amount, at_once)
        elif what == "pass":
            server.now_s += number
        elif server.used:
            chosen = list(server.used)[number % len(server.used)]
            if what == "leave":
                server.leave(chosen)
            else:
                grow_and_check_who_goes(server, chosen, amount, copies=what == "copy")
        server.check()


def grow_and_check_who_goes(server: Server, number: int, positions: int, *, copies: bool) -> None:
    queue = server.queue
    before = {each: (queue._ledger.leases[name(each)], queue.held(name(each))) for each in server.used}
    wanted = min(server.claims[number].positions, server.used[number] + positions)
    needed = max(0, queue.in_pages(wanted) - queue.held(name(number)))
    lease = queue._ledger.leases[name(number)]
    with queue._ledger.changing(lease):
        lease.growing, lease.later = needed, lease.later - needed
    shares = queue._ledger.shares
    of_all, of_peer = shares.is_entitled(lease)
    with queue._ledger.changing(lease):
        lease.growing, lease.later = 0, lease.later + needed
    spares = copies or (lease.copied > 0 and wanted <= lease.copied + PIECE)
    kept = [each for each in before if shares.is_kept(before[each][0], server.now_s)]
    gone = server.copy(number, wanted) if copies else server.step(number, positions)
    assert not (of_all and of_peer and number in gone and not (spares and kept)), (
        "one within its share gets what it needs"
    )
    for each in gone:
        other, _ = before[each]
        if other.peer != lease.peer:
            assert not (spares and each in kept), "a copy has nobody leave that has just come in"
            assert shares.of_peer[other.peer] > shares.share_within(other.group), "its holder is above its share"
            assert other.group == lease.group or shares.of_group[other.group] > shares.share, "and so is its group"


def full_of(*clients: int, used: int, length: int = POSITIONS) -> Server:
    """A session of each of these clients, one after the other, which uses this much."""
    server = Server(AdmissionQueue(POSITIONS, POLICY))
    for client in clients:
        server.now_s += 1
        number = server.ask(length, client)
        assert not server.step(number, used)
    return server


def test_of_sessions_beyond_their_share_the_youngest_leaves_and_one_within_it_stays() -> None:
    server = full_of(0, 1, 2, used=40)
    server.ask(POSITIONS, 3, at_once=40)
    assert server.step(0, 1) == [2], "the share is 30"
    assert server.step(0, 39) == [], "what the youngest had is free"
    assert server.step(0, 1) == [0], "the share of the other two is 40, and the next youngest has no more"


def test_the_youngest_leaves_itself_and_does_not_come_back_before_there_is_space() -> None:
    server = full_of(0, 1, 2, used=40)
    assert server.step(2, 1) == [2]
    again = server.ask(POSITIONS, 2, at_once=40)
    assert again not in server.used
    assert server.step(1, 40) == [], "there is space for one of the others"
    server.leave(1)
    assert again in server.used and server.queue.held(name(again)) == 48


def test_a_client_that_opens_many_sessions_loses_them_to_one_that_grows_within_its_share() -> None:
    server = full_of(*[0] * 10, used=8)
    honest = server.ask(POSITIONS, 1)
    gone = [each for _ in range(6) for each in server.step(honest, 9)]
    assert server.used[honest] == 54
    assert gone == [9, 8], "none is idle: the youngest first"
    for number in list(server.used):
        if number != honest and number in server.used:
            assert honest not in server.step(number, 50)
    assert server.used[honest] == 54, "whatever the others do"


@pytest.mark.parametrize("steps", [0, 1])
def test_copies_have_no_sessions_in_use_leave_that_have_just_come_in(steps: int) -> None:
    """A copy costs its client nothing, so it could be made again and again. The first steps after it cost little."""

    def of_a_copy(length: int, pause_s: float) -> tuple[Server, list[int]]:
        server = Server(AdmissionQueue(POSITIONS, POLICY))
        for number in (0, 1):
            server.step(server.ask(POSITIONS, 0), 48)
            server.queue.use(name(number), server.now_s, ends=False)
        made = server.ask(POSITIONS, 1)
        server.now_s += pause_s
        gone = server.copy(made, length - steps)
        return server, gone or server.step(made, steps) if steps else gone

    keeps_s = POLICY.keeps_s
    assert of_a_copy(24, 0)[1] == [], "there is space"
    assert of_a_copy(25, keeps_s - 1)[1] == [2], "it leaves itself"
    assert of_a_copy(25, keeps_s)[1] == [0]
    server, gone = of_a_copy(16, 0)
    assert not gone and server.step(2, PIECE) == [], "it has computed a piece"
    assert server.step(2, 1) == [0]


def test_a_copy_has_sessions_leave_that_have_computed_nothing() -> None:
    server = Server(AdmissionQueue(POSITIONS, POLICY))
    for _ in range(3):
        server.ask(POSITIONS, 0, at_once=24)
    for number in (0, 1):
        server.step(number, 32)
        server.queue.use(name(number), server.now_s, ends=False)
    server.queue._ledger.leases[name(2)].has_computed = False
    made = server.ask(POSITIONS, 1)
    server.now_s += POLICY.unused_s
    assert server.copy(made, 40) == [2]


def test_a_session_grows_by_the_part_of_a_piece_that_is_free_and_not_by_single_positions() -> None:
    server = full_of(0, 1, used=56)
    server.ask(3, 2)
    assert not server.step(0, 1)
    assert (server.queue.held(name(0)), server.queue.free) == (61, 0)


def test_newcomers_leave_space_for_sessions_that_grow() -> None:
    policy = AdmissionPolicy(first_positions=PIECE, growth_share=0.25)
    server = Server(AdmissionQueue(POSITIONS, policy))
    for number in range(15):
        server.ask(64, number)
    assert len(server.used) == 11, "and 30 positions are free"
    assert not server.step(0, 30) and server.queue.free == 8
    alone = Server(AdmissionQueue(POSITIONS, policy))
    alone.ask(POSITIONS, 0, at_once=POSITIONS)
    assert alone.used, "nobody is there who could grow"


def test_a_group_that_has_all_but_the_space_for_growth_is_above_its_share() -> None:
    """Its sessions have computed nothing, so they go soon."""
    policy = AdmissionPolicy(first_positions=PIECE, most_waiting=99, most_waiting_per_client=99, growth_share=0.1)
    queue = AdmissionQueue(POSITIONS, policy)
    for number in range(40):
        queue.add(name(number), claim(POSITIONS, 0), 0.0)
    assert len(queue.admit(0.0)) == 13
    queue.add(name(50), claim(POSITIONS, 1), 1.0)
    assert not queue.admit(1.0) and not queue.choose_moves(1.0)
    (moved,) = queue.choose_moves(policy.unused_s)
    queue.remove(moved, policy.unused_s)
    assert queue.admit(policy.unused_s) == [name(50)]


def test_a_server_takes_as_many_sessions_as_use_its_kv_and_not_as_could() -> None:
    queue = AdmissionQueue(16_384, AdmissionPolicy(most_waiting=999, most_waiting_per_client=999))
    for number in range(100):
        queue.add(name(number), claim(2048, number), 0.0)
    assert len(queue.admit(0.0)) == 62
