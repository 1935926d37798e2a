"""Chooses the forwards that are computed next, and together. Knows no clock: it is told the time.

A batch is made of what is ready when the executor is free: every decode, and the prefill positions that leave the
decodes beside them fast. If that is only a few positions, each is expensive. Then more of them go through a few blocks
at a time, in batches of their own between those of decodes (Lee et al., From Tokens to Layers: Redefining Stall-Free
Scheduling for LLM Serving with Layered Prefill, 2025).

Before a batch the scheduler waits for clients that decode in step with the others (`core/serving/decode_gather.py`).

Address groups share the executor, and within them their clients (`core/serving/client_counters.py`). Passes, which
train, wait in a queue of their own (`core/serving/pass_queue.py`). Where the executor computes them beside all else,
they have a scheduler of their own too.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain, count
from math import inf
from typing import TYPE_CHECKING

from llmnode.core.operations import Backward, Evaluate, Forward
from llmnode.core.serving.client_counters import Client, ClientCounters, Turns
from llmnode.core.serving.decode_gather import Rhythm, keep_step
from llmnode.core.serving.forward_cost import ForwardCost
from llmnode.core.serving.pass_queue import PassQueue
from llmnode.core.serving.queued_forward import Lane, Queued

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Control, Open, Pass, Slice
    from llmnode.core.policy import BatchPolicy
    from llmnode.core.priority import Priority
    from llmnode.core.span import Span
    from llmnode.core.speed import ForwardsSeen

_MIXED_BATCHES = 16
"""After this many mixed batches in a row, one of decodes alone shows how long those take now."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The executor does the operations next, in this order, then all slices in one forward, or all passes together.

    Keys are tickets.
    """

    operations: Mapping[int, Control]
    slices: Mapping[int, Slice]
    passes: Mapping[int, Pass] = field(default_factory=dict)


@dataclass(slots=True)
class _Session:
    client: Client
    priority: Priority
    span: Span
    rhythm: Rhythm = field(default_factory=Rhythm)
    queue: deque[int] = field(default_factory=deque)
    """Tickets of its operations, in order: the first is done before the second begins."""


class Scheduler:
    """The queue of one executor, which runs one batch at a time: `take`, and `done` before the next `take`.

    A ticket names an operation. Tickets rise in the order of arrival.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._cost = ForwardCost(policy)
        self._tickets = count()
        self._sessions: dict[SessionId, _Session] = {}
        self._controls: dict[int, Control] = {}
        self._forwards: dict[int, Queued] = {}
        self._counters = ClientCounters()
        self._passes = PassQueue(policy, self._counters)
        self._done_s = -inf  # when the latest forward was done
        self._is_decodes_turn = False  # since prefills have gone through a few blocks by themselves
        self._is_forwards_turn = True  # unless the latest batch had forwards
        self._mixed_batches = 0  # since the latest of decodes alone
        self._since_s: dict[Lane, float] = {}  # waiting lanes: when positions were last computed, or its first add

    def __len__(self) -> int:
        return len(self._controls) + len(self._forwards) + len(self._passes)

    @property
    def has_work(self) -> bool:
        """Whether a forward or a pass is queued."""
        return bool(self._forwards or self._passes)

    def pass_s(self, now_s: float) -> float | None:
        """The time that one pass may take: a decode that comes meanwhile waits for it. None if that is not known.

        Where passes have a scheduler of their own, no decode is known here, and other passes alone wait.
        """
        if not self._is_decoding(now_s) and not any(each.lane.is_decode for each in self._forwards.values()):
            return self._policy.prefill_s
        return (self._policy.stretch - 1) * self._cost.decode_s or None

    @property
    def seen(self) -> ForwardsSeen:
        """The times of forwards until now."""
        return self._cost.seen

    def admit(self, opened: Open) -> None:
        """Operations of its session may be added from now on."""
        client = Client(opened.group, opened.client)
        self._sessions[opened.session] = _Session(client, opened.priority, opened.span)
        self._counters.open(client)

    def dismiss(self, session: SessionId) -> None:
        """Forget a session that has no operations left and gets no more. An unknown one does nothing."""
        left = self._sessions.pop(session, None)
        if left is not None:
            self._counters.close(left.client)

    def knows(self, session: SessionId) -> bool:
        return session in self._sessions

    def add(self, operation: Control | Forward | Pass, now_s: float) -> int:
        """Queue an operation of sessions that are admitted, after what they have here already. Returns its ticket."""
        ticket = next(self._tickets)
        match operation:
            case Forward():
                self._add_forward(ticket, operation, now_s)
            case Evaluate() | Backward():
                self._passes.add(ticket, operation, now_s)
            case _:
                self._controls[ticket] = operation
        for session in operation.sessions:
            self._sessions[session].queue.append(ticket)
        return ticket

    def remove(self, ticket: int) -> None:
        """Whether it is done, has failed, or is not wanted any more. Not between `take` and `done`."""
        operation: Control | Forward | Pass
        if ticket in self._forwards:
            operation = self._remove_forward(ticket)
        elif ticket in self._controls:
            operation = self._controls.pop(ticket)
        else:
            operation = self._passes.remove(ticket)
            self._counters.forget(Client(operation.group, operation.client))
        for session in operation.sessions:
            self._sessions[session].queue.remove(ticket)

    def waits_until_s(self, now_s: float) -> float | None:
        """How long to wait if nobody comes before. None if there is nothing to wait for."""
        if not self._forwards:
            return None
        absent = [each.rhythm for each in self._sessions.values() if not each.queue]
        if not absent:
            return None
        saved_s = self._cost.forward_s
        here = [each.rhythm for each in self._sessions.values() if each.queue and each.rhythm.is_near(saved_s)]
        away = [each for each in absent if each.late_s > now_s and each.is_near(saved_s)]
        since_s = max(self._done_s, min(self._since_s.values()))
        until_s = min(since_s + saved_s, max((each.late_s for each in away), default=-inf))
        if until_s <= now_s or not keep_step(away, here, saved_s, self._policy.gather_share):
            return None
        if self._is_decodes_turn:
            return until_s
        return None if _are_layered(self._choose_prefills(self._ready_forwards(), now_s)) else until_s

    def take(self, now_s: float) -> Batch:
        """The next batch. It is empty only if nothing is queued."""
        controls = {ticket: each for ticket, each in self._controls.items() if self._is_ready(ticket, each)}
        ready = self._ready_forwards()
        decodes = self._choose_decodes(ready, now_s)
        prefills = self._choose_prefills(ready, now_s)
        if decodes and prefills:
            if self._is_decodes_turn or self._mixed_batches >= _MIXED_BATCHES:
                prefills = {}
            elif _are_layered(prefills):
                decodes = {}
        slices = decodes | prefills
        passes = {} if slices and self._is_forwards_turn else self._passes.take(now_s)
        batch = Batch(controls, {} if passes else slices, passes)
        for ticket, chosen in batch.slices.items():
            self._charge(self._forwards[ticket], chosen, now_s)
        return batch

    def done(self, batch: Batch, took_s: float | None, now_s: float) -> None:
        """The batch is computed. `took_s` is None if it was not one forward, since a slice has failed.

        Operations stay until they are removed, even those that are done.
        """
        decodes = prefill = 0
        through = 0.0  # the largest share of its session's blocks that a prefill has gone through
        decode_ways: set[Span] = set()  # of decodes: those of one way have gone through it together
        in_blocks = 0  # decodes, each counted for every block that it has gone through
        for ticket, computed in batch.slices.items():
            queued = self._forwards[ticket]
            blocks = len(way := computed.blocks(queued.span))
            if computed.end is None:
                queued.given, queued.chunk, queued.passed = queued.given + computed.length, 0, 0
            else:
                queued.chunk, queued.passed = computed.length, computed.end
            if queued.lane.is_decode:
                decodes += computed.length
                decode_ways.add(way)
                in_blocks += computed.length * blocks
                self._sessions[computed.session].rhythm.answered_s = now_s
            else:
                prefill += computed.length * blocks
                through = max(through, blocks / len(queued.span))
        self._is_forwards_turn = bool(batch.passes)
        if batch.slices:
            self._done_s = now_s
            self._is_decodes_turn = not decodes and _are_layered(batch.slices)
            self._mixed_batches = self._mixed_batches + 1 if decodes and prefill else 0
            if took_s is not None:
                self._cost.note(decodes, prefill, through, took_s)
                if decodes and not prefill:
                    self._cost.note_decodes(in_blocks, sum(map(len, decode_ways)), took_s)

    def _add_forward(self, ticket: int, forward: Forward, now_s: float) -> None:
        session = self._sessions[forward.session]
        lane = Lane(session.client, session.priority, forward.length <= self._policy.decode_positions)
        self._since_s.setdefault(lane, now_s)
        self._counters.enter(session.client)
        if lane.is_decode:
            session.rhythm.note_return(now_s, self._cost.forward_s)
        else:
            session.rhythm.end()
        self._forwards[ticket] = Queued(ticket, forward, lane, session.span)

    def _remove_forward(self, ticket: int) -> Forward:
        removed = self._forwards.pop(ticket)
        self._counters.leave(removed.lane.client)
        if not any(each.lane == removed.lane for each in self._forwards.values()):
            del self._since_s[removed.lane]
        return removed.operation

    def _is_ready(self, ticket: int, operation: Control | Forward) -> bool:
        """Whether its sessions have nothing before it."""
        return all(self._sessions[session].queue[0] == ticket for session in operation.sessions)

    def _ready_forwards(self) -> list[Queued]:
        sessions = self._sessions
        return [each for ticket, each in self._forwards.items() if sessions[each.operation.session].queue[0] == ticket]

    def _is_decoding(self, now_s: float) -> bool:
        """Whether a client may want a decode soon."""
        return any(
            each.rhythm.answered_s is not None and now_s - each.rhythm.answered_s < self._policy.decoding_s
            for each in self._sessions.values()
        )

    def _rank(self, lane: Lane, now_s: float) -> int:
        """The rank of a lane that waits."""
        return self._policy.rank(lane.priority, self._since_s[lane], now_s)

    def _in_turn(self, ready: Sequence[Queued], now_s: float) -> Iterator[tuple[int, Queued]]:
        """The forwards in their order, each with its rank. A lane that has waited for long has a better rank.

        To order those after it, each counts as given to its end.
        """
        if len(ready) < 2:  # nobody takes turns
            for each in ready:
                yield self._rank(each.lane, now_s), each
            return
        turns = Turns(self._counters)
        lanes: dict[Lane, deque[Queued]] = {}
        for queued in ready:
            lanes.setdefault(queued.lane, deque()).append(queued)

        def turn(lane: Lane) -> tuple[int, tuple[int, int], int, Lane]:
            return self._rank(lane, now_s), turns.given(lane.client), lanes[lane][0].ticket, lane

        order = [turn(lane) for lane in lanes]
        heapify(order)
        while order:
            lane = order[0][-1]
            if order[0] != (now := turn(lane)):  # others of its group had turns meanwhile: it only gets later
                heapreplace(order, now)
                continue
            queued = lanes[lane].popleft()
            turns.charge(lane.client, (queued.left + queued.chunk) * len(queued.span))
            if lanes[lane]:
                heapreplace(order, turn(lane))
            else:
                heappop(order)
            yield now[0], queued

    def _choose_decodes(self, ready: Sequence[Queued], now_s: float) -> dict[int, Slice]:
        """Slices of decodes, up to the most positions that a batch takes."""
        chosen: dict[int, Slice] = {}
        positions = self._policy.decodes
        for _, queued in self._in_turn([each for each in ready if each.lane.is_decode], now_s):
            if not positions:
                break
            length = min(queued.left, positions)
            chosen[queued.ticket] = queued.slice(length)
            positions -= length
        return chosen

    def _choose_prefills(self, ready: Sequence[Queued], now_s: float) -> dict[int, Slice]:
        """The prefill positions that there is time for, through all blocks; or more of them through a few blocks.

        Those few are blocks of the forward that is next. Others of no lower rank join it while a position gets cheaper.
        """
        prefills = [each for each in ready if not each.lane.is_decode]
        if not prefills:
            return {}
        in_turn = self._in_turn(prefills, now_s)
        rank, next_up = next(in_turn)
        beside_decodes = len(prefills) < len(ready) or self._is_decoding(now_s)
        blocks, ahead = len(next_up.span), next_up.ahead
        budget = self._cost.budget(beside_decodes=beside_decodes)
        waiting = sum(each.left for each in prefills if each.ahead == ahead)
        most = next_up.chunk or self._layered_positions(waiting, blocks, budget, beside_decodes=beside_decodes)
        if not most:
            most = self._policy.unmeasured_prefill if budget is None else budget // blocks
            most = max(self._policy.least_prefill, min(self._policy.most_prefill, most))
            return self._through_all_blocks(chain([(rank, next_up)], in_turn), most, most * blocks)
        chosen = [(next_up, next_up.chunk or min(next_up.left, most))]
        positions = chosen[0][1]
        for other_rank, queued in in_turn:
            length = queued.chunk or queued.left
            if queued.ahead == ahead and other_rank <= rank and positions + length <= self._policy.fast_prefill:
                chosen.append((queued, length))
                positions += length
        further = self._cost.blocks(positions, blocks, budget or 0)
        further = max(1, min(len(ahead), further))
        return {queued.ticket: queued.slice(length, queued.passed + further) for queued, length in chosen}

    def _layered_positions(self, waiting: int, blocks: int, budget: int | None, *, beside_decodes: bool) -> int:
        """The number of new positions that go through a few blocks at a time, out of those that wait.

        0 if all blocks at once are as good: there is time for enough positions, or for equally few either way.
        """
        policy = self._policy
        if budget is None or budget // blocks >= min(waiting, policy.fast_prefill):
            return 0
        least, most = policy.fast_prefill // 2, policy.most_prefill
        if not beside_decodes:  # a client that comes to decode meanwhile should rarely wait for long
            least, most = policy.fast_prefill, policy.fast_prefill
        elif budget // blocks < policy.least_prefill:  # even the fewest take too long through all blocks
            least = policy.least_prefill
        return 0 if budget < least else min(budget, most)

    def _through_all_blocks(self, in_turn: Iterable[tuple[int, Queued]], most: int, budget: int) -> dict[int, Slice]:
        """Forwards in turn. None is begun in vain: once there is enough for one batch, a forward that would not be done
        with it waits for the next. So the rows of a large batch leave for the next server one by one.
        """
        chosen: dict[int, Slice] = {}
        positions, enough = 0, max(self._policy.fast_prefill, self._policy.full_share * most)
        for _, queued in in_turn:
            if queued.passed:
                continue
            length = min(queued.left, most - positions, budget // len(queued.span))
            if length < queued.left and positions >= enough:
                break
            if length:
                chosen[queued.ticket] = queued.slice(length)
                positions += length
                budget -= length * len(queued.span)
        return chosen

    def _charge(self, queued: Queued, chosen: Slice, now_s: float) -> None:
        """Count a slice as given to its client. A lane keeps its rank until positions of it are computed."""
        self._counters.charge(queued.lane.client, chosen.length * len(chosen.blocks(queued.span)))
        if chosen.end is None:
            self._since_s[queued.lane] = now_s


def _are_layered(slices: Mapping[int, Slice]) -> bool:
    """Whether any goes through some blocks only. Such slices go by themselves; others share a forward with decodes."""
    return any(not each.is_whole for each in slices.values())
