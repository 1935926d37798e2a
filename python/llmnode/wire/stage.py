"""A stage: the serving side of one session, as a state machine without clock, socket or tensor.

Frames go in, actions come out. Its driver computes when an action says so, and reports the answer with `computed`. The
rules are those of a session's epochs. Only the client raises the epoch, and only a TRUNCATE or FORK frame may change
positions that are in the KV. So a late or repeated step can neither erase nor extend good state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from llmnode import _native
from llmnode.core.ids import Epoch, Step
from llmnode.core.operations import Fork, Truncate
from llmnode.errors import LocalProtocolError, PeerRefused
from llmnode.wire.frame import FrameType
from llmnode.wire.messages import RefusalCode

if TYPE_CHECKING:
    from collections.abc import Collection

    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Control
    from llmnode.wire.frame import Frame


@dataclass(frozen=True, slots=True)
class Compute:
    """Run the blocks on this step's positions, then call `Stage.computed`."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Do:
    """Have the worker do the operation, then send an answer of type `answer`. The stage is in its new state already."""

    frame: Frame
    operation: Control
    answer: FrameType


@dataclass(frozen=True, slots=True)
class Copy:
    """Make this session a copy of `source`: have the worker do the operation, then call `Stage.copied`, and answer.

    If the two share all positions already, there is nothing to copy: then the operation is a `Truncate`.
    """

    frame: Frame
    source: SessionId
    operation: Fork | Truncate


@dataclass(frozen=True, slots=True)
class Repeat:
    """Send this frame: the answer that the same step got before."""

    frame: Frame


