"""Address groups get equal shares, and their clients, also those without a session or a request for a moment."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import NO_PROMPTS, Evaluate, Forward, Open
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.client_counters import REMEMBERED, REMEMBERED_OF_GROUP, Client, ClientCounters, Counters
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
    counters = Counters[PeerId]()
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
    counters = Counters[PeerId]()
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


def test_many_identities_of_one_address_group_get_together_what_one_client_of_another_group_gets() -> None:
    """Each asks once, and is gone: another one comes. The identities of a group get equal shares of it."""
    scheduler, identities, given = Scheduler(POLICY), 20, Counter[str]()

    def ask(group: str, client: str) -> None:
        whose = PeerId(client), Priority.TRAINING, None, 0.0, NO_PROMPTS, group
        scheduler.add(Evaluate(Span(0, 1), (LONG,), bytes(LONG), *whose), 0.0)

    for number in range(identities):
        ask("crowd", f"{number}")
    for client in ("left", "right"):
        ask("home", client)
    for round_ in range(400):
        batch = scheduler.take(0.0)
        ((ticket, done),) = batch.passes.items()
        given[done.group] += 1
        given[done.client] += 1
        scheduler.done(batch, None, 0.0)
        scheduler.remove(ticket)
        ask(done.group, done.client if done.group == "home" else f"another {round_}")
    assert abs(given["home"] - given["crowd"]) <= 2
    assert abs(given["left"] - given["right"]) <= 1


def test_forwards_of_many_identities_wait_for_one_client_of_another_group() -> None:
    """It has one decode at a time, and batches have no place for all."""
    policy = replace(POLICY, decodes=4)
    scheduler, sessions = Scheduler(policy), 40

    def name(number: int) -> SessionId:
        return SessionId(number.to_bytes(16, "big"))

    def decode(number: int) -> int:
        return scheduler.add(Forward(name(number), 0, 1, bytes(1)), 0.0)

    for number in range(sessions + 1):
        group = "crowd" if number else "home"
        scheduler.admit(Open(name(number), Span(0, 1), 100, PeerId(f"{number}"), group=group))
    waiting = {decode(number): number for number in range(1, sessions + 1)}
    for _ in range(50):
        own = decode(0)
        batch = scheduler.take(0.0)
        assert own in batch.slices, "its turn is in the next batch"
        scheduler.done(batch, None, 0.0)
        for ticket in batch.slices:
            scheduler.remove(ticket)
            if ticket != own:
                number = waiting.pop(ticket)
                waiting[decode(number)] = number


def test_the_groups_that_are_remembered_are_limited_and_so_are_the_peers_of_each() -> None:
    counters = ClientCounters()
    for number in range(3 * REMEMBERED):
        for client in (Client("one", PeerId(f"{number}")), Client(f"{number}", PeerId("client"))):
            counters.open(client)
            counters.enter(client)
            counters.charge(client, 1)
            counters.leave(client)
            counters.close(client)
    assert len(counters._within) == len(counters._groups.given) == REMEMBERED
    assert len(counters._within["one"].given) == REMEMBERED_OF_GROUP
    assert not counters._sessions
