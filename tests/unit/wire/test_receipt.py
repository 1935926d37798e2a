"""Receipts: what is signed, and that only a liar can be made to sign two things for one step."""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import combinations, count

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from llmnode._native import blake3_digest
from llmnode.core.ids import Epoch, PeerId, SessionId, Step
from llmnode.core.model import Precision, Profile, precision_named
from llmnode.core.span import Span
from llmnode.errors import IntegrityError
from llmnode.net.identity import is_signed
from llmnode.wire.announcement import SIGNING_CONTEXT as ANNOUNCEMENT_CONTEXT
from llmnode.wire.frame import Frame, FrameType
from llmnode.wire.receipt import (
    CONTEXT_1,
    SIGNING_CONTEXT,
    Convicted,
    Conviction,
    Receipt,
    is_proof,
    is_public,
    is_valid,
    profile_digest,
    statement,
)
from llmnode.wire.stage import Compute, Repeat, Stage
from unit.signers import CLIENT, LIAR, OTHER, digest, forged, signed

PROFILE = profile_digest(Profile(b"m" * 32, Precision()), "raw")
RECEIPT = Receipt(
    signer=LIAR.peer,
    client=CLIENT.peer,
    session=SessionId(b"s" * 16),
    epoch=Epoch(1),
    step=Step(7),
    start=20,
    length=2,
    span=Span(3, 5),
    profile=PROFILE,
    input_digest=digest("input"),
    output_digest=digest("output"),
    nonce=b"n" * 16,
)
SAYING_OTHER_THINGS = {
    "client": OTHER.peer,
    "session": SessionId(b"t" * 16),
    "nonce": b"o" * 16,
    "epoch": Epoch(2),
    "step": Step(8),
    "start": 21,
    "length": 3,
    "span": Span(3, 6),
    "profile": profile_digest(Profile(b"m" * 32, Precision()), "int8"),
    "input_digest": digest("another input"),
    "output_digest": digest("another output"),
}
CONTRADICTING = {"start", "length", "span", "profile", "input_digest", "output_digest"}

numbers = st.one_of(st.integers(0, 300), st.integers(0, 2**31))
digests = st.one_of(st.binary(min_size=32, max_size=32), st.sampled_from([bytes(32), b"\xff" * 32]))
receipts = st.builds(
    Receipt,
    signer=st.just(LIAR.peer),
    client=st.sampled_from([CLIENT.peer, OTHER.peer, PeerId("")]),
    session=st.binary(min_size=16, max_size=16),
    epoch=numbers,
    step=numbers,
    start=numbers,
    length=st.integers(1, 2**31 - 1),
    span=st.tuples(st.integers(0, 90), st.integers(1, 90)).map(lambda pair: Span(pair[0], sum(pair))),
    profile=digests,
    input_digest=digests,
    output_digest=digests,
    nonce=st.one_of(st.just(b""), st.binary(min_size=16, max_size=16)),
)


def lie(**changes: object) -> Receipt:
    return signed(replace(RECEIPT, **changes), LIAR.sign)  # type: ignore[arg-type]  # a field each


def test_the_field_list_of_these_tests_is_whole() -> None:
    assert {*SAYING_OTHER_THINGS, "signer", "signature"} == {field.name for field in fields(Receipt)}


def test_a_receipt_is_valid_with_the_signature_of_its_signer_alone() -> None:
    receipt = signed(RECEIPT, LIAR.sign)
    assert is_valid(receipt, is_signed)
    assert not is_valid(RECEIPT, is_signed)
    assert not is_valid(forged(replace(RECEIPT, signer=OTHER.peer)), is_signed)
    assert not is_valid(replace(receipt, signer=OTHER.peer), is_signed)


@pytest.mark.parametrize("name", SAYING_OTHER_THINGS)
def test_every_field_is_under_the_signature(name: str) -> None:
    receipt = replace(signed(RECEIPT, LIAR.sign), **{name: SAYING_OTHER_THINGS[name]})  # type: ignore[arg-type]
    assert not is_valid(receipt, is_signed)


@given(receipts, receipts)
@example(RECEIPT, replace(RECEIPT, start=RECEIPT.start + 2**16))
def test_two_receipts_have_the_same_statement_exactly_if_they_say_the_same(one: Receipt, other: Receipt) -> None:
    assert (statement(one) == statement(other)) == (one == other)
    assert len(statement(one)) - len(one.nonce) == len(statement(other)) - len(other.nonce), (
        "no field runs into another"
    )
    assert statement(one).startswith(CONTEXT_1 if one.nonce == b"" else SIGNING_CONTEXT)


