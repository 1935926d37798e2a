"""The passes that wait for an executor: forwards and backwards without a session, which train.

Clients take turns, and the passes of one client come one after another.
They are computed in batches of their own. Executors that do one thing at a time compute them while no forward is ready,
and otherwise in turn with batches of forwards. Their callers cut them short, since others wait meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from llmnode.core.operations import Backward
from llmnode.core.serving.client_counters import Client

if TYPE_CHECKING:
    from llmnode.core.operations import Pass
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.serving.client_counters import ClientCounters

BACKWARD_COST = 3
"""A backward computes the blocks, twice if their graphs do not fit into memory, and then the gradients."""


@dataclass(frozen=True, slots=True)
class _Queued:
    operation: Pass
    since_s: float
    """When it was added, less the time that earlier parts of its pass have waited: a part is not overtaken anew."""

    @property
    def client(self) -> Client:
        return Client(self.operation.group, self.operation.client)

    @property
    def cost(self) -> int:
        """In positions times blocks of a forward."""
        times = BACKWARD_COST if isinstance(self.operation, Backward) else 1
        return times * self.operation.positions * len(self.operation.span)

    def rank(self, policy: BatchPolicy, now_s: float) -> int:
        return policy.rank(self.operation.priority, self.since_s, now_s)


class PassQueue:
    """Keys are tickets, which rise in the order of arrival. Address groups and clients take turns by `counters`."""

    def __init__(self, policy: BatchPolicy, counters: ClientCounters) -> None:
        self._policy = policy
        self._counters = counters
        self._queued: dict[int, _Queued] = {}

    def __len__(self) -> int:
        return len(self._queued)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._queued

    def add(self, ticket: int, operation: Pass, now_s: float) -> None:
        queued = self._queued[ticket] = _Queued(operation, now_s - operation.waited_s)
        self._counters.enter(queued.client)

    def remove(self, ticket: int) -> Pass:
        queued = self._queued.pop(ticket)
        self._counters.leave(queued.client)
        return queued.operation

    def take(self, now_s: float) -> dict[int, Pass]:
        """The pass that is next, and small ones that fit beside it. They are charged to their clients."""
        if not self._queued:
            return {}
        order = sorted(self._queued, key=lambda ticket: (*self._turn(ticket, now_s), ticket))
        order.insert(0, self._earliest(order[0]))
        first = self._queued[order[0]]
        chosen: dict[int, Pass] = {}
        positions = 0
        for ticket in order:
            if ticket in chosen:
                continue
            each = self._queued[ticket].operation
            is_alike = type(each) is type(first.operation) and each.span == first.operation.span
            may_join = is_alike and not each.alone and not first.operation.alone
            if not chosen or (may_join and positions + each.positions <= self._policy.fast_prefill):
                chosen[ticket] = each
                positions += each.positions
                self._counters.charge(self._queued[ticket].client, self._queued[ticket].cost)
        return chosen

    def _earliest(self, ticket: int) -> int:
        """The next part of the earliest pass of a client, for `ticket`, which is of one of its passes.

        So the next server gets the results of the first one while those of the others are computed here.
        """
        whose, priority = self._queued[ticket].client, self._queued[ticket].operation.priority
        own = (
            (each.operation.number, number)
            for number, each in self._queued.items()
            if each.client == whose and each.operation.priority == priority
        )
        return min(own)[1]

    def _turn(self, ticket: int, now_s: float) -> tuple[int, tuple[int, int]]:
        queued = self._queued[ticket]
        return queued.rank(self._policy, now_s), self._counters.given(queued.client)
