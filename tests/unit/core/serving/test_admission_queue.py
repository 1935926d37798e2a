"""Sessions get KV on a server: never more than there is, in a fair order, and none is passed over for ever."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.admission_queue import AdmissionQueue
from unit.core.serving.claims import a_full_server, claim, name
from unit.core.serving.plain_ledger import check_ledger

POSITIONS = 100
POLICY = AdmissionPolicy(passed_over=3, most_waiting=20, most_waiting_per_client=15)


@dataclass
class Hall:
    """A queue, and what has come of all that asked for some of it."""

    queue: AdmissionQueue = field(default_factory=lambda: AdmissionQueue(POSITIONS, POLICY))
    now_s: float = 0.0
    asked: dict[int, int] = field(default_factory=dict)
    waiting: list[int] = field(default_factory=list)
    inside: list[int] = field(default_factory=list)

    def ask(self, positions: int, client: int = 0, priority: Priority = Priority.INTERACTIVE) -> int:
        number = len(self.asked)
        self.asked[number] = positions
        self.waiting.append(number)
        self.queue.add(name(number), claim(positions, client, priority), self.now_s)
        return number

    def has_place(self, client: int) -> bool:
        """Without anybody who makes way: here each client is a group of its own, of one peer."""
        return self.queue.place_for(claim(1, client)) == (True, None)

    def retry_after_s(self, positions: int, client: int = 0) -> float:
        return self.queue.retry_after_s(claim(positions, client), self.now_s)

    def use(self) -> None:
        """Those that have come in are in use from now on."""
        for number in self.inside:
            self.queue.use(name(number), self.now_s, ends=False)

    def admit(self) -> list[int]:
        admitted = [int.from_bytes(each, "big") for each in self.queue.admit(self.now_s)]
        for number in admitted:
            self.waiting.remove(number)
            self.inside.append(number)
        return admitted

    def leave(self, number: int) -> None:
        for where in (self.waiting, self.inside):
            if number in where:
                where.remove(number)
        self.queue.remove(name(number), self.now_s)

    @property
    def held(self) -> int:
        return sum(self.asked[number] for number in self.inside)


EVENTS = st.one_of(
    st.tuples(st.just("ask"), st.integers(1, POSITIONS), st.integers(0, 3), st.sampled_from(Priority)),
    st.tuples(st.just("leave"), st.integers(0, 99), st.just(0), st.just(Priority.BATCH)),
    st.tuples(st.just("pass"), st.integers(0, 3), st.just(0), st.just(Priority.BATCH)),
)


@given(script=st.lists(EVENTS, max_size=60))
def test_there_is_never_more_held_than_there_is_and_in_the_end_all_is_free(
    script: list[tuple[str, int, int, Priority]],
) -> None:
    hall = Hall()
    for what, number, client, priority in script:
        if what == "ask" and hall.has_place(client):
            hall.ask(number, client, priority)
        elif what == "pass":
            hall.now_s += number
        elif what == "leave" and (here := hall.waiting + hall.inside):
            hall.leave(here[number % len(here)])
        hall.admit()
        assert hall.held <= POSITIONS
        assert hall.queue.free == POSITIONS - hall.held
        assert hall.queue.waiting == len(hall.waiting)
        check_ledger(hall.queue)
        assert POLICY.least_retry_s <= hall.retry_after_s(50) <= POLICY.longest_retry_s
    for _ in hall.asked:
        for number in list(hall.inside):
            hall.leave(number)
        hall.admit()
    assert not hall.waiting, "everybody has come in at last"
    assert not hall.inside
    assert hall.queue.free == POSITIONS


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12))
def test_who_fits_does_not_wait_unless_kv_is_kept_for_another(sizes: list[int]) -> None:
    hall = Hall(queue=AdmissionQueue(POSITIONS, AdmissionPolicy(passed_over=1000)))
    for size in sizes:
        hall.ask(size)
        hall.admit()
        assert all(hall.asked[number] > hall.queue.free for number in hall.waiting)


def test_the_client_that_holds_least_comes_first_and_then_who_came_first() -> None:
    hall = Hall()
    first = hall.ask(60, client=0)
    hall.ask(40, client=1)
    assert len(hall.admit()) == 2
    of_holder, of_who_left, of_another = hall.ask(30, client=1), hall.ask(30, client=0), hall.ask(30, client=2)
    hall.ask(30, client=2)
    hall.leave(first)
    assert hall.admit() == [of_who_left, of_another], "they hold nothing"
    assert hall.waiting[0] == of_holder


@given(st.lists(st.integers(0, 4), min_size=5, max_size=30))
def test_of_equal_sessions_no_client_has_two_more_inside_than_another_that_waits(clients: list[int]) -> None:
    hall = Hall(queue=AdmissionQueue(POSITIONS, AdmissionPolicy(most_waiting_per_client=100)))
    whole = hall.ask(POSITIONS, client=9)
    hall.admit()
    of = {hall.ask(20, client=client): client for client in clients}
    hall.leave(whole)
    hall.admit()
    inside = [of[number] for number in hall.inside]
    for waiting in {of[number] for number in hall.waiting}:
        assert all(inside.count(client) <= inside.count(waiting) + 1 for client in inside)


def test_a_higher_priority_comes_first_until_the_lower_one_has_waited_as_long_as_it_counts() -> None:
    hall = Hall()
    whole = hall.ask(POSITIONS)
    hall.admit()
    training = hall.ask(POSITIONS, 1, Priority.TRAINING)
    hall.now_s += 0.9 * POLICY.ageing_s
    batch = hall.ask(POSITIONS, 2, Priority.BATCH)
    hall.leave(whole)
    assert hall.admit() == [batch]
    hall.now_s += 1.2 * POLICY.ageing_s
    hall.ask(POSITIONS, 3, Priority.INTERACTIVE)
    hall.leave(batch)
    assert hall.admit() == [training], "it has aged twice"


def test_smaller_sessions_go_before_a_large_one_a_few_times_and_then_kv_is_kept_for_it() -> None:
    hall = Hall()
    hall.ask(60)
    hall.admit()
    large = hall.ask(80, client=1)
    for _ in range(POLICY.passed_over):
        small = hall.ask(10, client=2)
        assert hall.admit() == [small]
    kept_out = hall.ask(10, client=2)
    assert hall.admit() == []
    hall.leave(0)
    assert hall.admit() == []
    hall.leave(hall.inside[0])
    assert hall.admit() == [large]
    hall.leave(large)
    assert hall.admit() == [kept_out]


def test_nobody_fills_the_line_alone_nor_all_together_without_end() -> None:
    hall = Hall()
    hall.ask(POSITIONS)
    hall.admit()
    for _ in range(POLICY.most_waiting_per_client):
        assert hall.has_place(1)
        hall.ask(1, client=1)
    assert not hall.has_place(1)
    while hall.has_place(2):
        hall.ask(1, client=2)
    assert hall.queue.waiting == POLICY.most_waiting


@pytest.mark.parametrize("stay_s", [5.0, 20.0])
def test_when_to_come_again_is_when_so_much_has_ended_at_the_pace_till_now(stay_s: float) -> None:
    """Four at a time that stay for as long as each other, one ending every quarter of that."""
    hall = Hall()
    begun: list[tuple[float, int]] = []
    for number in range(40):
        if number >= 4:
            began_s, oldest = begun.pop(0)
            hall.now_s = max(hall.now_s, began_s + stay_s)
            hall.leave(oldest)
        else:
            hall.now_s = number * stay_s / 4
        begun.append((hall.now_s, hall.ask(25)))
        hall.admit()
    hall.use()
    assert hall.queue.free == 0
    assert hall.retry_after_s(25) == pytest.approx(stay_s / 4, rel=0.2)
    hall.ask(25)
    hall.admit()
    assert hall.retry_after_s(25) == pytest.approx(stay_s / 2, rel=0.2), "after who waits"


def test_a_client_is_told_to_come_again_when_a_session_of_its_own_is_idle() -> None:
    hall = Hall()
    hall.ask(POSITIONS)
    hall.admit()
    hall.use()
    assert hall.retry_after_s(POSITIONS) == POLICY.least_retry_s, "nothing is known of stays"
    hall.queue.use(name(0), hall.now_s, ends=True)
    assert hall.retry_after_s(POSITIONS) == POLICY.own_idle_s
    another = hall.ask(POSITIONS)
    assert not hall.queue.choose_moves(hall.now_s + POLICY.own_idle_s - 0.1)
    assert hall.queue.choose_moves(hall.now_s + POLICY.own_idle_s) == [name(0)]
    hall.leave(0)
    assert hall.admit() == [another]


def test_before_any_session_has_ended_those_that_are_here_tell_how_long_one_stays() -> None:
    hall = Hall()
    hall.ask(POSITIONS)
    hall.admit()
    hall.use()
    assert hall.retry_after_s(10) == POLICY.least_retry_s
    hall.now_s = 100.0
    assert hall.retry_after_s(10) == pytest.approx(10.0)
    hall.now_s = 10_000.0
    assert hall.retry_after_s(10) == POLICY.longest_retry_s


def test_sessions_that_had_to_leave_do_not_count_as_if_they_had_ended() -> None:
    """Each fills the server. They stay for a minute if they may, and one has to go after a second."""
    hall = Hall()
    for stay_s, is_moved in ((60.0, False), *[(1.0, True)] * 30, (60.0, False)):
        number = hall.ask(POSITIONS)
        assert hall.admit() == [number]
        hall.now_s += stay_s
        if is_moved:
            hall.queue.end(name(number), is_moved=True)
        hall.queue.end(name(number))
        hall.leave(number)
    hall.ask(POSITIONS)
    hall.admit()
    hall.use()
    assert hall.retry_after_s(POSITIONS // 2) == pytest.approx((2 * 60 + 30) / 2 / 2)


@pytest.mark.parametrize("why", ["for one that waits", "for one that grows"])
def test_sessions_that_others_move_had_to_leave(why: str) -> None:
    queue = a_full_server(40, POLICY)
    if why == "for one that waits":
        queue.add(name(100), claim(1, client=100), 100.0)
        (moved,) = queue.choose_moves(100.0)
    else:
        grown = queue._ledger.leases[name(0)]
        with queue._ledger.changing(grown):
            grown.claim, grown.later = replace(grown.claim, positions=2), 1
        queue.grow(name(0), 2)
        (moved,) = queue.choose_leaving(name(0), 100.0)
    queue.remove(moved, 100.0)
    queue.remove(name(39), 100.0)
    assert [itself for _, itself in queue._stays] == [False, moved != name(39)]


def test_no_forecast_is_spent_on_a_session_that_is_told_when_sessions_end() -> None:
    queue = a_full_server(40, policy := AdmissionPolicy(stays_kept=1))
    queue.remove(name(0), 1000.0)
    queue.add(name(50), claim(1, client=0), 1000.0)
    queue.admit(1000.0)
    for number in (*range(1, 40), 50):
        queue.use(name(number), 1000.0, ends=True)
    told_s = {queue.retry_after_s(claim(1, client=100), 1000.0, forecasts=False) for _ in range(100)}
    assert told_s == {policy.longest_retry_s}, "one session has ended in 1000 s"
    assert queue.retry_after_s(claim(1, client=100), 1000.0) == policy.idle_s


@pytest.mark.parametrize("seed", range(3))
def test_laws_hold_with_hundreds_of_sessions_of_which_some_leave_for_others(seed: int) -> None:
    rng, positions = random.Random(seed), 3000
    policy = AdmissionPolicy(most_waiting=60, most_waiting_per_client=20)
    queue, open_sessions, now_s = AdmissionQueue(positions, policy), dict[int, int](), 0.0
    most = moved = 0
    for number in range(900):
        now_s += rng.expovariate(5)
        asked = claim(rng.randint(1, 20), client=rng.choice((0, 0, 0, rng.randrange(30))))
        has_place, makes_way = queue.place_for(asked)
        if makes_way is not None:
            queue.remove(makes_way, now_s)
            del open_sessions[int.from_bytes(makes_way, "big")]
        if has_place:
            queue.add(name(number), asked, now_s)
            open_sessions[number] = asked.positions
        leaving = queue.choose_moves(now_s) if number % 10 == 0 else []
        moved += len(leaving)
        for each in leaving:
            check_ledger(queue)
            queue.remove(each, now_s)
            del open_sessions[int.from_bytes(each, "big")]
        for each in queue.admit(now_s):
            queue.use(each, now_s, ends=True)
        if rng.random() < 0.1:
            queue.remove(name(ended := rng.choice(list(open_sessions))), now_s)
            del open_sessions[ended]
        if number % 20 == 0:
            check_ledger(queue)
        held = positions - queue.free
        assert 0 <= held <= positions
        assert held <= sum(open_sessions.values())
        assert queue.waiting <= policy.most_waiting
        most = max(most, len(open_sessions))
    assert most > 250 and moved, "there were many, and some had to go"
