"""A stage of a server, driven as a server does, with a KV of plain bytes."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llmnode._native import blake3_digest
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.operations import Fork, Truncate
from llmnode.errors import PeerRefused
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.stage import Action, Compute, Copy, Do, Refuse, Repeat, Stage, Wait

SESSION = SessionId(b"s" * 16)
MAX_LENGTH = 12
STEPS_AHEAD = 3


def step(number: int, start: int, tokens: bytes, epoch: int = 0) -> Frame:
    """A STEP whose hidden states are one byte a token."""
    return Frame(FrameType.STEP, SESSION, Epoch(epoch), Step(number), start, len(tokens), payload=tokens)


def truncate(keep: int, epoch: int, next_step: int) -> Frame:
    return Frame(FrameType.TRUNCATE, SESSION, Epoch(epoch), Step(next_step), start=keep)


def fork(keep: int, epoch: int, next_step: int) -> Frame:
    return Frame(FrameType.FORK, SESSION, Epoch(epoch), Step(next_step), start=keep)


def new_stage(max_length: int = MAX_LENGTH) -> Stage:
    return Stage(SESSION, max_length, STEPS_AHEAD)


@dataclass
class Server:
    """Drives a stage as a server does, with a KV of plain bytes. `computing` is set from a Compute to its end."""

    stage: Stage = field(default_factory=new_stage)
    kv: list[int] = field(default_factory=list)
    answers: list[Frame] = field(default_factory=list)
    """All answers except refusals."""
    computing: Frame | None = None
    forwards: int = 0

    def receive(self, frame: Frame) -> Action:
        """Do the action for `frame`, and return it. A Compute is only begun."""
        if frame.type is FrameType.STEP:
            try:
                self.stage.check(frame)
            except PeerRefused as error:
                return Refuse(frame, RefusalCode(error.code), error.reason)
        action = self.stage.receive(frame)
        self._act(action)
        return action

    def next_held(self) -> Action:
        action = self.stage.next_held()
        self._act(action)
        return action

    def fork(self, frame: Frame, source: Server | None, shared: int = 0, *, good: bool = True) -> Action:
        """Become a copy of `source` (or fail to, if `good` is False), and do what follows."""
        first = action = self.receive_fork(frame, source, shared, good=good)
        while not isinstance(action, Wait):
            if isinstance(action, Compute):
                self.finish()
            action = self.next_held()
        return first

    def receive_fork(self, frame: Frame, source: Server | None, shared: int, *, good: bool = True) -> Action:
        action = self.stage.fork(frame, source.stage if source else None, shared)
        match action:
            case Copy() if good:
                assert source is not None
                self._copy(action, source)
                self.stage.copied()
            case Copy():
                self.stage.failed()
        return action

    def _copy(self, action: Copy, source: Server) -> None:
        match action.operation:
            case Fork(session, of, shared, length):
                assert (session, of) == (self.stage.session, source.stage.session)
                self.kv[shared:] = source.kv[shared:length]
            case Truncate(session, length):
                assert session == self.stage.session
                del self.kv[length:]

    def finish(self, good: bool = True) -> Frame | None:
        frame, self.computing = self.computing, None
        assert frame is not None
        if not good:
            self.stage.failed()
            return None
        self.kv += bytes(frame.payload)
        self.forwards += 1
        answer = replace(frame, type=FrameType.RESULT, payload=b"answer %d" % self.forwards)
        self.stage.computed(answer, blake3_digest(frame.payload))
        self.answers.append(answer)
        return answer

    def serve(self, frame: Frame) -> Action:
        """`receive`, and then all actions that follow from it."""
        first = action = self.receive(frame)
        while not isinstance(action, Wait):
            if isinstance(action, Compute):
                self.finish()
            action = self.next_held()
        return first

    def _act(self, action: Action) -> None:
        match action:
            case Compute(frame):
                assert self.computing is None, "one step at a time"
                assert frame.start == len(self.kv), "a step goes to the end of the KV"
                self.computing = frame
            case Do(_, Truncate(_, keep), FrameType.TRUNCATED):
                del self.kv[keep:]
            case Repeat(frame):
                self.answers.append(frame)


def code_of(action: Action) -> RefusalCode:
    assert isinstance(action, Refuse)
    return action.code


def after(*frames: Frame) -> Server:
    """A server that has received `frames`."""
    server = Server()
    for frame in frames:
        server.serve(frame)
    return server


FIRST, SECOND, THIRD = step(0, 0, b"abc"), step(1, 3, b"d"), step(2, 4, b"e")


def other(tokens: bytes = b"vwxyz") -> Server:
    """Another session, with these tokens."""
    return after(step(0, 0, tokens))
