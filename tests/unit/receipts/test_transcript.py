"""Files of receipts: they are read back, bad ones are refused, and no change goes unnoticed."""

from __future__ import annotations

import contextlib
import copy
import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from llmnode.errors import ConfigError
from llmnode.net.identity import is_signed
from llmnode.receipts import transcript
from llmnode.receipts.audit import Audit, audit
from llmnode.receipts.transcript import MOST_BYTES, as_json, parse
from unit.signers import CLIENT, LIAR, OTHER, Session, digest, forged, signed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from llmnode.receipts.transcript import Transcript

    Path = tuple[str | int, ...]


def eventful() -> Session:
    """A session with a prefill that was rolled back in part, a replacement, and a liar."""
    session = Session()
    session.step(8)
    session.step(1)
    session.truncate(6)
    session.replace(1, OTHER)
    told, *_ = session.step(2)
    shown = signed(replace(told, output_digest=digest("another")), session.stages[0].signer.sign)
    session.book.echo(told, session.stages[1].hop, shown.input_digest, shown.output_digest, shown.signature)
    return session


SESSION = eventful()
FILE = SESSION.export()


def text_of(file: Any) -> bytes:
    return json.dumps(file).encode()


def resigned(file: Any) -> bytes:
    """The file, signed again by its lying client. Raises ConfigError if the reader would refuse it."""
    return text_of(as_json(transcript.signed(parse(text_of(file)), CLIENT.sign)))


HONEST = json.loads(resigned(FILE | {"convictions": []}))
"""The same session without the liar."""


def audited(text: bytes) -> Audit:
    return audit(parse(text), is_signed)


def leaves(value: Any, path: Path = ()) -> Iterator[Path]:
    """The paths of the values in a file that are neither objects nor lists."""
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from leaves(value[key], (*path, key))
    else:
        yield path


def changed(file: Any, path: Path, change: Callable[[Any], Any]) -> Any:
    file = copy.deepcopy(file)
    at = file
    for key in path[:-1]:
        at = at[key]
    last = path[-1]
    at[last] = change(at.get(last) if isinstance(at, dict) else at[last])
    return file


def another(value: Any) -> Any:
    """Another value of the same type and, if possible, the same form."""
    match value:
        case bool():
            return not value
        case int():
            return value + 1
        case "float32":
            return "float16"
        case "raw":
            return "int8"
        case str() if set(value) <= set("0123456789abcdef"):
            return value[:-1] + ("0" if value[-1] != "0" else "1")
        case _:
            return LIAR.peer if value in (CLIENT.peer, OTHER.peer) else value + "x"


ALL = list(leaves(FILE))
UNSIGNED_BY_HOPS = {("model", "name"), ("convictions", 0, "by"), ("passages", 2, "replay")}
"""A client can lie in these fields. It can also leave out the last positions, or say that they went no further."""


def test_an_export_is_read_back_as_it_was() -> None:
    read = parse(text_of(FILE))
    assert as_json(read) == FILE
    assert [problem.peer for problem in audited(text_of(FILE)).problems] == [FILE["convictions"][0]["told"]["signer"]]
    assert audited(text_of(HONEST)).problems == []
    assert len(read.passages) == 3
    assert [each.kept for each in read.passages] == [6, 6, 2]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_an_export_that_an_editor_saved_is_read(encoding: str) -> None:
    assert parse(json.dumps(FILE, indent=1).replace("\n", "\r\n").encode(encoding)) == parse(text_of(FILE))


@pytest.mark.parametrize("path", ALL, ids=lambda path: ".".join(map(str, path)))
def test_a_changed_field_is_noticed(path: Path) -> None:
    """At least the client's signature shows it."""
    text = text_of(changed(FILE, path, another))
    with contextlib.suppress(ConfigError):
        assert len(audited(text).problems) > len(audited(text_of(FILE)).problems)


@pytest.mark.parametrize("path", ALL, ids=lambda path: ".".join(map(str, path)))
def test_a_field_that_a_lying_client_changes_is_noticed(path: Path) -> None:
    """The hops' signatures show it, or a chain with a gap. The client's own signature does not help it."""
    try:
        text = resigned(changed(FILE, path, another))
    except ConfigError:
        return
    problems = {str(problem) for problem in audited(text).problems}
    usual = {str(problem) for problem in audited(text_of(FILE)).problems}
    if path in UNSIGNED_BY_HOPS or path == ("signature",):
        assert len(problems) == len(usual)
    else:
        assert problems - usual


