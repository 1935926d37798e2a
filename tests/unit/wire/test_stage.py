"""Steps and truncations of a stage: in any order, and however often they come, the KV is as the client meant it."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import Epoch
from llmnode.core.operations import Truncate
from llmnode.errors import LocalProtocolError
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.messages import RefusalCode
from llmnode.wire.stage import Compute, Do, Refuse, Repeat, Wait
from unit.driven_stage import (
    FIRST,
    MAX_LENGTH,
    SECOND,
    STEPS_AHEAD,
    THIRD,
    Server,
    after,
    code_of,
    fork,
    new_stage,
    step,
    truncate,
)

if TYPE_CHECKING:
    from collections.abc import Callable


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


def test_repeats_during_a_computation_take_no_place_from_steps_ahead() -> None:
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


def test_steps_that_are_over_when_their_epoch_begins_take_no_place_from_steps_ahead() -> None:
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


def test_steps_of_epochs_to_come_keep_no_step_of_this_one_away() -> None:
    server = after(*(step(number, 0, b"x", epoch=50) for number in range(STEPS_AHEAD)))
    refused = server.serve(step(1, 1, b"b"))
    assert code_of(refused) is RefusalCode.TOO_FAR_AHEAD
    assert isinstance(refused, Refuse)
    assert (refused.frame.epoch, refused.frame.step) == (50, STEPS_AHEAD - 1), "it is the last whose turn comes"
    server.serve(step(2, 2, b"c"))
    server.serve(step(0, 0, b"a"))
    assert bytes(server.kv) == b"abc"


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
