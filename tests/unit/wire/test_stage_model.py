"""A stage against a model that looks everything up by searching plain lists, under any frames in any order."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.stage import Action, Compute, Copy, Do, Repeat, Wait
from unit.driven_stage import MAX_LENGTH, STEPS_AHEAD, Server, code_of, fork, other, step, truncate

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = b"abcdefghij"
"""The tokens of the session that others are forked from. It is shorter than they may be."""


class Model:
    """A model of a stage: it looks everything up by searching plain lists."""

    def __init__(self) -> None:
        self.contents: list[tuple[int, int]] = []
        """(position, token) pairs that the KV must hold."""
        self.epoch = 0
        self.due = 0
        self.waiting: list[Frame] = []
        self.answered: list[tuple[Frame, Frame]] = []
        """Steps of this epoch and their answers, the oldest first. The last answer may be asked for again."""
        self.computing: Frame | None = None

    def expect(self, frame: Frame) -> type[Action] | RefusalCode:
        """The right answer of the stage to `frame`. The model then has the state that the stage must have."""
        if frame.type is FrameType.STEP and frame.start + frame.length > MAX_LENGTH:
            return RefusalCode.NO_ROOM
        if frame.epoch < self.epoch:
            return Wait
        if frame.type is FrameType.TRUNCATE:
            return self._expect_truncation(frame)
        if frame.type is FrameType.FORK:
            return self._expect_fork(frame)
        known = [other for other in self._known() if (other.epoch, other.step) == (frame.epoch, frame.step)]
        if known and not self._same(known[0], frame):
            return RefusalCode.CONFLICT
        if frame.epoch == self.epoch and frame.step < self.due:
            return Repeat if known else Wait
        if known:
            return Wait
        if frame.epoch > self.epoch or frame.step > self.due:
            self.waiting.append(frame)
            if len(self.waiting) <= STEPS_AHEAD:
                return Wait
            self.waiting.remove(max(self.waiting, key=lambda each: (each.epoch, each.step)))
            return RefusalCode.TOO_FAR_AHEAD
        if frame.start != len(self.contents):
            return RefusalCode.WRONG_POSITION
        self.computing = frame
        return Compute

    def take_due(self) -> Frame | None:
        """Remove the waiting frame whose turn it is, and return it."""
        for frame in self.waiting:
            if (frame.epoch, frame.step) == (self.epoch, self.due):
                self.waiting.remove(frame)
                return frame
        return None

    def computed(self, answer: Frame) -> None:
        frame = self.computing
        assert frame is not None
        self.contents += [(frame.start + n, token) for n, token in enumerate(bytes(frame.payload))]
        self.answered.append((frame, answer))
        self.due += 1
        self.computing = None

    def _expect_truncation(self, frame: Frame) -> type[Action] | RefusalCode:
        if frame.epoch == self.epoch:
            return RefusalCode.STALE_EPOCH
        if frame.start > len(self.contents):
            return RefusalCode.WRONG_POSITION
        self.contents = [(position, token) for position, token in self.contents if position < frame.start]
        self.epoch, self.due, self.answered = frame.epoch, frame.step, []
        self.waiting = [
            held
            for held in self.waiting
            if held.epoch > self.epoch or (held.epoch == self.epoch and held.step >= self.due)
        ]
        return Do

    def _expect_fork(self, frame: Frame) -> type[Action] | RefusalCode:
        """A fork of SOURCE. The frame's length is the number of shared positions."""
        shared = frame.length
        if frame.epoch == self.epoch:
            return RefusalCode.STALE_EPOCH
        if frame.start > MAX_LENGTH:
            return RefusalCode.NO_ROOM
        if frame.start > len(SOURCE) or shared > frame.start or shared > len(self.contents):
            return RefusalCode.WRONG_POSITION
        kept = self.contents[:shared]
        assert self._expect_truncation(replace(frame, start=0)) is Do
        self.contents = kept + [(at, SOURCE[at]) for at in range(shared, frame.start)]
        return Copy

    def _known(self) -> Iterator[Frame]:
        yield from self.waiting
        yield from (frame for frame, _ in self.answered[-1:])
        if self.computing is not None:
            yield self.computing

    @staticmethod
    def _same(one: Frame, other: Frame) -> bool:
        return (one.start, one.length, one.payload) == (other.start, other.length, other.payload)


