"""Passes, which train, are computed while no forward is ready, in turn by client, and wait for no more than a while."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Backward, Evaluate, Forward, Open, Pass
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.pass_queue import BACKWARD_COST
from llmnode.core.serving.scheduling import Batch, Scheduler
from llmnode.core.span import Span

POLICY = BatchPolicy()
SPAN = Span(0, 2)
SESSION = SessionId(bytes(16))
LONG = POLICY.fast_prefill
"""Positions of a pass that nothing fits beside."""


def evaluate(client: int, *lengths: int, span: Span = SPAN, priority: Priority = Priority.TRAINING) -> Evaluate:
    return Evaluate(span, lengths, bytes(sum(lengths)), PeerId(f"client {client}"), priority)


def backward(client: int, *lengths: int) -> Backward:
    numbers = bytes(sum(lengths))
    return Backward(SPAN, lengths, numbers, numbers, PeerId(f"client {client}"))


def run(scheduler: Scheduler, now_s: float) -> Batch:
    batch = scheduler.take(now_s)
    scheduler.done(batch, None, now_s)
    for ticket in (*batch.operations, *batch.slices, *batch.passes):
        scheduler.remove(ticket)
    return batch


def decoding(scheduler: Scheduler, priority: Priority = Priority.INTERACTIVE) -> None:
    scheduler.admit(Open(SESSION, SPAN, 100, PeerId("reader"), priority))


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.sampled_from([evaluate, backward]), st.sampled_from([1, 8, 100, 500])),
        max_size=30,
    ),
    st.booleans(),
)
def test_every_pass_is_done_once_and_nothing_of_it_is_left(asked: list[tuple[int, object, int]], removed: bool) -> None:
    scheduler = Scheduler(POLICY)
    tickets = {scheduler.add(make(client, length), 0.0) for client, make, length in asked}  # type: ignore[operator]
    if removed and tickets:
        scheduler.remove(gone := min(tickets))
        tickets.remove(gone)
    done: list[int] = []
    while scheduler.has_work:
        batch = run(scheduler, 0.0)
        kinds = {(type(each), each.span) for each in batch.passes.values()}
        assert len(kinds) == 1
        assert len(batch.passes) == 1 or sum(each.positions for each in batch.passes.values()) <= POLICY.fast_prefill
        done += batch.passes
    assert sorted(done) == sorted(tickets)
    assert not scheduler._counters._groups._queued


@pytest.mark.parametrize("priority", Priority)
def test_passes_and_decodes_take_turns_however_many_wait(priority: Priority) -> None:
    scheduler = Scheduler(POLICY)
    decoding(scheduler)
    now_s = 0.0
    for position in range(100):
        for _ in range(3):
            scheduler.add(evaluate(1, LONG, priority=priority), now_s)
        scheduler.add(Forward(SESSION, position, 1, bytes(1)), now_s)
        batches = [run(scheduler, now_s), run(scheduler, now_s)]
        assert [bool(batch.slices) for batch in batches] == [True, False]
        assert [bool(batch.passes) for batch in batches] == [False, True]
        now_s += 0.1


def test_a_decode_that_waits_keeps_passes_short() -> None:
    scheduler = Scheduler(POLICY)
    decoding(scheduler)
    for position in (0, 1):
        scheduler.add(Forward(SESSION, position, 1, bytes(1)), 0.0)
        batch = scheduler.take(0.0)
        scheduler.done(batch, 0.040, 0.0)
        scheduler.remove(next(iter(batch.slices)))
    scheduler.add(Forward(SESSION, 2, 1, bytes(1)), 100.0)
    assert scheduler.pass_s(100.0) == pytest.approx((POLICY.stretch - 1) * 0.040)


def test_clients_get_equal_shares_and_a_backward_counts_more() -> None:
    scheduler = Scheduler(POLICY)
    waiting: list[Pass] = [evaluate(1, LONG) for _ in range(60)] + [backward(2, LONG) for _ in range(60)]
    for each in waiting:
        scheduler.add(each, 0.0)
    done = [next(iter(run(scheduler, 0.0).passes.values())) for _ in range(40)]
    kinds = [sum(isinstance(each, kind) for each in done) for kind in (Evaluate, Backward)]
    assert kinds[0] == pytest.approx(BACKWARD_COST * kinds[1], abs=BACKWARD_COST)


def test_passes_share_a_batch_while_positions_get_cheaper_and_only_with_their_kind() -> None:
    scheduler = Scheduler(POLICY)
    few = POLICY.fast_prefill // 4
    first = scheduler.add(evaluate(1, few, few), 0.0)
    scheduler.add(backward(1, few), 0.0)
    scheduler.add(evaluate(2, few, span=Span(0, 1)), 0.0)
    second = scheduler.add(evaluate(3, few, few), 0.0)
    third = scheduler.add(evaluate(4, few, few), 0.0)
    assert set(run(scheduler, 0.0).passes) == {first, second}
    assert third in scheduler._passes


@pytest.mark.parametrize(("first", "second"), [(True, False), (False, True), (True, True)])
def test_nothing_is_computed_together_with_a_pass_that_is_to_be_alone(first: bool, second: bool) -> None:
    scheduler = Scheduler(POLICY)
    for client, alone in enumerate((first, second)):
        scheduler.add(replace(evaluate(client, 2), alone=alone), 0.0)
    assert [len(run(scheduler, 0.0).passes) for _ in range(2)] == [1, 1]


def test_a_pass_is_not_overtaken_anew_before_each_of_its_parts() -> None:
    """The part of a pass that has waited goes before passes that came while it waited, of whatever client."""
    scheduler = Scheduler(POLICY)
    for _ in range(3):
        scheduler.add(evaluate(1, LONG), 0.0)
        run(scheduler, 0.0)
    scheduler.add(evaluate(2, LONG), 0.0)
    newer = scheduler.add(evaluate(2, LONG), 0.0)
    run(scheduler, 0.0)
    part = scheduler.add(replace(evaluate(1, LONG, LONG), waited_s=POLICY.ageing_s), 0.0)
    assert list(run(scheduler, 0.0).passes) == [part]
    part = scheduler.add(evaluate(1, LONG, LONG), 0.0)
    assert list(run(scheduler, 0.0).passes) == [newer], "a pass that has not waited, of a client that was given more"


def test_a_pass_may_take_what_a_prefill_may() -> None:
    scheduler = Scheduler(POLICY)
    assert scheduler.pass_s(0.0) == POLICY.prefill_s
    decoding(scheduler)
    for now_s in (1.0, 1.1):
        ticket = scheduler.add(Forward(SESSION, 0, 1, bytes(1)), now_s)
        batch = scheduler.take(now_s)
        assert ticket in batch.slices
        scheduler.done(batch, 0.040, now_s)
        scheduler.remove(ticket)
    assert scheduler.pass_s(1.2) == pytest.approx((POLICY.stretch - 1) * 0.040)
    assert scheduler.pass_s(1.2 + POLICY.decoding_s) == POLICY.prefill_s


def test_the_passes_of_one_client_come_one_after_another_and_clients_take_turns() -> None:
    """Each pass has two parts. The second is added when the first is done, behind those that wait."""
    scheduler = Scheduler(POLICY)
    passes = {(client, number): 2 for client in (1, 2) for number in (0, 1)}
    waiting = {
        scheduler.add(replace(evaluate(client, LONG), number=number), 0.0): (client, number)
        for client, number in passes
    }
    order = []
    while waiting:
        (ticket,) = run(scheduler, 0.0).passes
        client, number = which = waiting.pop(ticket)
        order.append(which)
        passes[which] -= 1
        if passes[which]:
            waiting[scheduler.add(replace(evaluate(client, LONG), number=number), 0.0)] = which
    assert [client for client, _ in order] == [1, 2] * 4
    for client in (1, 2):
        assert [number for each, number in order if each == client] == [0, 0, 1, 1]
