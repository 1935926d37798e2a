"""Which of the pieces that wait are computed next, and together. Knows no clock: it is told the time.

A batch is what is ready when the executor is free: every decode, and of the prefills as many positions as leave the
decodes beside them fast. If those are few, each is dear: then more of them go through a few blocks at a time, in
batches of their own between those of decodes (Lee et al., From Tokens to Layers: Redefining Stall-Free Scheduling for
LLM Serving with Layered Prefill, 2025).

Before a batch clients who decode in step with the others are waited for (`core/serving/decode_gather.py`).

Clients share what there is by virtual token counters (Sheng et al., Fairness in Serving Large Language Models, OSDI
2024, algorithm 2): whoever was given the fewest positions, by blocks, is next, and who comes back starts level with the
least of those that are here, so that nobody saves up turns while away, nor pays for what nobody else wanted.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import chain
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from llmnode.core.serving.decode_gather import Rhythm, keep_step
from llmnode.core.serving.forward_cost import ForwardCost
from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import BatchPolicy

_MIXED_BATCHES = 16
"""One after the other, of decodes with prefills: then there is one of decodes alone, to see how long those take now."""


class Priority(IntEnum):
    """What a session is for. Of higher ones one piece goes before all of lower ones, until those have waited long."""

    INTERACTIVE = 0
    BATCH = 1
    TRAINING = 2

    @property
    def word(self) -> str:
        """What it is called, by users and on the wire."""
        return self.name.lower()


PRIORITIES = {each.word: each for each in Priority}


@dataclass(frozen=True, slots=True)
class Part:
    """`length` positions of a piece, from its own position `start` on, through its session's blocks [`first`, `end`).

    They have been through those before, and go through those after in batches to come.
    """

    ticket: int
    start: int
    length: int
    first: int
    end: int
    is_through: bool
    """Whether there are no blocks after."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What the executor does next: chores, in this order, and then all parts in one forward."""

    chores: Sequence[int]
    parts: Sequence[Part]


class _Lane(NamedTuple):
    """Pieces that are served in the order in which they came, but for those that their sessions hold back."""

    client: PeerId
    priority: Priority
    is_decode: bool


_NO_SPAN = Span(0, 1)  # of chores


@dataclass(slots=True)
class _Entry:
    """A piece, or without a lane a chore, that is not done yet. `given` positions of it are computed, `chunk` more have
    been through `passed` of the blocks of its session's `span`.
    """

    ticket: int
    sessions: Sequence[SessionId]
    lane: _Lane | None = None
    length: int = 0
    span: Span = _NO_SPAN
    given: int = 0
    chunk: int = 0
    passed: int = 0

    @property
    def left(self) -> int:
        """Positions that have not begun."""
        return self.length - self.given - self.chunk

    @property
    def ahead(self) -> Span:
        """The blocks that its next positions go through."""
        return Span(self.span.start + self.passed, self.span.end)


class _Choice(NamedTuple):
    """Positions of a piece, up to `end` of its session's blocks."""

    entry: _Entry
    length: int
    end: int

    @property
    def is_whole(self) -> bool:
        return not self.entry.passed and self.end == len(self.entry.span)


@dataclass(slots=True)
class _Session:
    client: PeerId
    priority: Priority
    span: Span
    rhythm: Rhythm = field(default_factory=Rhythm)
    line: deque[int] = field(default_factory=deque)
    """Tickets of what it has here, in order: the first is done before the second begins."""