@given(receipts, st.sampled_from(sorted(SAYING_OTHER_THINGS)))
def test_another_value_of_one_field_is_another_statement(receipt: Receipt, name: str) -> None:
    changed = replace(receipt, **{name: SAYING_OTHER_THINGS[name]})  # type: ignore[arg-type]  # a field each
    assert (statement(receipt) == statement(changed)) == (receipt == changed)


def test_a_receipt_is_no_announcement() -> None:
    assert not statement(RECEIPT).startswith(ANNOUNCEMENT_CONTEXT)


@pytest.mark.parametrize(
    "wrong",
    [
        {"profile": b"p" * 31},
        {"input_digest": b""},
        {"output_digest": b"o" * 33},
        {"session": b"s" * 15},
        {"signature": b"s" * 63},
        {"nonce": b"n" * 15},
        {"epoch": -1},
        {"step": 2**32},
        {"start": -1},
        {"start": 2**32 - 2},
        {"length": 0},
        {"span": Span(0, 2**32)},
    ],
    ids=str,
)
def test_what_has_no_statement_is_no_receipt(wrong: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        replace(RECEIPT, **wrong)  # type: ignore[arg-type]  # that is the point


def test_a_digest_is_that_of_model_precision_adapter_and_codec() -> None:
    assert len(PROFILE) == 32
    model = b"m" * 32
    others = [
        (Profile(model, precision_named("float32r")), "aw"),
        (Profile(model, precision_named("a")), ""),
        (Profile(b"n" * 32, Precision()), "raw"),
        (Profile(model, Precision(), adapter=b"a" * 32), "raw"),
    ]
    assert len({PROFILE, *(profile_digest(profile, codec) for profile, codec in others)}) == 5


# Contradictions


@pytest.mark.parametrize("name", SAYING_OTHER_THINGS)
def test_two_receipts_convict_exactly_if_they_say_different_things_of_the_same_step(name: str) -> None:
    other = lie(**{name: SAYING_OTHER_THINGS[name]})
    assert is_valid(other, is_signed)
    assert is_proof(lie(), other, is_signed) == is_proof(other, lie(), is_signed) == (name in CONTRADICTING)


def test_a_receipt_does_not_contradict_itself() -> None:
    assert not is_proof(lie(), lie(), is_signed)


def test_what_somebody_else_signed_proves_nothing() -> None:
    other = replace(RECEIPT, output_digest=digest("another"))
    assert not is_proof(lie(), forged(replace(other, signer=OTHER.peer)), is_signed)
    assert not is_proof(lie(), other, is_signed), "unsigned"
    assert not is_proof(RECEIPT, lie(output_digest=digest("another")), is_signed), "unsigned"
    assert not is_proof(lie(), replace(lie(), output_digest=digest("another")), is_signed), "a changed receipt"
    theirs = signed(replace(other, signer=OTHER.peer), OTHER.sign)
    assert not is_proof(lie(), theirs, is_signed), "two peers of two minds"


def test_a_conviction_blames_the_signer_and_has_the_proof() -> None:
    conviction = Conviction(lie(), lie(output_digest=digest("another")), OTHER.peer)
    error = conviction.error()
    assert isinstance(error, Convicted)
    assert isinstance(error, IntegrityError)
    assert (error.peer, error.span, error.proof) == (LIAR.peer, Span(3, 5), conviction)


# An honest stage

frames = st.one_of(
    st.builds(
        lambda epoch, step, start, payload: Frame(
            FrameType.STEP, RECEIPT.session, Epoch(epoch), Step(step), start, len(payload), payload=payload
        ),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1),
        st.sampled_from([b"a", b"b"]),
    ),
    st.builds(
        lambda epoch, step, keep: Frame(FrameType.TRUNCATE, RECEIPT.session, Epoch(epoch), Step(step), keep),
        st.integers(0, 1),
        st.integers(0, 1),
        st.integers(0, 1),
    ),
)


