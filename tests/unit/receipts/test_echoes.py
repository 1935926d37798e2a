"""Echoes, by which a hop shows the receipt of the hop before it: they agree, convict, or prove nothing."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from llmnode.core.policy import TrustPolicy
from llmnode.errors import IntegrityError
from llmnode.net.identity import is_signed
from llmnode.receipts.audit import audit
from llmnode.receipts.book import ReceiptBook
from llmnode.receipts.transcript import parse
from llmnode.wire.payload import Codec
from llmnode.wire.receipt import Convicted
from unit.signers import CLIENT, LIAR, MODEL, Session, digest, forged, signed

if TYPE_CHECKING:
    from llmnode.receipts.audit import Audit


def audited(session: Session) -> Audit:
    return audit(parse(json.dumps(session.export()).encode()), is_signed)


def test_an_echo_of_what_was_told_is_nothing_new() -> None:
    session = Session()
    told, after, _ = session.step()
    book = ReceiptBook(CLIENT.peer, MODEL, Codec.RAW, TrustPolicy(), lambda *_: pytest.fail("costs a check"))
    by = session.stages[1].hop
    assert book.echo(told, by, told.input_digest, after.input_digest, told.signature) is None


@pytest.mark.parametrize("what", ["input_digest", "output_digest"])
def test_who_signs_something_else_to_the_next_hop_is_convicted(what: str) -> None:
    session = Session()
    told, _, _ = session.step()
    shown = signed(replace(told, **{what: digest("another")}), session.stages[0].signer.sign)  # type: ignore[arg-type]
    by = session.stages[1].hop
    conviction = session.book.echo(told, by, shown.input_digest, shown.output_digest, shown.signature)
    assert conviction is not None
    assert (conviction.told, conviction.shown, conviction.by) == (told, shown, by.peer)
    assert conviction.error().peer == told.signer
    (problem,) = audited(session).problems
    assert (problem.peer, problem.span, problem.positions) == (told.signer, told.span, (0, 1))
    assert "signed two different receipts" in problem.what


@pytest.mark.parametrize(
    ("output", "signature"),
    [("another", "forged"), ("another", "told"), ("another", ""), ("told", "forged"), ("told", ""), ("told", "short")],
)
def test_who_cannot_show_where_its_input_is_from_is_blamed_without_proof(output: str, signature: str) -> None:
    """A next hop that lies, or has taken an input that was not signed: the hop before it is not convicted."""
    session = Session()
    told, after, _ = session.step()
    put_out = after.input_digest if output == "told" else digest("another")
    forgery = forged(replace(told, output_digest=put_out)).signature
    by = session.stages[1].hop
    echoed = {"forged": forgery, "told": told.signature, "": b"", "short": told.signature[:63]}[signature]
    with pytest.raises(IntegrityError, match="cannot show") as caught:
        session.book.echo(told, by, told.input_digest, put_out, echoed)
    assert (caught.value.peer, caught.value.span) == (by.peer, by.span)
    assert not isinstance(caught.value, Convicted)
    assert caught.value.suspects == (told.signer, by.peer)
    assert session.book.convictions == []


def test_receipts_of_another_step_or_session_convict_nobody() -> None:
    """All that a next hop may have of the one before it, besides what belongs to the step."""
    session = Session()
    told, _, _ = session.step()
    theirs = session.stages[0].signer
    for other in (
        replace(told, epoch=told.epoch + 1),
        replace(told, step=told.step + 1),
        replace(told, session=session.stages[1].session),
        replace(told, client=LIAR.peer),
    ):
        old = signed(replace(other, output_digest=digest("another")), theirs.sign)
        with pytest.raises(IntegrityError, match="cannot show"):
            session.book.echo(told, session.stages[1].hop, old.input_digest, old.output_digest, old.signature)


def test_who_told_us_something_unsigned_is_blamed_before_what_it_told_others_counts() -> None:
    session = Session()
    told, after, _ = session.step()
    shown = signed(replace(told, output_digest=digest("another")), session.stages[0].signer.sign)
    by = session.stages[1].hop
    with pytest.raises(IntegrityError, match="did not sign") as caught:
        session.book.echo(forged(told), by, shown.input_digest, shown.output_digest, shown.signature)
    assert caught.value.peer == told.signer
    assert not isinstance(caught.value, Convicted)
    assert session.book.echo(forged(told), by, told.input_digest, after.input_digest, forged(told).signature) is None, (
        "two that agree on a bad signature: `verify_pending` tells"
    )


def test_the_proofs_kept_are_bounded() -> None:
    session = Session()
    told, _, _ = session.step()
    for number in range(40):
        shown = signed(replace(told, output_digest=digest(number)), session.stages[0].signer.sign)
        echoed = shown.input_digest, shown.output_digest, shown.signature
        assert session.book.echo(told, session.stages[1].hop, *echoed) is not None
    assert len(session.book.convictions) == 16
