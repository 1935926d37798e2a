"""Which of the pieces that wait are computed next, and together. Knows no clock: it is told the time.

A batch is what is ready when the executor is free: every decode, and of the prefills as many positions as leave the
decodes beside them fast. If those are few, each is dear: then more of them go through a few blocks at a time, in
batches of their own between those of decodes (Lee et al., From Tokens to Layers: Redefining Stall-Free Scheduling for
LLM Serving with Layered Prefill, 2025). Before a batch those are waited for who decode in step with the others and are
just about to come back (`waits_until_s`): else two halves of the clients would take turns, at nearly the price of two
wholes each.

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

from llmnode.core.span import Span

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.policy import BatchPolicy

_THINK_KEEPS = 0.5
_HOPE = 2
"""Who is usually away for so many times our patience may be back sooner if no forward slows its answer down."""
_PAUSE, _MISSED = 4, 16
"""A longer pause, and not to have come when it was waited for, count as so many times our patience."""
_PACE_KEEPS = 0.7
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


class _Given(NamedTuple):
    """Positions of a piece, up to `end` of its session's blocks."""

    entry: _Entry
    length: int
    end: int

    @property
    def is_whole(self) -> bool:
        return not self.entry.passed and self.end == len(self.entry.span)


@dataclass(slots=True)
class _Session:
    """`answered_s` is when its latest decode was done, None if a prefill came after; `think_s` how long it is usually
    away between two decodes.
    """

    client: PeerId
    priority: Priority
    span: Span
    answered_s: float | None = None
    think_s: float = inf
    line: deque[int] = field(default_factory=deque)
    """Tickets of what it has here, in order: the first is done before the second begins."""


