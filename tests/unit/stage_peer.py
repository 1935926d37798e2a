"""A server in plain Python for pair tests: `Stage`s over exact arithmetic, without clock, socket or task.

It answers frames as `node/serve` does, and may be slow, out of memory or unable to push, as it is told. An error of the
client, which no honest client makes, fails the test.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from llmnode._native import blake3_digest
from llmnode.core.ids import PeerId, SessionId
from llmnode.core.operations import Close, Open, Slice
from llmnode.core.policy import ServePolicy
from llmnode.core.span import Span
from llmnode.errors import PeerRefused
from llmnode.testing import ExactExecutor
from llmnode.wire import messages
from llmnode.wire.chunk_path import ALL_WOULD_REFUSE
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.log import PayloadLog
from llmnode.wire.messages import RefusalCode, pack, unpack
from llmnode.wire.payload import HiddenForm
from llmnode.wire.push_messages import Pushed
from llmnode.wire.stage import Compute, Copy, Do, Refuse, Repeat, Stage, Wait

if TYPE_CHECKING:
    from llmnode.core.model import ModelInfo
    from llmnode.wire.frame import Buffer
    from llmnode.wire.stage import Action

SIGNATURE = bytes(64)
POLICY = ServePolicy()
QUEUED = 4 * POLICY.steps_ahead
"""Frames of one session that may wait."""
RETRY_AFTER_S = 3.0
STEPS_AHEAD = POLICY.steps_ahead
WRONGED = {RefusalCode.CONFLICT, RefusalCode.TOO_FAR_AHEAD}
"""The refusals of a client's own steps after others have pushed wrong ones."""


class Wires(Protocol):
    """The connections of a peer, and what befalls it."""

    def wire(self, sender: PeerId, receiver: PeerId) -> int | None:
        """The number of the connection, which is another one after each loss. None if they do not reach each other."""

    def carry(self, sender: PeerId, receiver: PeerId, frame: Frame, wire: int | None = None) -> bool:
        """Send a frame. False if the connection of that number is lost."""

    def strikes(self, fault: str) -> bool:
        """Whether this fault happens now."""


@dataclass(eq=False)
class StageSession:
    """One session, and the frames of it that wait."""

    stage: Stage
    span: Span
    client: PeerId
    outputs: PayloadLog | None
    frames: deque[Frame] = field(default_factory=deque)
    computing: Frame | None = None
    sender: PeerId | None = None
    receiver: tuple[PeerId, SessionId, int] | None = None
    is_quiet: bool = False
    is_leased: bool = False
    has_client: bool = True
    was_given_wrong: bool = False
    """A step that was changed on its way has come: the client's own may seem to be the wrong one."""

    @property
    def name(self) -> SessionId:
        return self.stage.session