class HonestStage:
    """Serves one session as `ServerSession` does. It never computes the same twice: kernels do not promise that."""

    def __init__(self, client: PeerId, nonce: bytes, outputs: count[int]) -> None:
        self.given: list[Receipt] = []
        """All frames that left the stage, to the client or the next hop."""
        self._client = client
        self._nonce = nonce
        self._outputs = outputs
        self._stage = Stage(RECEIPT.session, max_length=5, steps_ahead=2)
        self._receipts: dict[Frame, Receipt] = {}

    def receive(self, frame: Frame, fails: bool) -> None:
        """`fails`: computing does, this once."""
        action = self._stage.receive(frame)
        while isinstance(action, Compute | Repeat):
            if isinstance(action, Repeat):
                self.given.append(self._receipts[action.frame])
            elif fails:
                fails = False
                self._stage.failed()
            else:
                self._compute(action.frame)
            action = self._stage.next_held()

    def _compute(self, frame: Frame) -> None:
        output = digest(next(self._outputs))
        receipt = signed(
            replace(
                RECEIPT,
                client=self._client,
                nonce=self._nonce,
                epoch=frame.epoch,
                step=frame.step,
                start=frame.start,
                length=frame.length,
                input_digest=digest(bytes(frame.payload)),
                output_digest=output,
            ),
            LIAR.sign,
        )
        answer = replace(frame, type=FrameType.RESULT, payload=output)
        self._receipts[answer] = receipt
        self.given.append(receipt)
        self._stage.computed(answer, blake3_digest(frame.payload))


def conflicts(receipts: list[Receipt]) -> list[tuple[Receipt, Receipt]]:
    return [(one, other) for one, other in combinations(receipts, 2) if is_proof(one, other, is_signed)]


histories = st.lists(st.tuples(frames, st.booleans()), max_size=14)


@settings(max_examples=500)
@given(st.lists(histories, min_size=1, max_size=3))
def test_an_honest_stage_never_convicts_itself_whatever_a_client_sends(lives: list[list[tuple[Frame, bool]]]) -> None:
    """In each life it is opened anew, and has forgotten all; the client uses the same name again."""
    outputs, given_away = count(), []
    for life, history in enumerate(lives):
        stage = HonestStage(CLIENT.peer, bytes([life]) * 16, outputs)
        for frame, fails in history:
            stage.receive(frame, fails)
        given_away += stage.given
    assert conflicts(given_away) == []


def test_such_a_history_has_receipts_of_the_same_step_positions_and_epoch() -> None:
    """Lest the property above holds of nothing: repeats, rollbacks and second lives do sign, and the same again."""
    first = Frame(FrameType.STEP, RECEIPT.session, Epoch(0), Step(0), 0, 1, payload=b"a")
    other = replace(first, payload=b"b")
    back = Frame(FrameType.TRUNCATE, RECEIPT.session, Epoch(1), Step(0), 0)
    outputs = count()
    stage = HonestStage(CLIENT.peer, RECEIPT.nonce, outputs)
    for frame, fails in [(other, True), (first, False), (first, False), (other, False), (back, False)]:
        stage.receive(frame, fails)
    stage.receive(replace(other, epoch=Epoch(1)), False)
    again = HonestStage(CLIENT.peer, b"o" * 16, outputs)
    again.receive(first, False)
    told = [*stage.given, *again.given]
    assert [(each.epoch, each.input_digest == digest(b"a")) for each in told] == [(0, 1), (0, 1), (1, 0), (0, 1)]
    assert told[0] == told[1]
    assert conflicts(told) == []


@pytest.mark.parametrize("nonces", [[b"1" * 16, b"2" * 16, b"3" * 16], [b"", b"", b""]], ids=["nonces", "protocol 1"])
def test_a_name_that_is_used_twice_makes_an_honest_stage_contradict_itself_in_protocol_1_alone(
    nonces: list[bytes],
) -> None:
    """A next hop knows the name, too. Without a nonce, that is no proof for anybody but the client."""
    step = Frame(FrameType.STEP, RECEIPT.session, Epoch(0), Step(0), 0, 1, payload=b"a")
    outputs = count()
    clients = CLIENT.peer, OTHER.peer, CLIENT.peer
    lives = [HonestStage(client, nonce, outputs) for client, nonce in zip(clients, nonces, strict=True)]
    for stage in lives:
        stage.receive(step, False)
    (told,), (to_other,), (name_used_twice,) = (stage.given for stage in lives)
    assert conflicts([told, to_other]) == []
    assert conflicts([told, replace(to_other, client=CLIENT.peer)]) == []
    contradictions = conflicts([told, name_used_twice])
    assert contradictions == ([] if nonces[0] else [(told, name_used_twice)])
    assert not any(is_public(one) for one, _ in contradictions)
