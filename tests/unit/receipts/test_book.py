"""The book of a session's receipts: what it checks, when, and what is left of it after rollbacks."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.policy import TrustPolicy
from llmnode.core.span import Span
from llmnode.errors import IntegrityError, LocalProtocolError
from llmnode.net.identity import is_signed
from llmnode.receipts.audit import audit
from llmnode.receipts.book import ReceiptBook
from llmnode.receipts.transcript import parse
from llmnode.wire.payload import Codec
from llmnode.wire.receipt import Convicted
from unit.signers import CLIENT, LIAR, MODEL, OTHER, Session, digest, forged, signed, signer

if TYPE_CHECKING:
    from llmnode.core.ids import PeerId
    from llmnode.receipts.audit import Audit
    from llmnode.wire.receipt import Receipt


def audited(session: Session) -> Audit:
    return audit(parse(json.dumps(session.export()).encode()), is_signed)


def verify(session: Session) -> None:
    trio.run(session.book.verify_pending)


def add(session: Session, receipts: list[Receipt], *, replay: bool = False) -> None:
    session.book.add(receipts, receipts[0].input_digest, receipts[-1].output_digest, replay=replay)


def test_an_honest_session_is_fine_and_verified_as_far_as_it_was_checked() -> None:
    session = Session()
    session.step(20)
    session.step()
    assert (session.book.pending, session.book.verified) == (2, 0)
    verify(session)
    session.step()
    assert (session.book.pending, session.book.verified) == (1, 21)
    verify(session)
    assert (session.book.pending, session.book.verified) == (0, 22)
    assert audited(session).problems == []
    assert audited(session).positions == (0, 22)


def test_signatures_are_checked_in_another_thread_and_once_each() -> None:
    session, checked = Session(), []

    def watched(peer: PeerId, message: bytes, signature: bytes) -> bool:
        checked.append(threading.get_ident())
        return is_signed(peer, message, signature)

    session.book = ReceiptBook(CLIENT.peer, MODEL, Codec.RAW, TrustPolicy(), watched)
    for _ in range(4):
        session.step()
    assert checked == [], "the way of a step has no signature checks"
    verify(session)
    verify(session)
    assert len(checked) == 4 * 3
    assert threading.get_ident() not in checked


def test_a_bad_signature_is_told_once_and_stands_until_its_positions_are_rolled_back() -> None:
    session = Session()
    session.step(5)
    first, second, third = session.pass_through(session.stages, session.chunk(3))
    add(session, [first, forged(second), third])
    session.position, session.step_number = 8, 2
    session.step(1)
    with pytest.raises(IntegrityError, match=r"did not sign positions \[5, 8\)") as caught:
        verify(session)
    assert (caught.value.peer, caught.value.span) == (second.signer, Span(2, 4))
    assert not isinstance(caught.value, Convicted)
    assert (session.book.verified, session.book.pending) == (5, 1)
    verify(session)
    assert (session.book.verified, session.book.pending) == (5, 0)
    (problem,) = audited(session).problems
    assert (problem.peer, problem.span, problem.positions) == (second.signer, Span(2, 4), (5, 8))
    session.replace(1, OTHER)
    session.truncate(5)
    session.step(3)
    verify(session)
    assert session.book.verified == 8
    assert audited(session).problems == []


@pytest.mark.parametrize("signature", [b"", b"s" * 63, b"s" * 65])
def test_a_missing_signature_is_told_at_once(signature: bytes) -> None:
    session = Session()
    stage, chunk = session.stages[1], session.chunk(1)
    receipts = session.pass_through(session.stages, chunk)

    def told() -> None:
        digests = receipts[1].input_digest, receipts[1].output_digest
        receipts[1] = session.book.receipt(stage.hop, stage.session, chunk, *digests, signature)
        add(session, receipts)

    with pytest.raises(IntegrityError) as caught:
        told()
    assert (caught.value.peer, caught.value.span) == (stage.hop.peer, Span(2, 4))
    assert session.book.pending == 0


def test_a_chain_that_does_not_join_is_told_at_once_and_leaves_two_suspects() -> None:
    session = Session()
    receipts = session.pass_through(session.stages, session.chunk(1))
    receipts[2] = signed(replace(receipts[2], input_digest=digest("another")), session.stages[2].signer.sign)
    with pytest.raises(IntegrityError, match="took in something else") as caught:
        add(session, receipts)
    assert caught.value.peer == receipts[2].signer
    assert caught.value.suspects == (receipts[1].signer, receipts[2].signer)
    assert not isinstance(caught.value, Convicted)


def test_receipts_for_positions_out_of_turn_are_our_bug() -> None:
    session = Session()
    session.step(5)
    session.position = 4
    with pytest.raises(LocalProtocolError, match="position 4, the book is at 5"):
        session.step(1)


# Rollbacks, replacements, limits


def test_of_a_passage_that_is_rolled_back_in_part_the_rest_stays_in_force() -> None:
    session = Session()
    session.step(10)
    session.step(2)
    session.truncate(4)
    assert (session.book.pending, session.book.verified) == (1, 0)
    session.step(3)
    verify(session)
    assert session.book.verified == 7
    assert [part.positions for part in audited(session).parts] == [[(0, 7)]] * 3
    assert audited(session).problems == []


def test_a_replacement_is_known_by_its_replay() -> None:
    session = Session()
    session.step(10)
    session.replace(1, OTHER, LIAR)
    session.step(2)
    found = audited(session)
    assert found.problems == []
    assert [(part.peer, str(part.span), part.positions, part.replayed) for part in found.parts] == [
        (signer(0).peer, "[0, 2)", [(0, 12)], []),
        (signer(1).peer, "[2, 4)", [(0, 10)], []),
        (signer(2).peer, "[4, 6)", [(0, 12)], []),
        (OTHER.peer, "[2, 3)", [(10, 12)], [(0, 10)]),
        (LIAR.peer, "[3, 4)", [(10, 12)], [(0, 10)]),
    ]


def test_a_replay_with_a_bad_signature_is_told_once_and_forgotten() -> None:
    session = Session()
    session.step(10)
    stage = session.stage(LIAR, Span(2, 4))
    receipts = session.pass_through([stage], replace(session.chunk(10), start=0))
    add(session, [forged(replace(receipts[0], signer=OTHER.peer))], replay=True)
    with pytest.raises(IntegrityError, match=r"did not sign positions \[0, 10\)") as caught:
        verify(session)
    assert caught.value.peer == OTHER.peer
    verify(session)
    assert session.book.verified == 10
    assert audited(session).problems == []


def test_a_rollback_while_signatures_are_checked_is_not_undone() -> None:
    session = Session()
    session.step(5)
    session.step(5)
    started, go_on = threading.Event(), threading.Event()

    def slow(peer: PeerId, message: bytes, signature: bytes) -> bool:
        started.set()
        assert go_on.wait(10)
        return is_signed(peer, message, signature)

    session.book._verify = slow

    async def main() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(session.book.verify_pending)
            await trio.to_thread.run_sync(partial(started.wait, 10))
            session.truncate(3)
            session.step(4)
            go_on.set()

    trio.run(main)
    assert (session.book.verified, session.book.pending) == (3, 1)
    verify(session)
    assert session.book.verified == 7
    assert audited(session).problems == []


def test_the_oldest_receipts_go_and_what_is_not_checked_yet_stays() -> None:
    session = Session(policy=TrustPolicy(receipts_kept=12))
    for _ in range(10):
        session.step(2)
    assert session.book.pending == 10, "nobody gets away by being late"
    verify(session)
    session.step(2)
    found = audited(session)
    assert (found.receipts, found.positions, found.problems) == (12, (14, 22), [])
    session.truncate(9)
    session.step(1)
    assert (audited(session).positions, audited(session).problems) == ((9, 10), [])


def test_what_was_rolled_back_takes_no_memory() -> None:
    session = Session(policy=TrustPolicy(receipts_kept=12))
    for _ in range(5):
        session.truncate(0)
        for _ in range(4):
            session.step(2)
            verify(session)
    assert audited(session).positions == (0, 8)


# Copies


def test_a_copy_answers_for_what_comes_after_it_and_checks_what_was_not_checked_before() -> None:
    session = Session()
    session.step(5)
    verify(session)
    session.step(2)
    session.fork()
    session.step(3)
    assert (session.book.pending, session.book.verified) == (2, 5)
    verify(session)
    assert (session.book.pending, session.book.verified) == (0, 10)
    assert (audited(session).positions, audited(session).problems) == ((7, 10), [])
    session.truncate(6)
    session.step(1)
    assert (audited(session).positions, audited(session).problems) == ((6, 7), [])


def test_what_was_not_signed_before_a_copy_was_made_is_told_by_both_until_it_is_rolled_back() -> None:
    session = Session()
    first, second, third = session.pass_through(session.stages, session.chunk(3))
    add(session, [first, forged(second), third])
    session.position, session.step_number = 3, 1
    session.step(1)
    source = session.book
    session.fork()
    session.fork()  # the copy that nobody asked is gone
    session.step(2)
    for book in (source, session.book):
        with pytest.raises(IntegrityError, match=r"did not sign positions \[0, 3\)") as caught:
            trio.run(book.verify_pending)
        assert caught.value.peer == second.signer
        trio.run(book.verify_pending)
        assert (book.verified, book.pending) == (0, 0)
    session.replace(1, OTHER)
    session.truncate(0)
    session.step(3)
    verify(session)
    assert session.book.verified == 3
    assert audited(session).problems == []


def test_a_book_that_was_full_is_empty_after_it_has_become_a_copy() -> None:
    session, other = Session(), Session()
    session.step(9)
    session.book.become(other.book, 0)
    assert (session.book.pending, session.book.verified) == (0, 0)
    session.book.become(None, 4)
    assert (session.book.pending, session.book.verified) == (0, 4)


def test_to_go_back_to_what_never_was_is_our_bug() -> None:
    session = Session()
    session.step(8)
    session.truncate(4)
    with pytest.raises(LocalProtocolError, match="cannot go back to position 5 from 4"):
        session.book.truncate(5)


acts = st.lists(
    st.one_of(
        st.tuples(st.just("step"), st.integers(1, 9)),
        st.tuples(st.just("truncate"), st.integers(0, 40)),
        st.tuples(st.just("replace"), st.integers(0, 3)),
        st.tuples(st.just("fork"), st.just(0)),
        st.tuples(st.just("verify"), st.just(0)),
    ),
    min_size=1,
    max_size=16,
)


@given(acts, st.integers(6, 40))
def test_whatever_happens_to_an_honest_session_its_export_is_fine(history: list[tuple[str, int]], kept: int) -> None:
    session = Session(policy=TrustPolicy(receipts_kept=kept))
    session.step(3)
    for act, number in history:
        match act:
            case "step":
                session.step(number)
            case "truncate":
                session.truncate(min(number, session.position))
            case "replace":
                index = number % len(session.stages)
                others = (signer(5 + session.made % 5),)
                session.replace(index, *others * min(2, len(session.stages[index].hop.span)))
            case "fork":
                session.fork()
            case _:
                verify(session)
        assert session.book.verified <= session.position
    session.step(1)
    found = audited(session)
    assert found.problems == []
    assert found.positions[1] == session.position
    verify(session)
    assert (session.book.verified, session.book.pending) == (session.position, 0)
    session.step(1)
    assert audited(session).receipts <= max(kept, len(session.stages))
