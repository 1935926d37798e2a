"""Forks of a stage: a session that becomes a copy of another one, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest

from llmnode.core.ids import Epoch
from llmnode.core.operations import Fork
from llmnode.wire.frame import Frame
from llmnode.wire.messages import RefusalCode
from llmnode.wire.stage import Compute, Copy, Repeat, Wait
from unit.driven_stage import FIRST, SECOND, Server, after, code_of, fork, new_stage, other, step, truncate


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
