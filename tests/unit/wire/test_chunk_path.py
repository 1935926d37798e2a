"""A chunk between two hops that contradict each other: neither is blamed while the former may have given it a step."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode._native import blake3_digest
from llmnode.core.ids import Epoch, PeerId, SessionId, Step
from llmnode.core.model import ModelInfo
from llmnode.core.peers.peer_speed import PromisedTime
from llmnode.core.policy import ClientPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span
from llmnode.errors import IntegrityError, PeerError, PeerRefused, PeerTimeout, RemoteProtocolError
from llmnode.wire.chunk import Chunk
from llmnode.wire.chunk_path import HopsDisagree, Outcome, Receive, Send, chunk_path
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.hop_state import HopState
from llmnode.wire.messages import Neighbours, RefusalCode, Result, pack, unpack
from llmnode.wire.payload import Codec
from llmnode.wire.session_terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import Iterator

MODEL = ModelInfo("exact", b"d" * 32, blocks=2, hidden_size=1, context_tokens=100)
TERMS = SessionTerms(MODEL, 10, Codec.RAW, ClientPolicy())
CHUNK = Chunk(Epoch(0), Step(0), 0, 1)
GIVEN, BETWEEN, OTHER, LAST = (bytes([number] * MODEL.row_bytes) for number in range(4))
CONFLICT = PeerRefused(RefusalCode.CONFLICT, "it came before with other content")


def hop(number: int) -> HopState:
    name = SessionId(bytes([number] * 16))
    return HopState(Hop(PeerId(f"peer {number}"), Span(number, number + 1)), TERMS, name)


def neighbours(first: HopState, second: HopState) -> list[Neighbours]:
    """The neighbours that each hop is told. It agrees."""
    told = []
    for before, each, after in [(None, first, second), (first, second, None)]:
        request = each.set_neighbours(before, after, CHUNK.epoch, CHUNK.step, 0.0, quiet=False)
        assert request is not None
        each.answered(request, Frame(request.answer))
        told.append(unpack(Neighbours, request.frame.meta))
    return told


def result(came_in: bytes, came_out: bytes, *, pushed: bool = False, took_us: int = 0) -> Frame:
    digests = blake3_digest(came_in), blake3_digest(came_out)
    meta = pack(Result(took_us, took_us, *digests, bytes(64), pushed, b"", b""))
    return Frame(FrameType.RESULT, start=CHUNK.start, length=CHUNK.length, meta=meta, payload=came_out)


def way(hops: list[HopState], answers: Iterator[object]) -> None:
    """Take the chunk through the hops, which give these answers."""
    path = chunk_path(hops, CHUNK, GIVEN, TERMS.policy)
    action = next(path)
    while True:
        outcome = Outcome(1.0)
        if isinstance(action, Receive):
            answer = next(answers)
            if isinstance(answer, PeerError):
                outcome = Outcome(1.0, error=answer)
            else:
                assert isinstance(answer, Frame)
                outcome = Outcome(1.0, answer=answer)
        else:
            assert isinstance(action, Send)
        action = path.send(outcome)


def late() -> PeerTimeout:
    return PeerTimeout("no RESULT in time")


@pytest.mark.parametrize("last", [CONFLICT, result(OTHER, LAST)], ids=["refused", "another input"])
@pytest.mark.parametrize("pushed", ["in time", "late", "denied"])
def test_a_hop_that_may_have_been_given_another_step_is_not_blamed(pushed: str, last: Frame | PeerError) -> None:
    hops = [first, second] = [hop(0), hop(1)]
    assert neighbours(first, second)[1].sender == first.hop.peer
    between = [late()] if pushed == "late" else []
    with pytest.raises(HopsDisagree) as caught:
        way(hops, iter([result(GIVEN, BETWEEN, pushed=pushed != "denied"), *between, last]))
    assert caught.value.suspects == (first.hop.peer, second.hop.peer)
    assert first.failure is second.failure is None
    assert not first.pushing.is_trusted
    with pytest.raises(HopsDisagree):  # it may have given it wrong steps that come later, too
        way(hops, iter([result(GIVEN, BETWEEN), last]))
    assert second.failure is None, "it was not told yet to take no steps of the other one"
    told = neighbours(first, second)
    assert (told[0].receiver, told[1].sender) == ("", ""), "they have nothing to do with each other any more"
    with pytest.raises(PeerError):
        way(hops, iter([result(GIVEN, BETWEEN), last]))
    assert first.failure is None
    assert second.failure is not None, "nobody else can have given it another step now"


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (result(OTHER, LAST), IntegrityError),
        (replace(result(GIVEN, LAST), length=CHUNK.length + 1), RemoteProtocolError),
    ],
    ids=["another input", "other positions"],
)
def test_a_hop_without_a_hop_before_is_blamed_at_once_and_for_all_the_time_until_its_answer(
    answer: Frame, error: type[PeerError]
) -> None:
    alone = hop(0)
    with pytest.raises(error):
        way([alone], iter([answer]))
    assert alone.failure is not None
    assert alone.failure.waited_s == 1.0


def test_a_late_hop_that_was_given_the_same_again_is_well() -> None:
    hops = [first, second] = [hop(0), hop(1)]
    neighbours(first, second)
    first.keeps_outputs = False
    answers = iter([result(GIVEN, BETWEEN, pushed=True), late(), result(BETWEEN, LAST)])
    with pytest.raises(StopIteration) as end:
        way(hops, answers)
    assert [replace(each.timing, elapsed_us=0).direct for each in end.value.value.outputs] == [False, False]
    assert first.pushing.receiver is None


def test_no_word_of_a_hop_has_the_client_wait_for_its_push_for_long() -> None:
    hops = [first, second] = [hop(0), hop(1)]
    neighbours(first, second)
    path = chunk_path(hops, CHUNK, GIVEN, TERMS.policy)
    next(path)
    path.send(Outcome(1.0))
    took_s = 3.0
    action = path.send(Outcome(took_s, answer=result(GIVEN, BETWEEN, pushed=True, took_us=1 << 47)))
    assert isinstance(action, Receive) and action.hop is second and action.is_pushed
    assert action.timeout_s == TERMS.policy.push.patience_s + 4 * took_s


NO_MEMORY = PeerRefused(RefusalCode.BUSY, "no memory is left for this session now", retry_after_s=1.0)


def test_a_hop_without_memory_is_given_the_step_again_if_nobody_could_take_its_place() -> None:
    alone = hop(0)
    with pytest.raises(StopIteration):
        way([alone], iter([NO_MEMORY, late(), NO_MEMORY, result(GIVEN, LAST)]))
    assert alone.failure is None
    assert alone.memory_refusals == 2
    alone.promised = PromisedTime(0.001, 8.0)
    with pytest.raises(PeerRefused):
        way([alone], iter([NO_MEMORY]))
    assert alone.failure is NO_MEMORY


@pytest.mark.parametrize(
    ("error", "waited_s", "pause_s"),
    [
        (NO_MEMORY, 0.0, 1.0),
        (PeerRefused(RefusalCode.BUSY, "later", retry_after_s=3.0), TERMS.policy.memory_patience_s - 1, 3.0),
        (PeerRefused(RefusalCode.BUSY, "much later", retry_after_s=1e9), 0.0, TERMS.policy.route.longest_pause_s),
        (NO_MEMORY, TERMS.policy.memory_patience_s, None),
        (PeerRefused(RefusalCode.BUSY, "it is draining"), 0.0, None),
        (CONFLICT, 0.0, None),
        (PeerTimeout("no RESULT"), 0.0, None),
        (None, 0.0, None),
    ],
)
def test_a_hop_is_waited_for_only_if_it_says_when_it_may_have_memory_and_not_for_ever(
    error: PeerError | None, waited_s: float, pause_s: float | None
) -> None:
    assert hop(0).pause_s(error, waited_s) == pause_s


def test_the_first_step_has_the_time_of_its_word_and_of_its_way() -> None:
    first, policy = hop(0), TERMS.policy
    first.promised = PromisedTime(position_s=0.001, patience_s=8.0)
    for positions in (1, 1000):
        way_s = 4 * positions / policy.standing.first_bytes_per_s
        assert first.timeout_s(positions) == pytest.approx(8.0 + way_s + 0.001 * positions * policy.step_patience_times)
    assert first.timeout_s(10**7) == policy.step_timeout_s


def test_answers_without_a_forward_have_the_time_of_a_step_and_of_what_is_under_way() -> None:
    """Going back, copies, neighbours and logged results. A hop may have to finish forwards first."""
    hops = [first, second] = [hop(0), hop(1)]
    neighbours(first, second)
    first.is_open = True

    def times_s() -> list[float]:
        told = first.set_neighbours(None, None, Epoch(1), Step(0), 0.0, quiet=not first._asked.quiet)
        assert told is not None
        copy = second.copy(first, 0, Epoch(1), Step(0), 0)
        requests = [first.truncate(Epoch(1), Step(0), 0), told, copy, first.replay(CHUNK, push=False)]
        return [each.timeout_s for each in requests]

    policy = TERMS.policy
    assert times_s() == [policy.step_timeout_s] * 4, "nothing is known"
    with pytest.raises(StopIteration):
        way(hops, iter([result(GIVEN, BETWEEN), result(BETWEEN, LAST)]))
    way_s = MODEL.row_bytes / policy.standing.first_bytes_per_s
    step_s = first.timeout_s(1)
    assert times_s() == [step_s, step_s, step_s, pytest.approx(step_s + way_s)]
    assert step_s < policy.step_timeout_s

    first.pace.note(1, 0.1)
    second.pace.note(1, 0.1)
    path = chunk_path(hops, replace(CHUNK, length=8), bytes(8 * MODEL.row_bytes), policy)
    next(path)  # the first is given the chunk, and may push it
    for each in hops:
        assert each.truncate(Epoch(1), Step(0), 0).timeout_s == each.timeout_s(8) > each.timeout_s(1)
    path.close()
    went_back = first.truncate(Epoch(1), Step(0), 0)
    first.answered(went_back, Frame(went_back.answer))
    assert first.truncate(Epoch(2), Step(0), 0).timeout_s == first.timeout_s(1)