class StagePeer:
    """One life of a server that holds all blocks of the model."""

    def __init__(self, peer: PeerId, model: ModelInfo, form: HiddenForm, wires: Wires) -> None:
        self.peer = peer
        self.sessions: dict[SessionId, StageSession] = {}
        self.executor = ExactExecutor(Span(0, model.blocks), form.hidden_size * 4, kv_tokens=1000)
        self._model = model
        self._form = form
        self._wires = wires

    def lose(self, other: PeerId) -> None:
        """The connection to `other` has ended."""
        for session in list(self.sessions.values()):
            if session.client == other:
                self._leave(session)

    def expire(self) -> None:
        """All leases are over."""
        for session in list(self.sessions.values()):
            if not session.has_client:
                self._end(session)

    def receive(self, sender: PeerId, frame: Frame) -> None:
        """A frame has come. It is done at once, or waits for its session."""
        try:
            self._receive(sender, frame)
        except PeerRefused as refusal:
            self._refuse(sender, frame, RefusalCode(refusal.code), refusal.reason)

    @property
    def busy(self) -> list[StageSession]:
        """Sessions that have something to do."""
        return [each for each in self.sessions.values() if each.frames or each.computing is not None]

    def work(self, session: StageSession) -> None:
        """End the step that is being computed, or else begin with the next frame."""
        if session.computing is not None:
            self._compute(session, session.computing)
            self._follow(session, session.stage.next_held())
            return
        frame = session.frames.popleft()
        match frame.type:
            case FrameType.CLOSE:
                self._end(session)
            case FrameType.RESUME:
                stands = messages.Resumed(session.stage.epoch, session.stage.position)
                self._answer(session, frame, FrameType.RESUMED, pack(stands))
            case FrameType.NEIGHBOURS:
                self._stand_between(session, frame)
            case FrameType.REPLAY:
                self._replay(session, frame)
            case FrameType.FORK:
                self._follow(session, self._fork(session, frame))
            case _:
                self._follow(session, session.stage.receive(frame))

    # Frames that come

    def _receive(self, sender: PeerId, frame: Frame) -> None:
        if frame.type is FrameType.OPEN:
            self._open(sender, frame)
            return
        session = self.sessions.get(frame.session)
        if session is not None and sender not in (session.client, session.sender):
            session = None
        if frame.type is FrameType.STEP and (session is None or sender != session.client):
            if session is not None:  # else it comes after the session's end
                unpack(Pushed, frame.meta or pack(Pushed(bytes(32), SIGNATURE)))
                self._submit(session, frame)
            return
        if session is None or not (session.has_client or frame.type is FrameType.RESUME):
            raise PeerRefused(RefusalCode.UNKNOWN_SESSION, "no such session is open over this link")
        match frame.type:
            case FrameType.LEASE:
                request = unpack(messages.Lease, frame.meta)
                session.is_leased = request.lease_ms > 0
                self._answer(session, frame, FrameType.LEASED, pack(messages.Leased(request.lease_ms)))
                if request.leaves:
                    self._leave(session)
            case FrameType.RESUME:
                session.has_client, session.is_leased = True, False
                self._submit(session, frame)
            case _:
                self._submit(session, frame)

    def _open(self, client: PeerId, frame: Frame) -> None:
        request = unpack(messages.OpenRequest, frame.meta)
        assert frame.step == 0
        assert frame.session not in self.sessions, "the name of a session is used once"
        assert request.span_start < request.span_end <= self._model.blocks
        span = Span(request.span_start, request.span_end)
        operation = Open(frame.session, span, request.max_length, client)
        if self._wires.strikes("no space") or not self.executor.apply(operation):
            raise PeerRefused(RefusalCode.NO_ROOM, "as told")
        stage = Stage(frame.session, request.max_length, POLICY.steps_ahead, frame.epoch)
        outputs = PayloadLog(self._form) if request.keep_outputs else None
        self.sessions[frame.session] = session = StageSession(stage, span, client, outputs)
        self._answer(session, frame, FrameType.OPENED)

    def _submit(self, session: StageSession, frame: Frame) -> None:
        if frame.type is FrameType.STEP:
            self._form.check(frame)
            session.stage.check(frame)
        assert len(session.frames) < QUEUED, "more frames than a server lets wait"
        session.frames.append(frame)

    # Actions of the stage

    def _follow(self, session: StageSession, action: Action) -> None:
        while not isinstance(action, Wait):
            if isinstance(action, Compute):
                session.computing = action.frame
                return
            self._act(session, action)
            action = session.stage.next_held()

    def _act(self, session: StageSession, action: Repeat | Copy | Do | Refuse) -> None:
        match action:
            case Do(frame, operation, answer):
                assert self.executor.apply(operation)
                if session.outputs is not None:
                    session.outputs.truncate(session.stage.position)
                self._answer(session, replace(frame, start=session.stage.position), answer)
            case Copy(frame, source, operation):
                of = self.sessions[source]
                if self._wires.strikes("no memory"):
                    session.stage.failed()
                    self._refuse(session.client, frame, RefusalCode.COMPUTE_FAILED, "as told")
                    return
                assert self.executor.apply(operation)
                if of.outputs is not None:
                    session.outputs = of.outputs.copy()
                    session.outputs.truncate(frame.start)
                session.stage.copied()
                self._answer(session, frame, FrameType.FORKED)
            case Repeat(frame):
                self._send(session, frame)
            case Refuse(frame, code, reason):
                self._refuse(session.client, frame, code, reason)

    def _compute(self, session: StageSession, frame: Frame) -> None:
        session.computing = None
        if self._wires.strikes("no memory"):
            session.stage.failed()
            self._refuse(session.client, frame, RefusalCode.COMPUTE_FAILED, "as told")
            return
        slices = [Slice(session.name, frame.start, frame.length, bytes(frame.payload))]
        (payload,) = self.executor.forward(slices)
        if session.outputs is not None:
            session.outputs.append(payload, frame.length)
        digests = blake3_digest(frame.payload), blake3_digest(payload)
        pushed = self._push(session, frame, payload, pack(Pushed(digests[0], SIGNATURE)))
        shown = unpack(Pushed, frame.meta) if frame.meta else None
        result = messages.Result(
            0, 0, *digests, SIGNATURE, pushed, shown.input_digest if shown else b"", shown.signature if shown else b""
        )
        wanted = not session.is_quiet and not (pushed and session.outputs is not None)
        answer = _about(frame, FrameType.RESULT, pack(result), payload if wanted else b"")
        session.stage.computed(answer, digests[0])
        self._send(session, answer)

    def _fork(self, session: StageSession, frame: Frame) -> Action:
        request = unpack(messages.ForkRequest, frame.meta)
        source = self.sessions.get(SessionId(request.source))
        if source is not None and source.client != session.client:
            source = None
        if source is not None:
            assert (source.span, source.outputs is None) == (session.span, session.outputs is None)
        return session.stage.fork(frame, source.stage if source is not None else None, request.shared)

    def _replay(self, session: StageSession, frame: Frame) -> None:
        request = unpack(messages.Replay, frame.meta)
        assert session.outputs is not None
        assert 1 <= frame.length <= session.outputs.positions - frame.start, "it asks for what is not logged"
        payload = session.outputs.read(frame.start, frame.length)
        pushed = request.push and self._push(session, frame, payload, b"")
        meta = pack(messages.Replayed(blake3_digest(payload), pushed))
        self._send(session, _about(frame, FrameType.REPLAYED, meta, b"" if pushed else payload))

    # Neighbours

    def _stand_between(self, session: StageSession, frame: Frame) -> None:
        request = unpack(messages.Neighbours, frame.meta)
        session.sender = PeerId(request.sender) if request.sender else None
        session.receiver, session.is_quiet = None, request.quiet
        if request.receiver:
            peer = PeerId(request.receiver)
            wire = self._wires.wire(self.peer, peer)
            if peer == self.peer or wire is None or self._wires.strikes("cannot push"):
                retry_after_s = RETRY_AFTER_S if self._wires.strikes("is dialling") else None
                self._refuse(session.client, frame, RefusalCode.CANNOT_FORWARD, "as told", retry_after_s)
                return
            session.receiver = peer, SessionId(request.receiver_session), wire
        self._answer(session, frame, FrameType.FORWARDED)

    def _push(self, session: StageSession, frame: Frame, payload: Buffer, meta: bytes) -> bool:
        if session.receiver is None:
            return False
        peer, name, wire = session.receiver
        step = replace(_about(frame, FrameType.STEP, meta, payload), session=name)
        if self._wires.carry(self.peer, peer, step, wire):
            return not self._wires.strikes("push denied")
        session.receiver = None
        return False

    # Answers

    def _answer(self, session: StageSession, frame: Frame, kind: FrameType, meta: bytes = b"") -> None:
        self._send(session, Frame(kind, frame.session, frame.epoch, frame.step, frame.start, meta=meta))

    def _send(self, session: StageSession, frame: Frame) -> None:
        if session.has_client:
            self._wires.carry(self.peer, session.client, frame)

    def _refuse(
        self, client: PeerId, frame: Frame, code: RefusalCode, reason: str, retry_after_s: float | None = None
    ) -> None:
        session = self.sessions.get(frame.session)
        is_wronged = code in WRONGED and session is not None and session.was_given_wrong
        assert is_wronged or code not in ALL_WOULD_REFUSE, f"{frame.type.name} is refused: {code}, {reason}"
        meta = pack(messages.Refusal(code, reason, int(1000 * (retry_after_s or 0))))
        refusal = Frame(FrameType.REFUSAL, frame.session, frame.epoch, frame.step, meta=meta)
        if session is None or session.has_client:
            self._wires.carry(self.peer, client, refusal)

    # Ends

    def _leave(self, session: StageSession) -> None:
        session.has_client = False
        if not session.is_leased:
            self._end(session)

    def _end(self, session: StageSession) -> None:
        assert self.executor.apply(Close(session.name))
        del self.sessions[session.name]


def _about(frame: Frame, kind: FrameType, meta: bytes, payload: Buffer) -> Frame:
    """A frame about the positions of another one."""
    return Frame(kind, frame.session, frame.epoch, frame.step, frame.start, frame.length, meta, payload)
