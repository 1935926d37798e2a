"""A stage against a slow, obvious model: frames of any kind and order leave the KV as the client meant it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from llmnode._native import blake3_digest
from llmnode.core.ids import Epoch, SessionId, Step
from llmnode.core.operations import Fork, Truncate
from llmnode.errors import LocalProtocolError, PeerRefused
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.stage import Action, Compute, Copy, Do, Refuse, Repeat, Stage, Wait

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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


def test_steps_in_turn_fill_the_kv() -> None:
    server = after(FIRST, SECOND, THIRD)
    assert bytes(server.kv) == b"abcde"
    assert server.stage.position == 5
    assert [(answer.step, answer.start, answer.length) for answer in server.answers] == [
        (0, 0, 3),
        (1, 3, 1),
        (2, 4, 1),
    ]


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_steps_in_any_order_fill_the_kv_in_turn(order: tuple[int, ...]) -> None:
    steps = [FIRST, SECOND, THIRD, step(3, 5, b"f")]
    server = after(*(steps[number] for number in order))
    assert bytes(server.kv) == b"abcdef"
    assert [answer.step for answer in server.answers] == [0, 1, 2, 3]


def test_a_repeated_step_gets_the_identical_answer_and_changes_nothing() -> None:
    server = after(FIRST, SECOND)
    answer = server.answers[-1]
    assert server.receive(replace(SECOND)) == Repeat(answer)
    assert bytes(server.kv) == b"abcd"
    assert server.forwards == 2


OTHER_CONTENT: dict[str, Callable[[Frame], Frame]] = {
    "payload": lambda frame: replace(frame, payload=b"X" * frame.length),
    "start": lambda frame: replace(frame, start=frame.start + 1),
    "length": lambda frame: replace(frame, length=frame.length + 1),
}
each_change = pytest.mark.parametrize("change", OTHER_CONTENT.values(), ids=OTHER_CONTENT.keys())


@each_change
def test_a_step_that_comes_again_with_other_content_is_a_conflict(change: Callable[[Frame], Frame]) -> None:
    server = after(FIRST, SECOND)
    assert code_of(server.serve(change(SECOND))) is RefusalCode.CONFLICT
    assert server.serve(SECOND) == Repeat(server.answers[1])
    assert bytes(server.kv) == b"abcd"


@each_change
def test_a_held_step_is_not_replaced_by_one_with_other_content(change: Callable[[Frame], Frame]) -> None:
    server = after(SECOND)
    assert code_of(server.serve(change(SECOND))) is RefusalCode.CONFLICT
    server.serve(FIRST)
    assert bytes(server.kv) == b"abcd"


@each_change
def test_a_step_that_comes_again_while_it_is_computed_is_computed_once(change: Callable[[Frame], Frame]) -> None:
    server = Server()
    server.receive(FIRST)
    assert server.receive(FIRST) == Wait()
    assert code_of(server.receive(change(FIRST))) is RefusalCode.CONFLICT
    server.finish()
    assert server.next_held() == Wait()
    assert server.receive(FIRST) == Repeat(server.answers[0])
    assert bytes(server.kv) == b"abc"


def test_repeats_during_a_computation_take_no_room_from_steps_ahead() -> None:
    server = Server()
    for number in range(5):
        server.receive(step(number, number, b"a"))
        for _ in range(STEPS_AHEAD + 1):
            assert server.receive(step(number, number, b"a")) == Wait()
        server.finish()
    for number in range(STEPS_AHEAD):
        assert server.receive(step(6 + number, 6 + number, b"a")) == Wait()


def test_the_last_answer_is_repeated_while_the_next_step_is_computed() -> None:
    server = after(FIRST)
    server.receive(SECOND)
    assert server.receive(FIRST) == Repeat(server.answers[0])


def test_a_step_whose_answer_is_gone_gets_none() -> None:
    server = after(FIRST, SECOND)
    assert server.serve(FIRST) == Wait()
    assert bytes(server.kv) == b"abcd"


def test_an_answer_is_never_that_of_another_step() -> None:
    server = after(FIRST, SECOND)
    assert server.serve(replace(SECOND, step=FIRST.step)) == Wait()


def test_an_answer_of_an_epoch_that_is_over_is_never_given_again() -> None:
    server = after(FIRST, SECOND, truncate(keep=4, epoch=1, next_step=2))
    assert server.serve(replace(SECOND, epoch=Epoch(1))) == Wait()


def test_a_late_step_of_an_old_epoch_changes_nothing() -> None:
    server = after(FIRST, SECOND, truncate(keep=2, epoch=1, next_step=2))
    for late in (FIRST, SECOND, step(2, 2, b"x"), step(2, 4, b"x"), step(7, 2, b"x")):
        assert server.receive(late) == Wait()
        assert server.next_held() == Wait()
    assert bytes(server.kv) == b"ab"
    assert server.stage.epoch == 1


def test_a_late_truncation_of_an_old_epoch_changes_nothing() -> None:
    server = after(FIRST, truncate(keep=2, epoch=5, next_step=1))
    assert server.receive(truncate(keep=0, epoch=4, next_step=0)) == Wait()
    assert bytes(server.kv) == b"ab"


def test_a_step_cannot_raise_the_epoch() -> None:
    server = after(FIRST, step(1, 3, b"x", epoch=1))
    assert server.stage.epoch == 0
    server.serve(SECOND)
    assert bytes(server.kv) == b"abcd"


def test_a_truncation_shortens_the_kv_and_the_session_goes_on() -> None:
    server = after(FIRST, SECOND)
    frame = truncate(keep=2, epoch=1, next_step=2)
    assert server.serve(frame) == Do(frame, Truncate(frame.session, 2), FrameType.TRUNCATED)
    server.serve(step(2, 2, b"xyz", epoch=1))
    assert bytes(server.kv) == b"abxyz"


def test_a_truncation_may_keep_everything_or_nothing() -> None:
    server = after(FIRST, truncate(keep=3, epoch=1, next_step=1))
    assert bytes(server.kv) == b"abc"
    server.serve(truncate(keep=0, epoch=2, next_step=0))
    assert server.kv == []
    server.serve(step(0, 0, b"new", epoch=2))
    assert bytes(server.kv) == b"new"


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        (truncate(keep=1, epoch=0, next_step=1), RefusalCode.STALE_EPOCH),
        (truncate(keep=4, epoch=1, next_step=1), RefusalCode.WRONG_POSITION),
        (step(1, 2, b"x"), RefusalCode.WRONG_POSITION),
        (step(1, 4, b"x"), RefusalCode.WRONG_POSITION),
        (step(1, 3, b"x" * (MAX_LENGTH - 2)), RefusalCode.NO_ROOM),
    ],
)
def test_a_refused_frame_leaves_the_session_as_it_was(frame: Frame, code: RefusalCode) -> None:
    server = after(FIRST)
    assert code_of(server.serve(frame)) is code
    assert bytes(server.kv) == b"abc"
    assert server.serve(FIRST) == Repeat(server.answers[0])
    assert server.serve(SECOND) == Compute(SECOND)


def test_a_session_can_be_filled_to_its_last_position() -> None:
    server = after(FIRST, step(1, 3, b"x" * (MAX_LENGTH - 3)))
    assert server.stage.position == MAX_LENGTH
    assert code_of(server.serve(step(2, MAX_LENGTH, b"x"))) is RefusalCode.NO_ROOM


def test_steps_of_an_epoch_that_begins_later_wait_for_its_truncation() -> None:
    server = after(FIRST, step(2, 2, b"y", epoch=1), step(1, 1, b"x", epoch=1))
    server.serve(truncate(keep=1, epoch=1, next_step=1))
    assert bytes(server.kv) == b"axy"


def test_steps_that_wait_in_an_epoch_that_ends_are_forgotten() -> None:
    server = after(SECOND, THIRD, step(3, 5, b"f"), truncate(keep=0, epoch=1, next_step=0))
    for number in range(STEPS_AHEAD):
        assert server.serve(step(1 + number, 1 + number, b"x", epoch=1)) == Wait()
    server.serve(step(0, 0, b"w", epoch=1))
    assert bytes(server.kv) == b"wxxx"


def test_steps_that_are_over_when_their_epoch_begins_take_no_room_from_steps_ahead() -> None:
    early = [step(number, number, b"x", epoch=1) for number in range(STEPS_AHEAD)]
    server = after(*early, truncate(keep=0, epoch=1, next_step=STEPS_AHEAD))
    for number in range(STEPS_AHEAD):
        assert server.serve(step(STEPS_AHEAD + 1 + number, 1 + number, b"x", epoch=1)) == Wait()


def test_a_step_too_far_ahead_is_refused_and_can_be_sent_again_in_time() -> None:
    server = after(*(step(1 + number, 1 + number, b"x") for number in range(STEPS_AHEAD)))
    late = step(1 + STEPS_AHEAD, 1 + STEPS_AHEAD, b"y")
    assert code_of(server.serve(late)) is RefusalCode.TOO_FAR_AHEAD
    server.serve(step(0, 0, b"w"))
    server.serve(late)
    assert bytes(server.kv) == b"wxxxy"


def test_a_failed_step_can_be_sent_again_and_those_behind_it_follow() -> None:
    server = after(SECOND)
    server.receive(FIRST)
    server.finish(good=False)
    assert server.next_held() == Wait()
    assert server.kv == []
    server.serve(FIRST)
    assert bytes(server.kv) == b"abcd"


def test_driving_a_stage_out_of_order_is_our_bug() -> None:
    stage = new_stage()
    with pytest.raises(LocalProtocolError):
        stage.computed(FIRST, bytes(32))
    with pytest.raises(LocalProtocolError):
        stage.failed()
    with pytest.raises(LocalProtocolError):
        stage.copied()
    stage.receive(FIRST)
    with pytest.raises(LocalProtocolError):
        stage.receive(truncate(keep=0, epoch=1, next_step=0))
    with pytest.raises(LocalProtocolError):
        stage.fork(fork(0, epoch=1, next_step=0), None, shared=0)


def other(tokens: bytes = b"vwxyz") -> Server:
    """Another session, with these tokens."""
    return after(step(0, 0, tokens))


@pytest.mark.parametrize("keep", range(1, 6))
def test_a_fork_is_a_copy_that_goes_on_by_itself(keep: int) -> None:
    source, server = other(), after(FIRST, SECOND)
    frame = fork(keep, epoch=1, next_step=2)
    assert server.fork(frame, source) == Copy(
        frame, source.stage.session, Fork(frame.session, source.stage.session, 0, keep)
    )
    server.serve(step(2, keep, b"q", epoch=1))
    assert bytes(server.kv) == b"vwxyz"[:keep] + b"q"
    assert bytes(source.kv) == b"vwxyz"
    source.serve(step(1, 5, b"r"))
    assert bytes(source.kv) == b"vwxyzr"


def test_a_fork_copies_what_is_not_shared() -> None:
    source, server = other(b"abXYZ"), after(FIRST, SECOND)
    server.fork(fork(5, epoch=1, next_step=2), source, shared=2)
    assert bytes(server.kv) == b"abXYZ"


def test_a_fork_of_what_is_all_shared_is_a_truncation() -> None:
    source, server = other(b"abXYZ"), after(FIRST, SECOND)
    frame = fork(2, epoch=1, next_step=2)
    server.fork(frame, source, shared=2)
    server.serve(step(2, 2, b"q", epoch=1))
    assert bytes(server.kv) == b"abq"
    server.fork(fork(0, epoch=2, next_step=0), Server())
    assert server.kv == []


def test_steps_that_wait_for_a_fork_follow_it_and_those_before_it_are_forgotten() -> None:
    server = after(FIRST, step(3, 5, b"s", epoch=1), step(2, 3, b"late"))
    server.fork(fork(5, epoch=1, next_step=3), other())
    assert bytes(server.kv) == b"vwxyzs"
    assert server.serve(step(2, 3, b"late")) == Wait()
    assert server.stage._held == {}


def test_an_answer_from_before_a_fork_is_never_given_again() -> None:
    server = after(FIRST)
    server.fork(fork(3, epoch=1, next_step=1), other())
    assert server.serve(replace(FIRST, epoch=Epoch(1))) == Wait()


def test_a_late_fork_of_an_old_epoch_changes_nothing() -> None:
    server = after(FIRST, truncate(keep=2, epoch=5, next_step=1))
    assert server.fork(fork(3, epoch=4, next_step=0), other()) == Wait()
    assert bytes(server.kv) == b"ab"


BUSY = other()
BUSY.receive(step(1, 5, b"x"))
SHORT = 4


@pytest.mark.parametrize(
    ("frame", "source", "shared", "code"),
    [
        (fork(5, epoch=0, next_step=1), other(), 0, RefusalCode.STALE_EPOCH),
        (fork(5, epoch=1, next_step=1), None, 0, RefusalCode.UNKNOWN_SESSION),
        (fork(5, epoch=1, next_step=1), BUSY, 0, RefusalCode.BUSY),
        (fork(6, epoch=1, next_step=1), other(b"sixsix"), 0, RefusalCode.NO_ROOM),
        (fork(2**32 - 1, epoch=1, next_step=1), other(), 0, RefusalCode.NO_ROOM),
        (fork(5, epoch=1, next_step=1), other(b"four"), 0, RefusalCode.WRONG_POSITION),
        (fork(5, epoch=1, next_step=1), other(), 4, RefusalCode.WRONG_POSITION),  # it has three
        (fork(2, epoch=1, next_step=1), other(), 3, RefusalCode.WRONG_POSITION),
        (fork(2, epoch=1, next_step=1), other(), 2**32 - 1, RefusalCode.WRONG_POSITION),
    ],
)
def test_a_refused_fork_leaves_the_session_as_it_was(
    frame: Frame, source: Server | None, shared: int, code: RefusalCode
) -> None:
    server = Server(new_stage(max_length=5))
    server.serve(FIRST)
    assert code_of(server.fork(frame, source, shared)) is code
    assert bytes(server.kv) == b"abc"
    assert server.serve(FIRST) == Repeat(server.answers[0])
    assert server.serve(SECOND) == Compute(SECOND)


def test_a_session_is_no_copy_of_itself() -> None:
    server = after(FIRST)
    assert code_of(server.fork(fork(3, epoch=1, next_step=1), server)) is RefusalCode.CONFLICT


def test_a_fork_that_failed_changed_nothing_and_can_be_sent_again() -> None:
    server, frame = after(FIRST), fork(5, epoch=1, next_step=1)
    server.fork(frame, other(), good=False)
    assert (server.stage.epoch, server.stage.position) == (0, 3)
    server.serve(SECOND)
    server.fork(frame, other())
    assert bytes(server.kv) == b"vwxyz"


def test_a_session_that_becomes_a_copy_is_no_source_till_it_is_one() -> None:
    server, third = after(FIRST), after(FIRST)
    server.stage.fork(fork(5, epoch=1, next_step=1), other().stage, shared=0)
    assert code_of(third.fork(fork(3, epoch=1, next_step=1), server)) is RefusalCode.BUSY
    server.stage.copied()
    assert isinstance(third.stage.fork(fork(3, epoch=1, next_step=1), server.stage, shared=0), Copy)


@given(st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=4), st.data())
def test_an_honest_session_arrives_whole_whatever_the_network_repeats_and_reorders(
    chunks: list[bytes], data: st.DataObject
) -> None:
    starts = [sum(map(len, chunks[:number])) for number in range(len(chunks))]
    steps = [step(number, start, tokens) for number, (start, tokens) in enumerate(zip(starts, chunks, strict=True))]
    repeats = data.draw(st.lists(st.sampled_from(steps), max_size=6))
    server = after(*data.draw(st.permutations(steps + repeats)))
    assert bytes(server.kv) == b"".join(chunks)
    assert server.forwards == len(steps)


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
            if len(self.waiting) == STEPS_AHEAD:
                return RefusalCode.TOO_FAR_AHEAD
            self.waiting.append(frame)
            return Wait
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