class Scheduler:
    """Of one executor, which runs one batch at a time: `take`, and `done` before the next `take`.

    Tickets name pieces and chores, and rise in the order of arrival.
    """

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self._pace = _ForwardPace(policy)
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
        self._note_return(of, lane, now_s)
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
        until_s = max((answered_s for answered_s, _ in self._expected()), default=-inf) + self._patience_s
        if until_s <= now_s or (not self._is_decodes_turn and _go_apart(self._next_prefills(now_s))):
            return None
        return until_s

    def take(self, now_s: float) -> Batch:
        """The next batch. Empty only if there is nothing here."""
        for answered_s, session in self._expected():
            if answered_s == self._done_s and answered_s + self._patience_s <= now_s:
                session.think_s = _MISSED * self._patience_s
        ready = [entry for entry in self._entries.values() if self._is_ready(entry)]
        chores = [entry.ticket for entry in ready if entry.lane is None]
        decodes = self._choose_decodes([entry for entry in ready if entry.lane and entry.lane.is_decode], now_s)
        prefills = self._next_prefills(now_s)
        if decodes and prefills:
            if self._is_decodes_turn or self._mixed_batches >= _MIXED_BATCHES:
                prefills = []
            elif _go_apart(prefills):
                decodes = []
        return Batch(chores, [self._give(each, now_s) for each in decodes + prefills])

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
                decodes += 1
                self._sessions[entry.sessions[0]].answered_s = now_s
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

    def _is_ready(self, entry: _Entry) -> bool:
        return all(self._sessions[session].line[0] == entry.ticket for session in entry.sessions)

    def _note_return(self, session: _Session, lane: _Lane, now_s: float) -> None:
        if not lane.is_decode:
            session.answered_s, session.think_s = None, inf
        elif session.answered_s is not None:
            thought_s = min(now_s - session.answered_s, _PAUSE * self._patience_s)
            before_s = thought_s if session.think_s == inf else session.think_s
            session.think_s = _THINK_KEEPS * before_s + (1 - _THINK_KEEPS) * thought_s

    @property
    def _patience_s(self) -> float:
        return self._policy.gather_share * self._pace.decode_s

    def _expected(self) -> list[tuple[float, _Session]]:
        """Who is likely to come back soon after it was answered, and when that was."""
        return [
            (each.answered_s, each)
            for each in self._sessions.values()
            if each.answered_s is not None and not each.line and each.think_s <= _HOPE * self._patience_s
        ]

    def _is_decoding(self, now_s: float) -> bool:
        """Whether somebody may want a decode soon."""
        return any(
            each.answered_s is not None and now_s - each.answered_s < self._policy.decoding_s
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

    def _choose_decodes(self, ready: Sequence[_Entry], now_s: float) -> list[_Given]:
        """As many positions as there is room for."""
        chosen = []
        room = self._policy.decodes
        for _, entry in self._in_turn(ready, now_s):
            if not room:
                break
            chosen.append(_Given(entry, min(entry.left, room), len(entry.span)))
            room -= chosen[-1].length
        return chosen

    def _next_prefills(self, now_s: float) -> list[_Given]:
        """As many positions as there is time for, through all blocks; or more of them through the same few blocks, of
        whoever is next, and of others of no lower rank as far as positions get cheaper by that.
        """
        pieces = [entry for entry in self._entries.values() if entry.lane and self._is_ready(entry)]
        ready = [entry for entry in pieces if entry.lane and not entry.lane.is_decode]
        beside_decodes = len(ready) < len(pieces) or self._is_decoding(now_s)
        in_turn = self._in_turn(ready, now_s)
        rank, next_up = next(in_turn, (0, None))
        if next_up is None:
            return []
        blocks, ahead = len(next_up.span), next_up.ahead
        room = self._pace.room(beside_decodes=beside_decodes)
        waiting = sum(entry.left for entry in ready if entry.ahead == ahead)
        most = next_up.chunk or self._few_blocks(waiting, blocks, room, beside_decodes=beside_decodes)
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
        return [_Given(entry, length, entry.passed + further) for entry, length in chosen]

    def _few_blocks(self, waiting: int, blocks: int, room: int | None, *, beside_decodes: bool) -> int:
        """How many new positions, of those that wait, go through a few blocks at a time. 0 if all blocks at once are as
        good: there is time for enough of them, or for too few either way.
        """
        policy = self._policy
        enough = min(waiting, policy.fast_prefill)
        least, most = policy.fast_prefill // 2, policy.most_prefill
        if not beside_decodes:  # who comes to decode meanwhile should not wait for long, so often
            least, most = policy.fast_prefill, policy.fast_prefill
        return 0 if room is None or room // blocks >= enough or room < least else min(room, most)

    def _of_all_blocks(self, in_turn: Iterable[tuple[int, _Entry]], most: int, room: int) -> list[_Given]:
        chosen = []
        for _, entry in in_turn:
            length = 0 if entry.passed else min(entry.left, most, room // len(entry.span))
            if length:
                chosen.append(_Given(entry, length, len(entry.span)))
                most -= length
                room -= length * len(entry.span)
        return chosen

    def _give(self, given: _Given, now_s: float) -> Part:
        """Who has waited for long has all of its turn: until positions of it are computed."""
        entry, length, end = given
        assert entry.lane is not None
        self._given[entry.lane.client] += length * (end - entry.passed)
        is_through = end == len(entry.span)
        if is_through:
            self._since_s[entry.lane] = now_s
        return Part(entry.ticket, entry.given, length, entry.passed, end, is_through)


class _ForwardPace:
    """How long forwards take here, and so how many positions of prefills one may have."""

    def __init__(self, policy: BatchPolicy) -> None:
        self._policy = policy
        self.decode_s = 0.0
        """A forward of decodes alone; 0 until there was one."""
        self._position_s = 0.0  # what each position of a prefill adds, a block

    def note(self, decodes: int, prefill: int, through: float, took_s: float) -> None:
        """`prefill` are positions by blocks, which went through this share of them all."""
        if not prefill:
            self.decode_s = _mixed(self.decode_s, took_s)
        else:
            added_s = max(took_s - through * self.decode_s, took_s / (100 if decodes else 2))
            self._position_s = _mixed(self._position_s, added_s / prefill)

    def blocks(self, positions: int, of: int, room: int) -> int:
        """Through how many of so many blocks there is time for positions: each block's weights are read, too."""
        weights = int(self.decode_s / of / self._position_s) if self._position_s else 0
        return room // (positions + weights)

    def room(self, *, beside_decodes: bool) -> int | None:
        """Positions that there is time for, each through one block. None if that is not known yet."""
        policy = self._policy
        if not self._position_s or (beside_decodes and not self.decode_s):
            return None
        may_add_s = (policy.stretch - 1) * self.decode_s if beside_decodes else policy.prefill_s
        return int(may_add_s / self._position_s)


def _go_apart(prefills: Sequence[_Given]) -> bool:
    """Or in one forward with decodes."""
    return any(not each.is_whole for each in prefills)


def _mixed(before_s: float, took_s: float) -> float:
    return _PACE_KEEPS * before_s + (1 - _PACE_KEEPS) * took_s if before_s else took_s
