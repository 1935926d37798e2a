"""A scheduler, driven as a worker does, whose forwards take the time that a model of their cost says."""

from __future__ import annotations

from dataclasses import dataclass, field

from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Fork, Forward, Open, Truncate
from llmnode.core.policy import BatchPolicy
from llmnode.core.priority import Priority
from llmnode.core.serving.scheduling import Batch, Scheduler
from llmnode.core.span import Span

POLICY = BatchPolicy()
PREFILL = 512
START = 7
FORWARD_S, POSITION_S = 0.050, 0.003


def name(session: int) -> SessionId:
    return SessionId(session.to_bytes(16, "big"))


def client(number: int) -> PeerId:
    return PeerId(f"client {number}")


def seconds(batch: Batch, lengths: dict[int, int], spans: dict[int, Span], blocks: int) -> float:
    """The time that a forward takes here, by the span of each ticket's session; the longest has `blocks`."""
    decodes = [ticket for ticket in batch.slices if lengths[ticket] <= POLICY.decode_positions]
    passed = [(part.length, len(part.blocks(spans[ticket]))) for ticket, part in batch.slices.items()]
    share = max((each for _, each in passed), default=blocks) / blocks
    through = sum(length * each for length, each in passed) / blocks
    return share * FORWARD_S + FORWARD_S / 10 * max(0, len(decodes) - 1) + POSITION_S * (through - len(decodes))


@dataclass
class Shop:
    """A scheduler, and what has come of all that it was asked for."""

    scheduler: Scheduler = field(default_factory=lambda: Scheduler(POLICY))
    blocks: int = 1
    now_s: float = 0.0
    owners: dict[int, int] = field(default_factory=dict)
    lengths: dict[int, int] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    spans: dict[int, Span] = field(default_factory=dict)
    through: dict[int, Span] = field(default_factory=dict)
    half_way: dict[int, tuple[int, int]] = field(default_factory=dict)
    """How many positions have been through how many blocks."""
    ended: list[int] = field(default_factory=list)

    def open(self, session: int, of: int, priority: Priority = Priority.INTERACTIVE, span: Span | None = None) -> None:
        self.spans[session] = span or Span(0, self.blocks)
        self.scheduler.admit(Open(name(session), self.spans[session], 0, client(of), priority))
        self.owners[session] = of

    def ask(self, session: int, length: int, at_s: float | None = None) -> int:
        forward = Forward(name(session), START, length, bytes(each % 256 for each in range(length)))
        ticket = self.scheduler.add(forward, self.now_s if at_s is None else at_s)
        self.through[ticket] = self.spans[session]
        self.lengths[ticket] = length
        self.computed[ticket] = 0
        return ticket

    def control(self, session: int, *others: int) -> int:
        (source,) = others or (None,)
        truncate = Truncate(name(session), 0)
        operation = truncate if source is None else Fork(name(session), name(source), 0, 0)
        return self.scheduler.add(operation, self.now_s)

    def run(self) -> Batch:
        """The next batch, at once."""
        batch = self.scheduler.take(self.now_s)
        took_s = seconds(batch, self.lengths, self.through, self.blocks)
        self.now_s += took_s
        self.scheduler.done(batch, took_s, self.now_s)
        for ticket in batch.operations:
            self._end(ticket)
        for ticket, part in batch.slices.items():
            start = self.computed[ticket]
            assert part.start == START + start
            assert (part.length, part.first) == self.half_way.pop(ticket, (part.length, 0))
            assert bytes(part.hidden) == (b"" if part.first else bytes((start + i) % 256 for i in range(part.length)))
            if part.end is not None:
                assert 0 <= part.first < part.end < len(self.through[ticket])
                self.half_way[ticket] = (part.length, part.end)
                continue
            assert 0 <= part.first < len(self.through[ticket])
            self.computed[ticket] += part.length
            if self.computed[ticket] == self.lengths[ticket]:
                self._end(ticket)
        return batch

    def finish(self, ticket: int) -> None:
        while ticket not in self.ended:
            self.run()

    def _end(self, ticket: int) -> None:
        self.ended.append(ticket)
        self.scheduler.remove(ticket)


def shop_of(blocks: int, sessions: int) -> Shop:
    """Where it is known how long forwards take; each session is of a client of its own."""
    shop = Shop(blocks=blocks)
    for session in range(sessions):
        shop.open(session, session)
    for length in (1, 1, 64):
        shop.finish(shop.ask(length > 1, length))
    return shop