def without(*path: str | int) -> Callable[[Any], Any]:
    def change(file: Any) -> Any:
        return changed(file, path[:-1], lambda of: [each for n, each in enumerate(of) if n != path[-1]])

    return change


REWRITES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a passage left out": (without("passages", 0), "no receipts"),
    "a replay left out": (without("passages", 1), r"never computed positions \[0, 6\)"),
    "a hop left out": (without("passages", 0, "receipts", 1), r"nothing joins blocks \[0, 2\) to \[4, 6\)"),
    "the first hop left out": (without("passages", 0, "receipts", 0), r"went through blocks \[2, 6\) of 6 alone"),
    "the last hop left out": (without("passages", 0, "receipts", 2), r"went through blocks \[0, 4\) of 6 alone"),
    "a hop twice": (
        lambda file: changed(file, ("passages", 0, "receipts"), lambda of: [*of, of[-1]]),
        r"nothing joins blocks \[4, 6\) to \[4, 6\)",
    ),
    "a passage twice": (lambda file: changed(file, ("passages",), lambda of: [*of, of[-1]]), "out of turn"),
    "passages in another order": (lambda file: changed(file, ("passages",), lambda of: of[::-1]), "out of turn"),
    "a rollback hidden": (
        lambda file: changed(file, ("passages", 0, "kept"), lambda _: 8),
        r"positions \[6, 8\): came before",
    ),
    "no passages": (lambda file: file | {"passages": []}, "shows nothing"),
    "replays alone": (lambda file: file | {"passages": [file["passages"][1]]}, "shows nothing"),
}


@pytest.mark.parametrize(("rewrite", "told"), REWRITES.values(), ids=REWRITES)
def test_a_lying_client_cannot_leave_out_repeat_or_reorder(rewrite: Callable[[Any], Any], told: str) -> None:
    problems = [str(problem) for problem in audited(resigned(_with_stages(rewrite(HONEST)))).problems]
    assert any(re.search(told, problem) for problem in problems), problems


def _with_stages(file: Any) -> Any:
    stages: list[Any] = []  # the remaining ones, in their new order
    for passage in file["passages"]:
        for receipt in passage["receipts"]:
            stage = HONEST["stages"][receipt["stage"]]
            if stage not in stages:
                stages.append(stage)
    rewritten = copy.deepcopy(file) | {"stages": stages}
    for passage in rewritten["passages"]:
        for receipt in passage["receipts"]:
            receipt["stage"] = stages.index(HONEST["stages"][receipt["stage"]])
    return rewritten


def test_two_receipts_of_one_step_in_the_passages_convict() -> None:
    """No book holds this: without a rollback, a hop signed another answer to the same step."""
    session = Session(parts=1)
    (receipt,) = session.step(2)
    session.book.truncate(0)
    session.position, session.step_number = 0, 0
    session.step(2)
    assert audited(text_of(session.export())).problems == []
    read = parse(text_of(session.export()))
    first = replace(read.passages[0], receipts=(receipt,), given=receipt.input_digest, got=receipt.output_digest)
    both = transcript.signed(replace(read, passages=(first, *read.passages)), CLIENT.sign)
    told = [str(problem) for problem in audit(both, is_signed).problems]
    assert any(receipt.signer in each and "signed two different receipts for step 0" in each for each in told)
    assert [each.peer for each in audit(both, is_signed).problems if each.convicts] == [receipt.signer]


@pytest.mark.parametrize("rewrite", [each for each, _ in REWRITES.values()], ids=REWRITES)
def test_what_a_client_can_do_to_its_file_convicts_nobody(rewrite: Callable[[Any], Any]) -> None:
    assert not any(each.convicts for each in audited(resigned(_with_stages(rewrite(HONEST)))).problems)


def test_a_file_of_protocol_1_is_read_and_written_as_it_was() -> None:
    session = Session(has_nonces=False)
    session.step(2)
    exported = session.export()
    assert "nonce" not in json.dumps(exported)
    assert transcript.as_json(parse(text_of(exported))) == exported
    assert audited(text_of(exported)).problems == []


def test_hops_that_went_back_without_another_epoch_are_named() -> None:
    session = Session()
    session.step(8)
    session.book.truncate(6)
    session.position = 6
    session.step(1)
    problems = audited(text_of(session.export())).problems
    assert [problem.peer for problem in problems] == [stage.hop.peer for stage in session.stages]
    assert {(problem.what, problem.positions) for problem in problems} == {
        ("computed these out of turn: no rollback came before", (6, 7))
    }


