"""Sequences of frames as a hostile client sends them: mostly what an honest one would, in any order, and mutated.

A sequence knows roughly where its sessions stand, so that most frames get past the first check. It knows neither clock
nor server.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from llmnode.core.ids import NO_SESSION, SESSION_ID_BYTES, Epoch, SessionId, Step
from llmnode.core.priority import Priority
from llmnode.testing import EXACT_MODEL, exact_input
from llmnode.wire.adapter_messages import AdapterPart, AdapterUse
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import ForkRequest, Lease, Neighbours, OpenRequest, Replay, pack
from llmnode.wire.pass_messages import Pass
from llmnode.wire.payload import Codec, encode_hidden
from llmnode.wire.profile import profile_fields
from llmnode.wire.push_messages import Pushed, PushLimit
from simulation.adapters import drawn_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.core.ids import PeerId
    from simulation.swarm_frames import SwarmFrames

LENGTHS = (4, 16, 32)
EDGES = (0, 1, 2, 5, 16, 2**31, 2**32 - 1)
FRAMES = (3, 16)
COPYING = 0.2
"""The share of sequences that begin with a copy of a session."""
MUTATED = 0.2
FROM_NEIGHBOUR = {False: 0.05, True: 0.6}
"""The share of a session's steps that its neighbour pushes, which it does more often where it is expected to."""
ADAPTERS = [
    *(drawn_adapter(random.Random(seed), blocks) for seed, blocks in enumerate([range(EXACT_MODEL.blocks), (1, 4)])),
    drawn_adapter(random.Random(2), range(EXACT_MODEL.blocks + 2)),
]
"""The last one is for a model of more blocks."""
WANTED_BYTES = (0, 0, 1, 300, 10_000, 2**62)


@dataclass(slots=True)
class _Session:
    """A session as its client takes it to stand."""

    name: SessionId
    codec: Codec
    max_length: int
    epoch: int = 0
    step: int = 0
    position: int = 0
    is_pushed_to: bool = False


