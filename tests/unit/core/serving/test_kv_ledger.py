"""The sums over the leases of a server's KV are right after any changes, in any order."""

from __future__ import annotations

import random

import pytest

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.core.serving.kv_shares import KvClaim
from unit.core.serving.plain_ledger import check_ledger, plain_place_for

POSITIONS = 400
POLICY = AdmissionPolicy(first_positions=8, most_waiting=12, most_waiting_per_client=5)
CHANGES = (*["add"] * 4, *["grow"] * 4, "give up", "use", "end", "look", "leave for growth", "remove", "admit")


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


@pytest.mark.parametrize("page", [1, 4])
@pytest.mark.parametrize("seed", range(12))
def test_the_sums_are_those_of_all_leases_whatever_changes(seed: int, page: int) -> None:
    """Also of sessions that end or wait in an order in which no server would let them."""
    rng, queue, now_s = random.Random(seed), AdmissionQueue(POSITIONS, POLICY, page), 0.0
    grown, waited = 0, set[tuple[bool, bool]]()
    for number in range(400):
        now_s += rng.expovariate(2)
        known = list(queue._ledger.leases.values())
        kind = rng.choice(CHANGES) if known else "add"
        each = rng.choice(known) if known else None
        if kind == "add":
            client, positions = rng.choice((0, 0, rng.randrange(12))), rng.randint(1, 120)
            asked = KvClaim(
                PeerId(f"client {client}"),
                f"group {client % 4}",
                rng.choice(list(Priority)),
                positions,
                rng.randrange(positions),
            )
            assert queue.place_for(asked) == plain_place_for(queue, asked)
            has_place, makes_way = queue.place_for(asked)
            waited.add((has_place, makes_way is not None))
            if makes_way is not None:
                queue.remove(makes_way, now_s)
            if has_place:
                queue.add(name(number), asked, now_s)
        elif each is not None:
            grown += change(queue, each.session, kind, now_s, rng)
        check_ledger(queue)
        assert POLICY.least_retry_s <= queue.retry_after_s(KvClaim(PeerId("x"), "x", Priority.BATCH, 9), now_s)
    assert grown > 5 and len(waited) > 1
    for session in list(queue._ledger.leases):
        queue.remove(session, now_s)
        check_ledger(queue)
    assert (queue.free, queue.kept, queue.waiting) == (POSITIONS, 0, 0)


def change(queue: AdmissionQueue, session: SessionId, kind: str, now_s: float, rng: random.Random) -> bool:
    """Change one lease. Whether it grows."""
    lease = queue._ledger.leases[session]
    match kind:
        case "grow" if lease.is_inside and not lease.growing and lease.later:
            queue.grow(session, lease.positions + rng.randint(1, lease.later))
            return True
        case "give up" if lease.growing:
            queue.give_up(session)
        case "use":
            queue.use(session, now_s, ends=rng.random() < 0.5)
        case "end":
            queue.end(session, is_moved=rng.random() < 0.5)
        case "look":
            queue.choose_moves(now_s)
        case "leave for growth" if lease.growing:
            queue.choose_leaving(session, now_s)
        case "remove":
            queue.remove(session, now_s)
        case "admit":
            queue.admit(now_s)
    return False