@dataclass(frozen=True, slots=True)
class Refuse:
    """Refuse this frame; the stage's state is as before."""

    frame: Frame
    code: RefusalCode
    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do now: the frame is held until its turn, is being computed, or is of an epoch that is over."""


Content: TypeAlias = tuple[int, int, bytes]
"""The content of a step: its positions and the digest of their hidden states."""

Action: TypeAlias = Compute | Do | Copy | Repeat | Refuse | Wait


@dataclass(slots=True)
class Stage:
    """State of one session on one server. `position` is the number of positions in its KV."""

    session: SessionId
    max_length: int
    steps_ahead: int
    epoch: Epoch = Epoch(0)
    position: int = 0
    _due: Step = Step(0)
    _computing: Frame | None = None
    _answered: tuple[Step, Content, Frame] | None = None  # the last step, what it asked for, its answer
    _held: dict[tuple[Epoch, Step], Frame] = field(default_factory=dict)

    def check(self, frame: Frame) -> None:
        """Raises PeerRefused for a STEP beyond the session's maximum. To be called before the frame waits anywhere.

        So the KV that was asked for bounds what waits, too.
        """
        end = frame.start + frame.length
        if end > self.max_length:
            reason = f"position {end} is beyond the session's maximum of {self.max_length}"
            raise PeerRefused(RefusalCode.NO_ROOM, reason)

    @property
    def held(self) -> Collection[Frame]:
        """The frames that wait for their turn."""
        return self._held.values()

    @property
    def held_bytes(self) -> int:
        return sum(frame.size_bytes for frame in self.held) if self._held else 0

    @property
    def answered_bytes(self) -> int:
        """The size of the payload of the last answer, which is kept."""
        return len(self._answered[2].payload) if self._answered is not None else 0

    def receive(self, frame: Frame) -> Action:
        """Decide about a TRUNCATE frame of this session, or a STEP that has passed `check`."""
        if frame.epoch < self.epoch:
            return Wait()  # a late frame of an epoch that is over
        if frame.type is FrameType.TRUNCATE:
            return self._truncate(frame)
        if frame.epoch > self.epoch or frame.step > self._due:
            return self._hold(frame)
        if frame.step < self._due:
            return self._repeat(frame)
        if self._computing is not None:
            return _wait_if_same(frame, self._computing)
        return self._start(frame)

    def fork(self, frame: Frame, source: Stage | None, shared: int) -> Action:
        """Decide about a FORK frame of this session. `source` is None for a session that its client may not copy."""
        if self._computing is not None:
            raise LocalProtocolError("fork a stage only between steps")
        if frame.epoch < self.epoch:
            return Wait()
        if (reason := self._why_no_copy(frame, source, shared)) is not None:
            return Refuse(frame, *reason)
        assert source is not None
        self._computing = frame  # so it is no source for others till then
        if shared < frame.start:
            return Copy(frame, source.session, Fork(self.session, source.session, shared, frame.start))
        return Copy(frame, source.session, Truncate(self.session, frame.start))

    def copied(self) -> None:
        """The operation of a `Copy` is done."""
        self._begin_epoch(self._take_computing())

    def computed(self, answer: Frame, input_digest: bytes) -> None:
        """The step handed out by `Compute` is in the KV. `input_digest` is of its payload."""
        frame = self._take_computing()
        self.position += frame.length
        self._due = Step(frame.step + 1)
        self._answered = (frame.step, (frame.start, frame.length, input_digest), answer)

    def failed(self) -> None:
        """The step handed out by `Compute`, or the fork by `Copy`, changed nothing: it may be sent again."""
        self._take_computing()

    def next_held(self) -> Action:
        """The action for a frame that came ahead of its turn; `Wait` if none is due. Call after each action."""
        frame = self._held.pop((self.epoch, self._due), None)
        return Wait() if frame is None else self.receive(frame)

    def _start(self, frame: Frame) -> Action:
        if frame.start != self.position:
            return Refuse(
                frame,
                RefusalCode.WRONG_POSITION,
                f"step {frame.step} starts at {frame.start}, the KV at {self.position}",
            )
        self._computing = frame
        return Compute(frame)

    def _repeat(self, frame: Frame) -> Action:
        if self._answered is None or self._answered[0] != frame.step:
            return Wait()  # pushed late, and given by the client meanwhile: a refusal would be taken for an answer
        _, content, answer = self._answered
        return Repeat(answer) if _content(frame) == content else _conflict(frame)

    def _hold(self, frame: Frame) -> Action:
        key = (frame.epoch, frame.step)
        known = self._held.get(key)
        if known is not None:
            return _wait_if_same(frame, known)
        self._held[key] = frame
        if len(self._held) <= self.steps_ahead:
            return Wait()
        # Those nearest to their turn stay: else a peer that may push steps could take all places for epochs to come.
        last = self._held.pop(max(self._held))
        return Refuse(last, RefusalCode.TOO_FAR_AHEAD, f"{self._due} is due, {len(self._held)} wait")

    def _truncate(self, frame: Frame) -> Action:
        if self._computing is not None:
            raise LocalProtocolError("truncate a stage only between steps")
        if frame.epoch == self.epoch:
            return Refuse(frame, RefusalCode.STALE_EPOCH, f"a truncation needs an epoch above {self.epoch}")
        if frame.start > self.position:
            return Refuse(
                frame, RefusalCode.WRONG_POSITION, f"cannot keep {frame.start} positions, there are {self.position}"
            )
        self._begin_epoch(frame)
        return Do(frame, Truncate(self.session, frame.start), FrameType.TRUNCATED)

    def _why_no_copy(self, frame: Frame, source: Stage | None, shared: int) -> tuple[RefusalCode, str] | None:
        if frame.epoch == self.epoch:
            return RefusalCode.STALE_EPOCH, f"a fork needs an epoch above {self.epoch}"
        if source is None:
            return RefusalCode.UNKNOWN_SESSION, "no session to be copied is open over this link"
        if source is self:
            return RefusalCode.CONFLICT, "a session is no copy of itself"
        if source._computing is not None:
            return RefusalCode.BUSY, "the session to be copied is being computed"
        if frame.start > self.max_length:
            return RefusalCode.NO_ROOM, f"{frame.start} positions are beyond the session's maximum of {self.max_length}"
        if frame.start > source.position:
            return RefusalCode.WRONG_POSITION, f"cannot copy {frame.start} positions, there are {source.position}"
        if shared > min(frame.start, self.position):
            return RefusalCode.WRONG_POSITION, f"{shared} positions are not shared: {self.position} are here"
        return None

    def _begin_epoch(self, frame: Frame) -> None:
        self.epoch = frame.epoch
        self.position = frame.start
        self._due = frame.step
        self._answered = None
        self._held = {key: held for key, held in self._held.items() if key >= (frame.epoch, frame.step)}

    def _take_computing(self) -> Frame:
        if self._computing is None:
            raise LocalProtocolError("no step of this stage is being computed")
        frame, self._computing = self._computing, None
        return frame


def _content(frame: Frame) -> Content:
    return frame.start, frame.length, _native.blake3_digest(frame.payload)


def _wait_if_same(frame: Frame, known: Frame) -> Action:
    return Wait() if _content(frame) == _content(known) else _conflict(frame)


def _conflict(frame: Frame) -> Refuse:
    return Refuse(frame, RefusalCode.CONFLICT, f"step {frame.step} came before with other content")