class Scheduler:
    """Of one executor, which runs one batch at a time: `take`, and `done` before the next `take`.

    Tickets name pieces and chores, and rise in the order of arrival.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._pace = ForwardCost(policy)
        self._sessions: dict[SessionId, _Session] = {}
        self._entries: dict[int, _Entry] = {}
        self._given: dict[PeerId, int] = {}  # the virtual token counters
        self._queued: Counter[PeerId] = Counter()  # pieces of each client
        self._level = 0  # the counter of who was the last to have nothing queued
        self._done_s = -inf  # when the latest forward was
        self._is_decodes_turn = False  # as prefills have gone through a few blocks by themselves
        self._mixed_batches = 0  # since the latest of decodes alone
        self._since_s: dict[_Lane, float] = {}  # waiting lanes: when positions were last computed, or its first add

    def __len__(self) -> int:
        return len(self._entries)

    def admit(self, session: SessionId, client: PeerId, priority: Priority, span: Span) -> None:
        """From now on there may be pieces and chores of it, which goes through the blocks of `span`."""
        self._sessions[session] = _Session(client, priority, span)

    def dismiss(self, session: SessionId) -> None:
        """There is nothing more to come, and nothing left of it. An unknown one does nothing."""
        left = self._sessions.pop(session, None)
        if left is not None and all(each.client != left.client for each in self._sessions.values()):
            self._given.pop(left.client, None)

    def knows(self, session: SessionId) -> bool:
        return session in self._sessions

    def add(self, ticket: int, session: SessionId, length: int, now_s: float) -> None:
        """A piece of a session that is admitted."""
        of = self._sessions[session]
        lane = _Lane(of.client, of.priority, length <= self._policy.decode_positions)
        if not self._queued[of.client]:
            here = [self._given[client] for client, pieces in self._queued.items() if pieces]
            self._given[of.client] = max(self._given.get(of.client, 0), min(here, default=self._level))
        if not any(entry.lane == lane for entry in self._entries.values()):
            self._since_s[lane] = now_s
        self._queued[of.client] += 1
        if lane.is_decode:
            of.rhythm.note_return(now_s, self._pace.forward_s)
        else:
            of.rhythm.end()
        self._enter(_Entry(ticket, (session,), lane, length, of.span))

    def add_chore(self, ticket: int, sessions: Sequence[SessionId]) -> None:
        """Something else to be done for sessions, after what they have here and before what they add later.

        Those that are not admitted have nothing here.
        """
        self._enter(_Entry(ticket, [session for session in sessions if session in self._sessions]))

    def remove(self, ticket: int) -> None:
        """Whether it is done, has failed, or is not wanted any more. Not between `take` and `done`."""
        entry = self._entries.pop(ticket)
        for session in entry.sessions:
            self._sessions[session].line.remove(ticket)
        if entry.lane is not None:
            client = entry.lane.client
            self._queued[client] -= 1
            if not self._queued[client]:
                del self._queued[client]
                self._level = self._given[client]
            if not any(each.lane == entry.lane for each in self._entries.values()):
                del self._since_s[entry.lane]

    def waits_until_s(self, now_s: float) -> float | None:
        """Until when to wait, if nobody comes before. None if there is nothing to wait for."""
        if not any(entry.lane for entry in self._entries.values()):
            return None
        saved_s = self._pace.forward_s
        near = [each for each in self._sessions.values() if each.rhythm.is_near(saved_s)]
        here = [each.rhythm for each in near if each.line]
        away = [each.rhythm for each in near if not each.line and each.rhythm.late_s > now_s]
        since_s = max(self._done_s, min(self._since_s.values()))
        until_s = min(since_s + saved_s, max((each.late_s for each in away), default=-inf))
        if until_s <= now_s or not keep_step(away, here, saved_s, self._policy.gather_share):
            return None
        prefills_go_alone = not self._is_decodes_turn and _are_layered(self._choose_prefills(self._ready(), now_s))
        return None if prefills_go_alone else until_s

    def take(self, now_s: float) -> Batch:
        """The next batch. Empty only if there is nothing here."""
        ready = self._ready()
        chores = [entry.ticket for entry in ready if entry.lane is None]
        decodes = self._choose_decodes(ready, now_s)
        prefills = self._choose_prefills(ready, now_s)
        if decodes and prefills:
            if self._is_decodes_turn or self._mixed_batches >= _MIXED_BATCHES:
                prefills = []
            elif _are_layered(prefills):
                decodes = []
        return Batch(chores, [self._part(each, now_s) for each in decodes + prefills])

    def done(self, batch: Batch, took_s: float | None, now_s: float) -> None:
        """The batch is computed. `took_s` is None if it was not one forward, as some part of it has failed.

        Pieces stay until they are removed, those that are computed to their end too.
        """
        decodes = prefill = 0
        through = 0.0  # of the blocks
        for part in batch.parts:
            entry = self._entries[part.ticket]
            assert entry.lane is not None, "chores have no parts"
            if part.is_through:
                entry.given, entry.chunk, entry.passed = entry.given + part.length, 0, 0
            else:
                entry.chunk, entry.passed = part.length, part.end
            if entry.lane.is_decode:
                decodes += part.length
                self._sessions[entry.sessions[0]].rhythm.answered_s = now_s
            else:
                prefill += part.length * (part.end - part.first)
                through = max(through, (part.end - part.first) / len(entry.span))
        if batch.parts:
            self._done_s = now_s
            self._is_decodes_turn = not decodes and any(part.first or not part.is_through for part in batch.parts)
            self._mixed_batches = self._mixed_batches + 1 if decodes and prefill else 0
            if took_s is not None:
                self._pace.note(decodes, prefill, through, took_s)

    def _enter(self, entry: _Entry) -> None:
        self._entries[entry.ticket] = entry
        for session in entry.sessions:
            self._sessions[session].line.append(entry.ticket)

    def _ready(self) -> list[_Entry]:
        """Those that nothing of their sessions comes before."""
        lines = {name: session.line for name, session in self._sessions.items()}
        return [e for e in self._entries.values() if all(lines[name][0] == e.ticket for name in e.sessions)]

    def _is_decoding(self, now_s: float) -> bool:
        """Whether somebody may want a decode soon."""
        return any(
            each.rhythm.answered_s is not None and now_s - each.rhythm.answered_s < self._policy.decoding_s
            for each in self._sessions.values()
        )

    def _in_turn(self, ready: Sequence[_Entry], now_s: float) -> Iterator[tuple[int, _Entry]]:
        """With its rank, by which who has waited for long goes up. Each counts as given, all of it, for those after."""
        given = self._given.copy()
        lanes: dict[_Lane, deque[_Entry]] = {}
        for entry in ready:
            assert entry.lane is not None, "chores have no turns"
            lanes.setdefault(entry.lane, deque()).append(entry)

        def rank(lane: _Lane) -> int:
            return max(0, lane.priority - int((now_s - self._since_s[lane]) / self._policy.ageing_s))

        while lanes:
            lane = min(lanes, key=lambda lane: (rank(lane), given[lane.client], lanes[lane][0].ticket))
            entry = lanes[lane].popleft()
            if not lanes[lane]:
                del lanes[lane]
            given[lane.client] += (entry.left + entry.chunk) * len(entry.span)
            yield rank(lane), entry

    def _choose_decodes(self, ready: Sequence[_Entry], now_s: float) -> list[_Choice]:
        """As many positions as there is room for."""
        chosen = []
        room = self._policy.decodes
        for _, entry in self._in_turn([entry for entry in ready if entry.lane and entry.lane.is_decode], now_s):
            if not room:
                break
            chosen.append(_Choice(entry, min(entry.left, room), len(entry.span)))
            room -= chosen[-1].length
        return chosen

    def _choose_prefills(self, ready: Sequence[_Entry], now_s: float) -> list[_Choice]:
        """As many positions as there is time for, through all blocks; or more of them through the same few blocks, of
        whoever is next, and of others of no lower rank as far as positions get cheaper by that.
        """
        prefills = [entry for entry in ready if entry.lane and not entry.lane.is_decode]
        beside_decodes = any(entry.lane and entry.lane.is_decode for entry in ready) or self._is_decoding(now_s)
        in_turn = self._in_turn(prefills, now_s)
        rank, next_up = next(in_turn, (0, None))
        if next_up is None:
            return []
        blocks, ahead = len(next_up.span), next_up.ahead
        room = self._pace.room(beside_decodes=beside_decodes)
        waiting = sum(entry.left for entry in prefills if entry.ahead == ahead)
        most = next_up.chunk or self._layered_positions(waiting, blocks, room, beside_decodes=beside_decodes)
        if not most:
            most = self._policy.unmeasured_prefill if room is None else room // blocks
            most = max(self._policy.least_prefill, min(self._policy.most_prefill, most))
            return self._of_all_blocks(chain([(rank, next_up)], in_turn), most, most * blocks)
        chosen = [(next_up, next_up.chunk or min(next_up.left, most))]
        positions = chosen[0][1]
        for other_rank, entry in in_turn:
            length = entry.chunk or entry.left
            if entry.ahead == ahead and other_rank <= rank and positions + length <= self._policy.fast_prefill:
                chosen.append((entry, length))
                positions += length
        further = self._pace.blocks(positions, blocks, room or 0)
        further = max(1, min(len(ahead), further))
        return [_Choice(entry, length, entry.passed + further) for entry, length in chosen]

    def _layered_positions(self, waiting: int, blocks: int, room: int | None, *, beside_decodes: bool) -> int:
        """How many new positions, of those that wait, go through a few blocks at a time. 0 if all blocks at once are as
        good: there is time for enough of them, or for as few either way.
        """
        policy = self._policy
        if room is None or room // blocks >= min(waiting, policy.fast_prefill):
            return 0
        least, most = policy.fast_prefill // 2, policy.most_prefill
        if not beside_decodes:  # who comes to decode meanwhile should not wait for long, so often
            least, most = policy.fast_prefill, policy.fast_prefill
        elif room // blocks < policy.least_prefill:  # even the fewest take too long through all blocks
            least = policy.least_prefill
        return 0 if room < least else min(room, most)

    def _of_all_blocks(self, in_turn: Iterable[tuple[int, _Entry]], most: int, room: int) -> list[_Choice]:
        chosen = []
        for _, entry in in_turn:
            length = 0 if entry.passed else min(entry.left, most, room // len(entry.span))
            if length:
                chosen.append(_Choice(entry, length, len(entry.span)))
                most -= length
                room -= length * len(entry.span)
        return chosen

    def _part(self, choice: _Choice, now_s: float) -> Part:
        """Who has waited for long has all of its turn: until positions of it are computed."""
        entry, length, end = choice
        assert entry.lane is not None
        self._given[entry.lane.client] += length * (end - entry.passed)
        is_through = end == len(entry.span)
        if is_through:
            self._since_s[entry.lane] = now_s
        return Part(entry.ticket, entry.given, length, entry.passed, end, is_through)


def _are_layered(prefills: Sequence[_Choice]) -> bool:
    """And so go by themselves; others go in one forward with decodes."""
    return any(not each.is_whole for each in prefills)