@pytest.mark.parametrize(
    "change",
    [
        lambda told: {"client": LIAR.peer},
        lambda told: {"output": digest("third").hex()},
        lambda told: {"step": told["step"] + 1},
        lambda told: {"signature": "00" * 64},
    ],
)
def test_an_accusation_without_proof_convicts_nobody(change: Callable[[Any], Any]) -> None:
    file = changed(FILE, ("convictions", 0, "told"), lambda told: told | change(told))
    (problem,) = audited(resigned(file)).problems
    assert problem.peer is None
    assert "says without proof" in problem.what


def test_receipts_that_a_lying_client_had_signed_for_another_clients_session_convict_nobody() -> None:
    """The client may open a session of the same id at the same peer, but its own id is in the receipts."""
    told = SESSION.book.convictions[0].told
    shown = replace(told, client=OTHER.peer, output_digest=digest("another"))
    theirs = SESSION.stages[0].signer
    read = parse(text_of(FILE))
    framed = replace(
        read.convictions[0],
        told=signed(replace(told, client=OTHER.peer), theirs.sign),
        shown=signed(shown, theirs.sign),
    )
    (problem,) = audit(transcript.signed(replace(read, convictions=(framed,)), CLIENT.sign), is_signed).problems
    assert problem.peer is None


# Bad files of receipts


def at(path: str, value: object) -> bytes:
    keys = tuple(int(key) if key.isdigit() else key for key in path.split("."))
    return text_of(changed(FILE, keys, lambda _: value))


REFUSED: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "not JSON"),
    "not text": (b"{\n \xff}", "line 2, byte 2: 0xff is no UTF-8: save it as UTF-8"),
    "half a character": (b"\xff\xfe\x00", "line 1, byte 1: 0x00 is no UTF-16-LE"),
    "cut": (text_of(FILE)[:-1], "not JSON"),
    "deep": (b"[" * 100_000, "not JSON"),
    "deep objects": (b'{"a":' * 100_000, "not JSON"),
    "huge": (b" " * (MOST_BYTES + 1), "at most"),
    "a number too long for Python": (b'{"format": ' + b"9" * 5000 + b"}", "not JSON"),
    "not a number": (text_of(FILE).replace(b'"version": 1', b'"version": NaN'), "not JSON"),
    "a field twice": (text_of(FILE).replace(b"{", b'{"version": 1, ', 1), "a field comes twice"),
    "a list": (b"[]", "the whole: not an object"),
    "a text": (b'"text"', "the whole: not an object"),
    "another file": (b"{}", "format: missing"),
    "another format": (at("format", "llmnode-receipts"), "format: not"),
    "a nested format": (at("format", {"a": []}), "format: not"),
    "a later version": (at("version", 2), "version: not 1, the only one that this llmnode reads"),
    "a version that is no number": (at("version", True), "version"),
    "an unknown field": (text_of(FILE | {"extra": 1}), "extra: there is no such field"),
    "an unknown field inside": (at("passages.0.receipts.1.extra", 1), "passages[0].receipts[1].extra: there is no"),
    "an unknown field in a stage": (at("stages.0.extra", 1), "stages[0].extra: there is no"),
    "an unknown field in a conviction": (at("convictions.0.told.extra", 1), "convictions[0].told.extra: there is no"),
    "passages that are none": (at("passages", {}), "passages: not a list"),
    "a passage that is none": (at("passages.0", []), "passages[0]: not an object"),
    "a passage without receipts": (at("passages.0.receipts", []), "passages[0].receipts: there is none"),
    "a fraction": (at("passages.0.start", 1.0), "passages[0].start: not a whole number"),
    "a truth": (at("passages.0.epoch", True), "passages[0].epoch: not a whole number"),
    "a negative number": (at("passages.0.step", -1), "passages[0].step: not a whole number"),
    "a number beyond 32 bits": (at("passages.0.step", 2**32), "passages[0].step: not a whole number"),
    "positions beyond 32 bits": (at("passages.0.start", 2**32 - 2), "passages[0].length: not a whole number"),
    "no positions": (at("passages.0.length", 0), "passages[0].length"),
    "more kept than there was": (at("passages.0.kept", 9), "passages[0].kept: not a whole number from 1 to 8"),
    "a replay that is a number": (at("passages.0.replay", 0), "passages[0].replay: neither true nor false"),
    "a stage that there is not": (at("passages.0.receipts.0.stage", 4), "receipts[0].stage: not a whole number"),
    "a short digest": (at("passages.0.given", "ab" * 31), "passages[0].given: not 64 hexadecimal digits"),
    "a digest in capitals": (at("passages.0.given", "AB" * 32), "passages[0].given: not 64 hexadecimal digits"),
    "a digest with spaces": (at("passages.0.given", "ab" * 31 + "  "), "passages[0].given"),
    "a digest that is a number": (at("passages.0.got", 7), "passages[0].got: not 64 hexadecimal digits"),
    "no signature": (at("passages.0.receipts.0.signature", ""), "signature: not 128 hexadecimal digits"),
    "an empty span": (at("stages.0.blocks", [2, 2]), "stages[0].blocks: not a range of blocks"),
    "a span of three": (at("stages.0.blocks", [0, 1, 2]), "stages[0].blocks"),
    "a span beyond 32 bits": (at("convictions.0.told.blocks", [0, 2**32]), "told.blocks: not a range of blocks"),
    "a peer with control characters": (at("stages.0.peer", "12D3\x1b[2J"), "stages[0].peer: not a peer id"),
    "a peer of letters elsewhere": (at("client", "Ж"), "client: not a peer id"),
    "no peer": (at("client", ""), "client: not a text of 1 to 100 characters"),
    "a very long peer": (at("client", "1" * 101), "client: not a text"),
    "a session of two stages": (at("stages.1.session", FILE["stages"][0]["session"]), "is another stage's too"),
    "a stage that did nothing": (
        text_of(FILE | {"stages": [*FILE["stages"], FILE["stages"][0] | {"session": "00" * 16}]}),
        "stages: not those of the passages, in their order",
    ),
    "an unknown dtype": (at("model.dtype", "float128"), "model.dtype: none of float32"),
    "a nested codec": (at("model.codec", ["raw"]), "model.codec: none of raw"),
    "no blocks": (at("model.blocks", 0), "model.blocks"),
    "a very long name": (at("model.name", "n" * 201), "model.name: not a text"),
}