@dataclass(slots=True)
class Sequence:
    """The frames of one sequence. Each comes with whether the neighbour sends it, which may push to some sessions."""

    rng: random.Random
    neighbour: PeerId
    receiver: PeerId
    swarm: SwarmFrames
    sessions: list[_Session] = field(default_factory=list)
    _opened: Frame | None = None
    """The first OPEN."""
    _copied: _Session | None = None
    """The source of the latest FORK, if that was the latest frame."""

    def frames(self) -> Iterator[tuple[bool, Frame]]:
        rng, makers = self.rng, self._makers()
        kinds, weights = [maker for maker, _ in makers], [weight for _, weight in makers]
        self._opened = self._open()
        yield False, self._opened
        if rng.random() < 0.5:
            yield False, self._neighbours(self.sessions[0])
            yield True, self._want(self.sessions[0])
        if rng.random() < COPYING:
            yield from self._copying()
        for _ in range(rng.randint(*FRAMES)):
            session = rng.choice(self.sessions)
            frame = rng.choices(kinds, weights)[0](session)
            if rng.random() < MUTATED:
                frame = self._mutated(frame)
            share = {FrameType.STEP: FROM_NEIGHBOUR[session.is_pushed_to], FrameType.WANT: 0.9}.get(frame.type, 0.01)
            pushes = rng.random() < share
            if pushes and frame.type is FrameType.STEP and rng.random() < 0.5:
                frame = replace(frame, meta=pack(Pushed(bytes(32), bytes(64))))
            yield pushes, frame
            if rng.random() < 0.1:
                yield pushes, replace(frame)
            yield from self._after_a_copy()

    def _copying(self) -> Iterator[tuple[bool, Frame]]:
        """A copy of the first session, which both have to grow for."""
        source = self.sessions[0]
        copy = replace(source, name=self._name())
        self.sessions.append(copy)
        assert self._opened is not None
        yield False, replace(self._opened, session=copy.name)
        for _ in range(self.rng.randint(1, 4)):
            yield False, self._step(source)
        yield False, self._fork(copy, source)
        yield from self._after_a_copy()

    def _after_a_copy(self) -> Iterator[tuple[bool, Frame]]:
        """The source of a copy may end or go back while that is made."""
        source, self._copied = self._copied, None
        if source is not None and self.rng.random() < 0.3:
            yield False, self.rng.choice((self._close, self._truncate))(source)

    def _makers(self) -> list[tuple[Callable[[_Session], Frame], int]]:
        return [
            (lambda _: self._open(), 3),
            (self._step, 12),
            (self._truncate, 3),
            (self._fork, 4),
            (self._replay, 3),
            (self._neighbours, 5),
            (self._lease, 1),
            (self._resume, 2),
            (self._close, 1),
            (self._want, 4),
            (self._evaluate, 2),
            (self._backward, 2),
            (self._adapter, 1),
            (self._part, 2),
            (lambda _: Frame(FrameType.DESCRIBE), 1),
            (lambda _: self.swarm.view(), 1),
            (lambda _: self.swarm.news(), 2),
            (lambda _: self.swarm.probe(), 1),
            (lambda session: self.swarm.grant(self._frame(FrameType.GRANT, session)), 1),
        ]

    def _name(self) -> SessionId:
        return SessionId(self.rng.randbytes(SESSION_ID_BYTES))

    def _open(self) -> Frame:
        rng = self.rng
        codec = self.sessions[0].codec if self.sessions and rng.random() < 0.9 else rng.choice(list(Codec))
        session = _Session(self._name(), codec, rng.choice(LENGTHS))
        self.sessions.append(session)
        message = OpenRequest(
            **self._adapted(profile_fields(EXACT_MODEL.profile)),
            span_start=rng.choice((0,) * 9 + (2,)),
            span_end=rng.choice((EXACT_MODEL.blocks,) * 8 + (3, 3, EXACT_MODEL.blocks + 1)),
            max_length=session.max_length,
            codec=session.codec,
            priority=Priority.INTERACTIVE.word,
            keep_outputs=rng.random() < 0.9,
        )
        return Frame(FrameType.OPEN, session.name, meta=pack(message))

    def _step(self, session: _Session) -> Frame:
        length = self.rng.choice((1, 1, 1, 2, 5))
        payload = bytes(encode_hidden(exact_input(self.rng, length), session.codec))
        frame = self._frame(FrameType.STEP, session, session.position, length, payload=payload)
        session.step, session.position = session.step + 1, session.position + length
        return frame

    def _truncate(self, session: _Session) -> Frame:
        session.epoch += self.rng.choice((1, 1, 1, 0, 2))
        session.position = self.rng.randint(0, session.position)
        return self._frame(FrameType.TRUNCATE, session, session.position)

    def _fork(self, session: _Session, source: _Session | None = None) -> Frame:
        source = source or self.rng.choice(self.sessions)
        self._copied = source
        session.epoch += 1
        session.position = min(self.rng.choice((source.position, session.position)), session.max_length)
        shared = self.rng.choice((0, 0, 1, session.position))
        return self._frame(FrameType.FORK, session, session.position, meta=pack(ForkRequest(source.name, shared)))

    def _replay(self, session: _Session) -> Frame:
        start = self.rng.randint(0, session.position)
        length = self.rng.choice((1, session.position - start, session.position))
        return self._frame(FrameType.REPLAY, session, start, length, meta=pack(Replay(self.rng.random() < 0.5)))

    def _neighbours(self, session: _Session) -> Frame:
        rng, nobody = self.rng, type(self.neighbour)("")
        sender, receiver = rng.choice((self.neighbour, self.neighbour, nobody)), rng.choice((self.receiver, nobody))
        if rng.random() < 0.1:
            receiver = self.neighbour
        session.is_pushed_to = sender == self.neighbour
        name = rng.choice((NO_SESSION, rng.choice(self.sessions).name))
        meta = pack(Neighbours(sender, receiver, name, quiet=rng.random() < 0.3, again=rng.random() < 0.1))
        return self._frame(FrameType.NEIGHBOURS, session, meta=meta)

    def _lease(self, session: _Session) -> Frame:
        meta = pack(Lease(self.rng.choice((0, 1, 500)), leaves=self.rng.random() < 0.2))
        return self._frame(FrameType.LEASE, session, meta=meta)

    def _resume(self, session: _Session) -> Frame:
        return self._frame(FrameType.RESUME, session)

    def _close(self, session: _Session) -> Frame:
        if len(self.sessions) > 1 and self.rng.random() < 0.8:
            self.sessions.remove(session)
        return self._frame(FrameType.CLOSE, session)

    def _want(self, session: _Session) -> Frame:
        meta = pack(PushLimit(self.rng.choice(WANTED_BYTES)))
        return replace(self._frame(FrameType.WANT, session, meta=meta), step=Step(self.rng.choice((1, 1, 1, 2))))

    def _evaluate(self, session: _Session) -> Frame:
        return self._pass(FrameType.EVALUATE, session, 1)

    def _backward(self, session: _Session) -> Frame:
        return self._pass(FrameType.BACKWARD, session, 2)

    def _pass(self, kind: FrameType, session: _Session, halves: int) -> Frame:
        """It belongs to no session."""
        rng = self.rng
        lengths = [rng.choice((1, 2, 5)) for _ in range(rng.choice((1, 1, 3)))]
        message = Pass(
            **self._adapted(profile_fields(EXACT_MODEL.profile)),
            span_start=rng.choice((0, 0, 0, 2)),
            span_end=rng.choice((EXACT_MODEL.blocks,) * 3 + (3, 2)),
            codec=session.codec,
            priority=Priority.TRAINING.word,
            lengths=lengths,
        )
        numbers = [exact_input(rng, sum(lengths)) for _ in range(halves)]
        payload = b"".join(bytes(encode_hidden(each, session.codec)) for each in numbers)
        if rng.random() < 0.3:
            rows, positions = rng.choice((1, 1, len(lengths), 2)), rng.choice((1, 1, min(lengths), 3))
            message = replace(message, extensions={"prompts": [rows, positions]}, required=["prompts"])
            payload += exact_input(rng, max(0, message.span_end - message.span_start) * rows * positions)
        return Frame(kind, NO_SESSION, step=Step(rng.randrange(2**16)), meta=pack(message), payload=payload)

    def _adapter(self, _session: _Session) -> Frame:
        rng, adapter = self.rng, self.rng.choice(ADAPTERS)
        meta = pack(AdapterUse(adapter.digest, rng.choice((0, 0, 2)), rng.choice((EXACT_MODEL.blocks, 3, 2))))
        payload = adapter.manifest.packed
        return Frame(FrameType.ADAPTER, NO_SESSION, step=Step(rng.randrange(2**16)), meta=meta, payload=payload)

    def _part(self, _session: _Session) -> Frame:
        rng, adapter = self.rng, self.rng.choice(ADAPTERS)
        block, part = rng.choice(list(adapter.parts.items()))
        meta = pack(AdapterPart(adapter.digest, block))
        return Frame(FrameType.PART, NO_SESSION, step=Step(rng.randrange(2**16)), meta=meta, payload=part)

    def _adapted(self, profile: dict[str, Any]) -> dict[str, Any]:
        """With an adapter, now and then."""
        return {**profile, "adapter": self.rng.choice(ADAPTERS).digest} if self.rng.random() < 0.2 else profile

    def _frame(
        self,
        kind: FrameType,
        session: _Session,
        start: int = 0,
        length: int = 0,
        meta: bytes = b"",
        payload: bytes = b"",
    ) -> Frame:
        return Frame(kind, session.name, Epoch(session.epoch), Step(session.step), start, length, meta, payload)

    def _mutated(self, frame: Frame) -> Frame:
        rng = self.rng
        match rng.randrange(8):
            case 0:
                return replace(frame, type=rng.choice([kind for kind in FrameType if kind is not FrameType.PIECE]))
            case 1:
                return replace(frame, epoch=Epoch(self._near(frame.epoch)))
            case 2:
                return replace(frame, step=Step(self._near(frame.step)))
            case 3:
                return replace(frame, start=self._near(frame.start))
            case 4:
                return replace(frame, length=self._near(frame.length))
            case 5:
                return replace(frame, payload=self._spoilt(bytes(frame.payload)))
            case 6:
                return replace(frame, meta=self._spoilt(bytes(frame.meta)))
            case _:
                return replace(frame, session=rng.choice([NO_SESSION, *(each.name for each in self.sessions)]))

    def _near(self, number: int) -> int:
        return self.rng.choice((max(0, number - 1), min(2**32 - 1, number + 1), *EDGES))

    def _spoilt(self, content: bytes) -> bytes:
        rng, at = self.rng, self.rng.randint(0, len(content))
        changed = content[:at] + b"\xff" + content[at + 1 :]
        return rng.choice((content[:at], content + b"\0", rng.randbytes(len(content)), changed))