class StageAgainstModel(RuleBasedStateMachine):
    """A correct client and an unreliable network. Then forged frames as well.

    Every frame that was ever sent stays on the network, and may be delivered again at any time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.server = Server()
        self.source = other(SOURCE)
        self.model = Model()
        self.network: list[Frame] = []
        self.epoch = 0
        self.step = 0
        self.tokens = b""

    @rule(tokens=st.binary(min_size=1, max_size=3))
    def client_sends_a_step(self, tokens: bytes) -> None:
        self.network.append(step(self.step, len(self.tokens), tokens, self.epoch))
        self.step += 1
        self.tokens += tokens

    @rule(tokens=st.binary(min_size=1, max_size=3))
    def client_sends_a_step_that_arrives_at_once(self, tokens: bytes) -> None:
        self.client_sends_a_step(tokens)
        self._deliver(self.network[-1])

    @rule(data=st.data())
    def client_rolls_back(self, data: st.DataObject) -> None:
        self.epoch = max(self.epoch, self.model.epoch) + 1  # a forged frame may have raised the model's
        # To a position that the server has reached. Forged frames truncate to others.
        keep = data.draw(st.integers(0, min(len(self.tokens), len(self.model.contents))))
        self.tokens = self.tokens[:keep]
        self.network.append(truncate(keep, self.epoch, self.step))

    @rule(data=st.data())
    def client_forks(self, data: st.DataObject) -> None:
        self.epoch = max(self.epoch, self.model.epoch) + 1
        keep = data.draw(st.integers(0, len(SOURCE)))
        differing = (at for at in range(keep) if self.model.contents[at : at + 1] != [(at, SOURCE[at])])
        self.tokens = SOURCE[:keep]
        self.network.append(replace(fork(keep, self.epoch, self.step), length=next(differing, keep)))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def network_delivers_one_of_the_last(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(self.network[-STEPS_AHEAD - 2 :])))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def network_delivers_any(self, data: st.DataObject) -> None:
        self._deliver(data.draw(st.sampled_from(self.network)))

    @precondition(lambda self: self.network)
    @rule(data=st.data())
    def network_delivers_a_forged_frame(self, data: st.DataObject) -> None:
        frame = data.draw(st.sampled_from(self.network))
        name = data.draw(st.sampled_from(["epoch", "step", "start", "payload"]))
        if name == "payload":
            payload = data.draw(st.binary(min_size=1, max_size=MAX_LENGTH + 1))
            forged = replace(frame, payload=payload, length=len(payload))
        else:
            forged = replace(frame, **{name: max(0, getattr(frame, name) + data.draw(st.integers(-3, 3)))})
        self._deliver(forged)

    @precondition(lambda self: self.model.computing is not None)
    @rule(good=st.sampled_from([True, True, True, False]))
    def server_finishes_computing(self, good: bool) -> None:
        answer = self.server.finish(good)
        if answer is None:
            self.model.computing = None
        else:
            self.model.computed(answer)
        self._drain()

    def _deliver(self, frame: Frame) -> None:
        if frame.type in (FrameType.TRUNCATE, FrameType.FORK) and self.model.computing is not None:
            self.server_finishes_computing(good=True)
            if self.model.computing is not None:  # a waiting frame has begun
                return
        if frame.type is FrameType.FORK:
            action = self.server.receive_fork(frame, self.source, frame.length)
        else:
            action = self.server.receive(frame)
        self._check(action, self.model.expect(frame))
        self._drain()

    def _drain(self) -> None:
        while self.model.computing is None:
            due = self.model.take_due()
            action = self.server.next_held()
            self._check(action, Wait if due is None else self.model.expect(due))
            if due is None:
                return
        assert self.server.next_held() == Wait()

    def _check(self, action: Action, expected: type[Action] | RefusalCode) -> None:
        if isinstance(expected, RefusalCode):
            assert code_of(action) is expected
        else:
            assert type(action) is expected
        if isinstance(action, Repeat):
            assert action.frame is self.model.answered[-1][1]

    @invariant()
    def the_kv_is_the_models(self) -> None:
        assert list(enumerate(self.server.kv)) == self.model.contents
        assert self.server.stage.position == len(self.server.kv) <= MAX_LENGTH
        assert self.server.stage.epoch == self.model.epoch
        assert self.server.computing is self.model.computing

    @invariant()
    def what_is_held_is_bounded_and_waits_for_a_turn_that_can_come(self) -> None:
        held = self.server.stage._held.values()  # only this shows what it keeps in memory
        assert list(held) == self.model.waiting
        assert len(held) <= STEPS_AHEAD
        turn = (self.model.epoch, self.model.due)
        assert all((frame.epoch, frame.step) >= turn for frame in held)


TestStageAgainstModel = StageAgainstModel.TestCase
TestStageAgainstModel.settings = settings(max_examples=250, stateful_step_count=40)
