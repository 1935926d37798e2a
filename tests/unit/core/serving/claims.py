"""Claims to KV, and a server whose KV is taken."""

from __future__ import annotations

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.policy import AdmissionPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.admission_queue import AdmissionQueue
from llmnode.core.serving.kv_shares import KvClaim, KvLease


def name(number: int) -> SessionId:
    return SessionId(number.to_bytes(16, "big"))


def claim(positions: int, client: int = 0, priority: Priority = Priority.INTERACTIVE) -> KvClaim:
    return KvClaim(PeerId(f"client {client}"), f"group {client}", priority, positions)


def a_full_server(sessions: int, policy: AdmissionPolicy) -> AdmissionQueue:
    """They hold all its positions, and belong to 40 clients. None of them is in use any more."""
    queue = AdmissionQueue(sessions, policy)
    for number in range(sessions):  # one by one they would come in slowly
        lease = KvLease(name(number), claim(1, client=number % 40), 0.0, is_inside=True, used_s=number / sessions)
        queue._ledger.add(lease)
    assert queue.free == 0
    return queue
