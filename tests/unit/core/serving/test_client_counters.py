"""Clients get equal shares, also those that have no session and nothing in the queue for a moment."""

from __future__ import annotations

from llmnode.core.ids import PeerId
from llmnode.core.operations import Evaluate
from llmnode.core.policy import BatchPolicy
from llmnode.core.serving.client_counters import REMEMBERED, ClientCounters
from llmnode.core.serving.scheduling import Scheduler
from llmnode.core.span import Span

POLICY = BatchPolicy()
LONG = POLICY.fast_prefill
"""Positions of a pass that nothing fits beside."""
BLOCKS = {PeerId("wide"): 10, PeerId("narrow"): 1}
"""Through which the passes of each client go."""


def test_clients_whose_passes_come_one_after_the_other_get_equal_shares() -> None:
    scheduler = Scheduler(POLICY)
    given = dict.fromkeys(BLOCKS, 0)

    def ask(client: PeerId) -> None:
        scheduler.add(Evaluate(Span(0, BLOCKS[client]), (LONG,), bytes(LONG), client), 0.0)

    for client in BLOCKS:
        ask(client)
    for _ in range(220):
        batch = scheduler.take(0.0)
        ((ticket, done),) = batch.passes.items()
        given[done.client] += len(done.span)
        scheduler.done(batch, None, 0.0)
        scheduler.remove(ticket)
        ask(done.client)
    assert abs(given[PeerId("wide")] - given[PeerId("narrow")]) <= max(BLOCKS.values())


def test_a_client_that_was_away_is_one_request_ahead_of_those_that_waited_and_a_new_one_is_not() -> None:
    counters = ClientCounters()
    back, busy, new = (PeerId(name) for name in ("back", "busy", "new"))
    counters.enter(back)
    counters.leave(back)
    counters.enter(busy)
    for _ in range(50):
        counters.charge(busy, 7)
    counters.enter(back)
    counters.enter(new)
    assert counters.given == {busy: 350, back: 343, new: 343}
    counters.leave(back)
    counters.leave(new)
    counters.forget(new)
    counters.enter(another := PeerId("another"))
    assert counters.given[another] == 350


def test_a_limited_number_of_clients_is_remembered() -> None:
    counters = ClientCounters()
    for number in range(REMEMBERED + 50):
        client = PeerId(str(number))
        counters.enter(client)
        counters.charge(client, 1)
        counters.forget(client)
        assert client in counters.given, "a request of it waits"
        counters.leave(client)
        counters.forget(client)
    assert len(counters.given) == REMEMBERED
    counters.enter(kept := PeerId(str(REMEMBERED + 49)))
    for number in range(2 * REMEMBERED):
        counters.enter(PeerId(f"further {number}"))
        counters.leave(PeerId(f"further {number}"))
        counters.forget(PeerId(f"further {number}"))
    counters.charge(kept, 1)
    assert len(counters.given) == REMEMBERED + 1