@pytest.mark.parametrize(("text", "told"), REFUSED.values(), ids=REFUSED)
def test_what_is_no_file_of_receipts_is_refused_with_the_field_that_is_wrong(text: bytes, told: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    assert told in str(caught.value)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", sorted({path[:1] for path in ALL} | {("model", "name"), ("passages", 0, "kept")}))
def test_no_field_may_be_missing(path: Path) -> None:
    file = copy.deepcopy(FILE)
    at = file
    for key in path[:-1]:
        at = at[key]
    del at[path[-1]]
    with pytest.raises(ConfigError, match=f"{path[-1]}: missing"):
        parse(text_of(file))


json_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just("ab" * 32)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)),
    max_leaves=6,
)


@given(st.sampled_from(list(leaves(HONEST))), st.integers(0, 5), json_values)
@example((), 0, None)
def test_whatever_stands_in_a_field_is_refused_or_told(path: Path, up: int, value: object) -> None:
    path = path[: max(0, len(path) - up)]
    file = changed(HONEST, path, lambda _: value) if path else value
    with contextlib.suppress(ConfigError):
        assert as_json(parse(text_of(file))) == file
        assert audited(text_of(file)).problems or file == HONEST


@given(st.binary(max_size=100), st.integers(0, len(text_of(HONEST)) - 1))
def test_noise_in_a_file_is_refused_or_told(noise: bytes, place: int) -> None:
    text = bytearray(text_of(HONEST))
    text[place : place + len(noise)] = noise
    with contextlib.suppress(ConfigError):
        assert audited(bytes(text)).problems or json.loads(text) == HONEST
    with pytest.raises(ConfigError):
        audited(noise)


def test_a_forged_receipt_names_who_did_not_sign_it() -> None:
    read: Transcript = parse(text_of(HONEST))
    passage = read.passages[0]
    first, second, third = passage.receipts
    lying = replace(passage, receipts=(first, forged(second), third))
    (problem,) = audit(
        transcript.signed(replace(read, passages=(lying, *read.passages[1:])), CLIENT.sign), is_signed
    ).problems
    assert (problem.peer, problem.span, problem.positions) == (second.signer, second.span, (0, 8))
    assert "not its own" in problem.what
