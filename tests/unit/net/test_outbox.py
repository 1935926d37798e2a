"""A link writes small frames before large ones, those of each session in order, and loses nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.ids import NO_SESSION, SessionId, Step
from llmnode.core.links.write_size import LEAST_BYTES
from llmnode.core.policy import LinkPolicy
from llmnode.errors import LocalProtocolError
from llmnode.net.outbox import GENTLE_PIECE_BYTES, Outbox
from llmnode.wire.frame import Frame, FrameDecoder, FrameType

POLICY = LinkPolicy()
PIECE_BYTES = POLICY.piece_bytes
A, B = SessionId(b"A" * 16), SessionId(b"B" * 16)


def frame(session: SessionId, step: int, size_bytes: int = 0) -> Frame:
    return Frame(FrameType.STEP, session, step=Step(step), payload=bytes(size_bytes))


def steps(decoder: FrameDecoder, data: bytes | None) -> list[tuple[bytes, int]]:
    assert data is not None
    return [(bytes(each.session), each.step) for each in decoder.feed(data)]


def test_a_small_frame_passes_between_the_pieces_of_another_session() -> None:
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    outbox.add(frame(A, 1, 3 * PIECE_BYTES))
    assert steps(decoder, outbox.take()) == []
    outbox.add(frame(B, 7))
    assert steps(decoder, outbox.take()) == [(B, 7)]
    rest = list(iter(outbox.take, None))
    assert [steps(decoder, data) for data in rest] == [*[[]] * (len(rest) - 1), [(A, 1)]]
    assert max(len(data or b"") for data in rest) < 2 * GENTLE_PIECE_BYTES, "another small one may come"


def test_a_small_frame_does_not_pass_a_large_one_of_its_own_session() -> None:
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    outbox.add(frame(A, 1, PIECE_BYTES))
    outbox.add(frame(A, 2))
    outbox.add(frame(B, 7))
    arrived = []
    while data := outbox.take():
        arrived += steps(decoder, data)
    assert arrived == [(B, 7), (A, 1), (A, 2)]


def test_without_a_session_a_small_frame_passes_a_large_one_of_another_step_alone() -> None:
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    outbox.add(frame(NO_SESSION, 1, PIECE_BYTES))
    outbox.add(frame(NO_SESSION, 1))  # it takes the large one back
    outbox.add(frame(NO_SESSION, 2))
    outbox.add(Frame(FrameType.HEARTBEAT))
    arrived = []
    while data := outbox.take():
        arrived += [step for _, step in steps(decoder, data)]
    assert arrived == [2, 0, 1, 1]


@given(
    st.lists(st.tuples(st.sampled_from([A, B]), st.sampled_from([0, 1000, PIECE_BYTES, 300_000]), st.integers(0, 4)))
)
def test_whatever_comes_goes_out_in_the_order_of_its_session(coming: list[tuple[SessionId, int, int]]) -> None:
    """After each frame that comes, a number of writes happens."""
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    arrived: list[tuple[bytes, int]] = []
    for step, (session, size_bytes, writes) in enumerate(coming):
        outbox.add(frame(session, step, size_bytes))
        for _ in range(writes):
            if data := outbox.take():
                arrived += steps(decoder, data)
    while data := outbox.take():
        arrived += steps(decoder, data)
    for session in (A, B):
        sent = [(bytes(each), step) for step, (each, *_) in enumerate(coming) if each == session]
        assert [each for each in arrived if each[0] == session] == sent
    assert (len(outbox), outbox.size_bytes) == (0, 0)
    assert decoder.at_boundary()


def test_a_line_that_small_frames_fill_leaves_half_to_large_ones() -> None:
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    outbox.add(frame(A, 1, 4 * PIECE_BYTES))
    small = PIECE_BYTES // 4
    outbox.add(frame(B, 0, small))
    writes = 0
    while (A, 1) not in [(SessionId(session), step) for session, step in steps(decoder, outbox.take())]:
        outbox.add(frame(B, writes + 1, small))  # another comes for each that goes
        writes += 1
    assert writes == 2 * 17 - 1, "pieces as small as they are, and one before each"


def test_pieces_become_smaller_when_the_line_turns_out_to_be_slow() -> None:
    outbox, decoder = Outbox(POLICY), FrameDecoder(POLICY)
    outbox.add(frame(A, 1, 3 * PIECE_BYTES))
    sent = [outbox.take()]
    outbox.piece_bytes = LEAST_BYTES
    while data := outbox.take():
        sent.append(data)
    assert [each for data in sent for each in steps(decoder, data)] == [(A, 1)]
    assert all(len(data or b"") < 2 * LEAST_BYTES for data in sent[1:])


def test_each_frame_is_prepared_once_and_one_that_comes_meanwhile_goes_first() -> None:
    large, small = frame(A, 1, 3 * PIECE_BYTES), frame(B, 7, 5)
    outbox, decoder, asked, arrived = Outbox(POLICY), FrameDecoder(POLICY), [], []
    outbox.add(large)
    assert outbox.next_to_prepare is large
    outbox.add(small)  # while the large one is being prepared
    outbox.prepare(large, smaller := replace(large, payload=bytes(2 * PIECE_BYTES)))
    assert outbox.size_bytes == smaller.size_bytes + small.size_bytes
    while True:
        while (waiting := outbox.next_to_prepare) is not None:
            asked.append(waiting)
            outbox.prepare(waiting, replace(waiting, payload=b"less"))
        if (data := outbox.take()) is None:
            break
        arrived += decoder.feed(data)
    assert asked == [small]
    assert arrived == [replace(small, payload=b"less"), smaller]
    assert outbox.size_bytes == len(outbox) == 0


def test_what_no_link_may_carry_is_refused() -> None:
    outbox = Outbox(LinkPolicy(max_payload_bytes=10))
    outbox.add(frame(A, 1, 11))
    with pytest.raises(LocalProtocolError):
        outbox.take()
