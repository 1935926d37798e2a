"""Grants and credits: whatever is under way, an honest sender is within its right, and memory covers what may come."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmnode.core.ids import Epoch
from llmnode.core.links.push_grants import PushCredit, PushGrant, ReplayBudget

WINDOW = 64
FIRST = 256
MOST = 1000
MEMORY = 600
SIZES = st.integers(1, 300)


@dataclass
class Receiver:
    """It reserves memory for what it grants, until it is done with what came."""

    epoch: Epoch = Epoch(0)
    grant: PushGrant = field(default_factory=lambda: PushGrant(MOST, WINDOW))
    waiting: list[int] = field(default_factory=list)
    reserved: int = 0
    late: int = 0
    """The bytes of former epochs that may still come."""

    def reserve(self, more: int) -> bool:
        if self.reserved + more > MEMORY:
            return False
        self.reserved += more
        return True

    def settle(self) -> None:
        self.reserved = sum(self.waiting) + self.grant.left_bytes


class Pushing(RuleBasedStateMachine):
    """A sender and a receiver, with frames under way in both directions."""

    def __init__(self) -> None:
        super().__init__()
        self.credit = PushCredit()
        self.receiver = Receiver()
        self.pushes: deque[tuple[Epoch, int]] = deque()
        self.wants: deque[tuple[Epoch, int]] = deque()
        self.grants: deque[tuple[Epoch, int]] = deque()

    def tell(self) -> None:
        self.grants.append((self.receiver.epoch, self.receiver.grant.limit_bytes))

    @rule(size=SIZES)
    def push_or_want(self, size: int) -> None:
        epoch = self.credit.epoch
        if epoch < 0:
            self.wants.append((Epoch(0), 0))
        elif self.credit.allows(epoch, size):
            self.credit.spend(size)
            self.pushes.append((epoch, size))
        else:
            self.wants.append((epoch, self.credit.sent_bytes + size))

    @precondition(lambda self: self.pushes)
    @rule()
    def a_push_arrives(self) -> None:
        epoch, size = self.pushes.popleft()
        if epoch == self.receiver.epoch:
            assert self.receiver.grant.take(size), "an honest sender pushes no more than was granted"
            self.receiver.waiting.append(size)
        else:
            assert epoch < self.receiver.epoch
            assert size <= self.receiver.late, "nor of a former epoch"
            self.receiver.late -= size

    @precondition(lambda self: self.wants)
    @rule()
    def a_want_arrives(self) -> None:
        epoch, limit = self.wants.popleft()
        if epoch == self.receiver.epoch:
            self.receiver.grant.wanted_bytes = limit
        self.receiver.grant.extend(FIRST, self.receiver.reserve)
        self.tell()

    @precondition(lambda self: self.grants)
    @rule()
    def a_grant_arrives(self) -> None:
        self.credit.hear(*self.grants.popleft())

    @precondition(lambda self: self.receiver.waiting)
    @rule(data=st.data())
    def a_step_is_done(self, data: st.DataObject) -> None:
        receiver = self.receiver
        receiver.waiting.pop(data.draw(st.integers(0, len(receiver.waiting) - 1)))
        receiver.settle()
        if receiver.grant.is_short and receiver.grant.extend(WINDOW, receiver.reserve):
            self.tell()

    @rule()
    def the_client_begins_an_epoch(self) -> None:
        receiver = self.receiver
        receiver.late += receiver.grant.left_bytes
        receiver.epoch = Epoch(receiver.epoch + 1)
        receiver.grant = PushGrant(MOST, WINDOW)
        receiver.settle()
        receiver.grant.extend(FIRST, receiver.reserve)
        self.tell()

    @invariant()
    def memory_covers_all_that_may_come(self) -> None:
        receiver = self.receiver
        coming = sum(size for epoch, size in self.pushes if epoch == receiver.epoch)
        assert sum(receiver.waiting) + coming <= receiver.reserved <= MEMORY
        assert receiver.grant.limit_bytes <= MOST

    @invariant()
    def what_comes_late_was_granted(self) -> None:
        assert sum(size for epoch, size in self.pushes if epoch < self.receiver.epoch) <= self.receiver.late


TestPushing = Pushing.TestCase


def test_a_sender_without_a_right_waits_and_one_whose_right_is_over_does_not() -> None:
    credit = PushCredit()
    assert credit.allows(Epoch(3), 1) is None
    credit.hear(Epoch(3), 10)
    assert credit.allows(Epoch(3), 10) is True
    assert credit.allows(Epoch(3), 11) is None
    assert credit.allows(Epoch(2), 1) is False
    assert credit.allows(Epoch(4), 1) is None, "the receiver has not begun this epoch"
    credit.spend(10)
    credit.hear(Epoch(4), 5)
    assert credit.allows(Epoch(4), 5) is True, "each epoch is counted anew"
    credit.hear(Epoch(3), 1000)
    assert credit.allows(Epoch(3), 1) is False
    credit.hear(Epoch(4), 0)
    assert credit.allows(Epoch(4), 1) is False, "it was taken away"


def test_without_memory_for_what_is_wanted_a_sender_gets_its_window_and_holds_nothing_for_the_rest() -> None:
    receiver = Receiver()
    receiver.grant.wanted_bytes = MEMORY + 1
    assert receiver.grant.extend(WINDOW, receiver.reserve)
    assert receiver.grant.limit_bytes == receiver.reserved == WINDOW
    assert receiver.grant.is_short
    receiver.grant.wanted_bytes = 0
    assert not receiver.grant.is_short


def test_an_epoch_is_granted_no_more_than_its_session_has_a_use_for() -> None:
    grant = PushGrant(MOST, WINDOW)
    total = 0
    for _ in range(1000):
        grant.wanted_bytes = grant.received_bytes + 100
        grant.extend(WINDOW, lambda _: True)
        total += 100 * grant.take(100)
    assert total == MOST
    assert not grant.is_short, "nobody looks after it any more"


@given(st.lists(st.tuples(st.integers(1, 200), st.floats(0, 30)), max_size=60))
def test_a_log_goes_out_a_few_times_at_once_and_then_slowly(asked: list[tuple[int, float]]) -> None:
    budget, now_s, sent = ReplayBudget(4, 10), 0.0, 0
    for size, pause_s in asked:
        now_s += pause_s
        sent += size * budget.allows(size, 200, now_s)
        assert sent <= 200 * (4 + now_s / 10) + 1e-6


def test_a_log_goes_out_again_after_a_while() -> None:
    budget = ReplayBudget(4, 10)
    assert [budget.allows(100, 100, 50.0) for _ in range(5)] == [True] * 4 + [False]
    assert not budget.allows(100, 100, 59.0)
    assert budget.allows(100, 100, 60.0)
