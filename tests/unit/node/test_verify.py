"""`llmnode verify FILE` with files of real signatures: what it prints, and its exit status."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

from llmnode.node.cli import main
from llmnode.node.commands.verify import SHOWS
from llmnode.receipts import transcript
from llmnode.receipts.transcript import parse
from unit.signers import CLIENT, LIAR, MODEL, OTHER, Session, digest, signed, signer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A path without a file yet. The settings of the tests' user are removed."""
    monkeypatch.setenv("LLMNODE_CONFIG", os.devnull)
    for name in ("LLMNODE_JSON", "LLMNODE_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "receipts.json"


def session() -> Session:
    session = Session()
    session.step(8)
    session.truncate(6)
    session.replace(1, OTHER)
    session.step(2)
    return session


def json_of(capsys: pytest.CaptureFixture[str], file: Path, status: int) -> Any:
    assert main(["verify", str(file), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_a_good_file_says_who_computed_what_and_what_that_shows(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(json.dumps(session().export()))
    assert main(["verify", str(file)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "org/model (float32, raw), 6 blocks, positions [0, 8): 7 receipts",
        f"  blocks [0, 2)  {signer(0).peer}  positions [0, 8)  (2 receipts)",
        f"  blocks [2, 4)  {signer(1).peer}  positions [0, 6)  (1 receipt)",
        f"  blocks [4, 6)  {signer(2).peer}  positions [0, 8)  (2 receipts)",
        f"  blocks [2, 4)  {OTHER.peer}  positions [6, 8); replayed [0, 6)  (2 receipts)",
        "fine: all receipts are signed, and join without a gap",
        SHOWS,
    ]
    shown = json_of(capsys, file, 0)
    assert (shown["fine"], shown["problems"], shown["receipts"], shown["positions"]) == (True, [], 7, [0, 8])
    assert shown["parts"][3] == {
        "peer": OTHER.peer,
        "blocks": [2, 4],
        "receipts": 2,
        "positions": [[6, 8]],
        "replayed": [[0, 6]],
    }
    assert (shown["model"], shown["model_digest"]) == ("org/model", MODEL.digest.hex())


def test_a_changed_receipt_is_named_by_peer_span_and_positions(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported = session().export()
    exported["passages"][2]["receipts"][1]["output"] = digest("another").hex()
    file.write_text(json.dumps(exported))
    assert main(["verify", str(file)]) == 1
    out = capsys.readouterr().out
    place = f"peer {OTHER.peer} (blocks [2, 4)): positions [6, 8)"
    assert f"wrong: {place}: the signature of its receipt is not its own\n" in out
    assert f"wrong: the file is not as its client {CLIENT.peer} signed it\n" in out
    assert f"at {OTHER.peer} is not what went into [4, 6) at {signer(2).peer}" in out
    assert "fine" not in out
    assert out.endswith(f"{SHOWS}\n")
    shown = json_of(capsys, file, 1)
    assert not shown["fine"]
    assert {
        "peer": OTHER.peer,
        "blocks": [2, 4],
        "positions": [6, 8],
        "what": "the signature of its receipt is not its own",
        "convicts": False,
    } in shown["problems"]


def test_a_liar_is_named_with_who_showed_it(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lied_to = session()
    told, *_ = lied_to.step(1)
    shown = signed(replace(told, output_digest=digest("another")), signer(0).sign)
    lied_to.book.echo(told, lied_to.stages[1].hop, shown.input_digest, shown.output_digest, shown.signature)
    file.write_text(json.dumps(lied_to.export()))
    assert main(["verify", str(file)]) == 1
    what = f"signed two different receipts for step {told.step}; {OTHER.peer} was given the other"
    assert f"convicted: peer {told.signer} (blocks [0, 2)): positions [8, 9): {what}\n" in capsys.readouterr().out


def test_a_client_that_has_used_a_name_twice_convicts_nobody(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In protocol 1 receipts have no nonce: an honest server may have signed both."""
    framer = Session(has_nonces=False)
    told, *_ = framer.step(1)
    shown = signed(replace(told, output_digest=digest("another")), signer(0).sign)
    framer.book.echo(told, framer.stages[1].hop, shown.input_digest, shown.output_digest, shown.signature)
    file.write_text(json.dumps(framer.export()))
    assert main(["verify", str(file)]) == 1
    out = capsys.readouterr().out
    assert "convicted" not in out and "no proof against it" in out
    assert not any(each["convicts"] or each["peer"] for each in json_of(capsys, file, 1)["problems"])


def test_of_many_problems_the_terminal_gets_the_first_and_json_all(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forger = Session()
    for stage in forger.stages:
        stage.signer = LIAR
    for _ in range(10):
        forger.step()
    file.write_text(json.dumps(forger.export()))
    assert main(["verify", str(file)]) == 1
    wrong = [line for line in capsys.readouterr().out.splitlines() if line.startswith("wrong: ")]
    assert len(wrong) == 21
    assert wrong[-1] == "wrong: 10 more, see --json"
    assert len(json_of(capsys, file, 1)["problems"]) == 30


def test_what_is_no_file_of_receipts_is_one_line_that_names_the_field(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported, wrong = session().export(), session().export()
    wrong["passages"][1]["receipts"][0]["stage"] = 9
    for text, told in [
        (json.dumps(wrong), "passages[1].receipts[0].stage: not a whole number from 0 to 3"),
        (json.dumps(exported | {"version": 2}), "version: not 1, the only one that this llmnode reads"),
        (json.dumps(exported | {"a\x1b[2J": 1}), "a\\x1b[2J: there is no such field"),
        ("[" * 100_000, "not JSON"),
    ]:
        file.write_text(text)
        assert main(["verify", str(file)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"llmnode: {file}: ")
        assert told in line


def test_nothing_in_a_file_steers_the_terminal(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = replace(parse(json.dumps(session().export()).encode()), model="a\x1b[2J\nfine\ud800")
    file.write_text(json.dumps(transcript.as_json(transcript.signed(read, CLIENT.sign))))
    assert main(["verify", str(file)]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("a\\x1b[2J\\nfine\\ud800 (float32, raw)")
