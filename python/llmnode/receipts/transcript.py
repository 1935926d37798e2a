"""A session's receipts in a file, so that anybody can check later which peer computed what.

A transcript is JSON, and its client has signed the whole of it. The reader guarantees right types and sizes, and
nothing else: `audit.py` checks the content.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from llmnode.core.ids import SESSION_ID_BYTES, Epoch, PeerId, SessionId, Step
from llmnode.core.model import PRECISIONS, Profile
from llmnode.core.span import Span
from llmnode.core.user_input import decode
from llmnode.errors import ConfigError
from llmnode.wire.payload import Codec
from llmnode.wire.receipt import DIGEST_BYTES, NONCE_BYTES, SIGNATURE_BYTES, Conviction, Receipt, profile_digest

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llmnode.wire.receipt import Sign

FORMAT = "llmnode-transcript"
VERSION = 1
SIGNING_CONTEXT = b"llmnode-transcript-1:"
"""It comes before the file's content in what the client signs."""

MOST_BYTES = 16 << 20
"""The largest file. `TrustPolicy.receipts_kept` receipts take less. To read a hostile file takes 25 times its size."""

_U32 = 2**32 - 1
_LONGEST_PEER = 100
_LONGEST_NAME = 200


@dataclass(frozen=True, slots=True)
class Passage:
    """A chunk of positions that went through several hops, and the receipt of each, in their order.

    There is at least one receipt, and all are of the same step and positions. `given` and `got` are the digests of the
    first hop's input and of the last one's output, as the client knows them. The first `kept` positions are in force;
    the others were rolled back. A `replay` went to the hop in a lost one's place, and no further.
    """

    receipts: tuple[Receipt, ...]
    given: bytes
    got: bytes
    kept: int
    replay: bool = False

    @property
    def start(self) -> int:
        return self.receipts[0].start

    @property
    def end(self) -> int:
        return self.start + self.receipts[0].length


@dataclass(frozen=True, slots=True)
class Transcript:
    """A client's knowledge of one session.

    `passages` are in the order of time. It has nothing on the positions before `first_position`.
    """

    client: PeerId
    model: str
    profile: Profile
    blocks: int
    codec: Codec
    first_position: int
    passages: tuple[Passage, ...]
    convictions: tuple[Conviction, ...]
    signature: bytes = b""


def signed(transcript: Transcript, sign: Sign) -> Transcript:
    """The transcript with its client's signature. `sign` signs for that client."""
    return replace(transcript, signature=sign(statement(transcript)))


def statement(transcript: Transcript) -> bytes:
    """The bytes that the client signs."""
    content = as_json(transcript)
    del content["signature"]
    return SIGNING_CONTEXT + json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


def as_json(transcript: Transcript) -> dict[str, Any]:  # Any: JSON
    stages: dict[_Stage, int] = {}
    return {
        "format": FORMAT,
        "version": VERSION,
        "client": transcript.client,
        "model": {
            "name": transcript.model,
            "digest": transcript.profile.model_digest.hex(),
            "blocks": transcript.blocks,
            "dtype": transcript.profile.precision.name,
            "codec": str(transcript.codec),
            **({"adapter": adapter.hex()} if (adapter := transcript.profile.adapter) else {}),
        },
        "first_position": transcript.first_position,
        "passages": [_passage_json(passage, stages) for passage in transcript.passages],
        "stages": [  # in the order of their first passage; passages refer to them by number
            {
                "peer": stage.peer,
                "session": stage.session.hex(),
                **_nonce_json(stage.nonce),
                "blocks": [stage.span.start, stage.span.end],
            }
            for stage in stages
        ],
        "convictions": [
            {"told": _receipt_json(each.told), "shown": _receipt_json(each.shown), "by": each.by}
            for each in transcript.convictions
        ],
        "signature": transcript.signature.hex(),
    }


def parse(text: bytes) -> Transcript:
    """Read the content of a file of any origin. Raises ConfigError, which names the field."""
    if len(text) > MOST_BYTES:
        raise ConfigError(f"a transcript has at most {MOST_BYTES} bytes")
    try:
        values = json.loads(decode(text), object_pairs_hook=_without_repeats, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # no JSON, a number beyond Python's limit, too deep
        raise ConfigError(f"not JSON ({error})") from error
    top = _Fields(values, "")
    if top.take("format") != FORMAT:
        raise ConfigError(f"format: not {FORMAT!r}, so this is no file of receipts")
    if (version := top.take("version")) != VERSION or type(version) is not int:
        raise ConfigError(f"version: not {VERSION}, the only one that this llmnode reads")
    client = top.peer("client")
    model = top.object("model")
    name, digest, blocks = model.text("name", _LONGEST_NAME), model.digest("digest"), model.number("blocks", 1)
    precision, codec = PRECISIONS[model.choice("dtype", PRECISIONS)], Codec(model.choice("codec", list(Codec)))
    profile = Profile(digest, precision, model.digest("adapter") if "adapter" in model else None)
    model.end()
    reading = _Reading(client, profile_digest(profile, codec), _read_stages(top.objects("stages")))
    transcript = Transcript(
        client,
        name,
        profile,
        blocks,
        codec,
        top.number("first_position", 0),
        tuple(reading.passage(each) for each in top.objects("passages")),
        tuple(reading.conviction(each) for each in top.objects("convictions")),
        top.digest("signature", SIGNATURE_BYTES),
    )
    top.end()
    if as_json(transcript) != values:
        raise ConfigError("stages: not those of the passages, in their order")
    return transcript


@dataclass(frozen=True, slots=True)
class _Stage:
    """The fields that all receipts of one hop share."""

    peer: PeerId
    session: SessionId
    span: Span
    nonce: bytes


def _nonce_json(nonce: bytes) -> dict[str, str]:
    return {"nonce": nonce.hex()} if nonce else {}


def _passage_json(passage: Passage, stages: dict[_Stage, int]) -> dict[str, Any]:
    first = passage.receipts[0]
    return {
        "epoch": first.epoch,
        "step": first.step,
        "start": first.start,
        "length": first.length,
        "kept": passage.kept,
        "replay": passage.replay,
        "given": passage.given.hex(),
        "got": passage.got.hex(),
        "receipts": [
            {
                "stage": stages.setdefault(_Stage(each.signer, each.session, each.span, each.nonce), len(stages)),
                "input": each.input_digest.hex(),
                "output": each.output_digest.hex(),
                "signature": each.signature.hex(),
            }
            for each in passage.receipts
        ],
    }


def _receipt_json(receipt: Receipt) -> dict[str, Any]:
    return {
        "signer": receipt.signer,
        "client": receipt.client,
        "session": receipt.session.hex(),
        **_nonce_json(receipt.nonce),
        "epoch": receipt.epoch,
        "step": receipt.step,
        "start": receipt.start,
        "length": receipt.length,
        "blocks": [receipt.span.start, receipt.span.end],
        "profile": receipt.profile.hex(),
        "input": receipt.input_digest.hex(),
        "output": receipt.output_digest.hex(),
        "signature": receipt.signature.hex(),
    }


def _read_stages(stages: Sequence[_Fields]) -> list[_Stage]:
    read: dict[SessionId, _Stage] = {}
    for each in stages:
        session = SessionId(each.digest("session", SESSION_ID_BYTES))
        stage = _Stage(each.peer("peer"), session, each.span("blocks"), each.nonce())
        if stage.session in read:
            raise each.error("session", "is another stage's too")
        each.end()
        read[stage.session] = stage
    return list(read.values())


@dataclass(frozen=True, slots=True)
class _Reading:
    """The values that a file has once for all of its passages."""

    client: PeerId
    profile: bytes
    stages: Sequence[_Stage]

    def passage(self, fields: _Fields) -> Passage:
        epoch, step, start = fields.number("epoch", 0), fields.number("step", 0), fields.number("start", 0)
        length = fields.number("length", 1, _U32 - start)
        receipts: list[Receipt] = []
        for each in fields.objects("receipts"):
            stage = self.stages[each.number("stage", 0, len(self.stages) - 1)]
            receipts.append(
                Receipt(
                    stage.peer,
                    self.client,
                    stage.session,
                    Epoch(epoch),
                    Step(step),
                    start,
                    length,
                    stage.span,
                    self.profile,
                    each.digest("input"),
                    each.digest("output"),
                    each.digest("signature", SIGNATURE_BYTES),
                    stage.nonce,
                )
            )
            each.end()
        if not receipts:
            raise fields.error("receipts", "there is none")
        given, got = fields.digest("given"), fields.digest("got")
        passage = Passage(tuple(receipts), given, got, fields.number("kept", 1, length), fields.flag("replay"))
        fields.end()
        return passage

    def conviction(self, fields: _Fields) -> Conviction:
        told, shown = _read_receipt(fields.object("told")), _read_receipt(fields.object("shown"))
        conviction = Conviction(told, shown, fields.peer("by"))
        fields.end()
        return conviction


def _read_receipt(fields: _Fields) -> Receipt:
    start = fields.number("start", 0)
    receipt = Receipt(
        fields.peer("signer"),
        fields.peer("client"),
        SessionId(fields.digest("session", SESSION_ID_BYTES)),
        Epoch(fields.number("epoch", 0)),
        Step(fields.number("step", 0)),
        start,
        fields.number("length", 1, _U32 - start),
        fields.span("blocks"),
        fields.digest("profile"),
        fields.digest("input"),
        fields.digest("output"),
        fields.digest("signature", SIGNATURE_BYTES),
        fields.nonce(),
    )
    fields.end()
    return receipt


class _Fields:
    """One JSON object. Each field is taken once. A field of a wrong form raises ConfigError."""

    def __init__(self, value: Any, where: str) -> None:  # Any: a file may hold anything
        if type(value) is not dict:
            raise ConfigError(f"{where or 'the whole'}: not an object")
        self._rest: dict[str, Any] = dict(value)
        self._where = where

    def __contains__(self, name: str) -> bool:
        return name in self._rest

    def error(self, name: str, what: str) -> ConfigError:
        return ConfigError(f"{self._path(name)}: {what}")

    def take(self, name: str) -> Any:
        if name not in self._rest:
            raise self.error(name, "missing")
        return self._rest.pop(name)

    def number(self, name: str, low: int, high: int = _U32) -> int:
        value = self.take(name)
        if type(value) is not int or not low <= value <= high:
            raise self.error(name, f"not a whole number from {low} to {high}")
        return value

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if type(value) is not bool:
            raise self.error(name, "neither true nor false")
        return value

    def text(self, name: str, longest: int) -> str:
        value = self.take(name)
        if type(value) is not str or not 1 <= len(value) <= longest:
            raise self.error(name, f"not a text of 1 to {longest} characters")
        return value

    def choice(self, name: str, choices: Collection[str]) -> str:
        value = self.take(name)
        if type(value) is not str or value not in choices:
            raise self.error(name, f"none of {', '.join(choices)}")
        return value

    def peer(self, name: str) -> PeerId:
        value = self.text(name, _LONGEST_PEER)
        if not (value.isascii() and value.replace("-", "").isalnum()):  # peers in memory have dashes
            raise self.error(name, "not a peer id")
        return PeerId(value)

    def digest(self, name: str, size: int = DIGEST_BYTES) -> bytes:
        """A digest, or other `size` bytes without a meaning of their own."""
        value = self.take(name)
        if type(value) is str and len(value) == 2 * size:
            try:
                read = bytes.fromhex(value)
            except ValueError:
                read = b""
            if read.hex() == value:
                return read
        raise self.error(name, f"not {2 * size} hexadecimal digits")

    def nonce(self) -> bytes:
        """It is left out in protocol 1."""
        return self.digest("nonce", NONCE_BYTES) if "nonce" in self else b""

    def span(self, name: str) -> Span:
        value = self.take(name)
        if type(value) is list and len(value) == 2 and all(type(edge) is int for edge in value):
            start, end = value
            if 0 <= start < end <= _U32:
                return Span(start, end)
        raise self.error(name, "not a range of blocks, [START, END]")

    def object(self, name: str) -> _Fields:
        return _Fields(self.take(name), self._path(name))

    def objects(self, name: str) -> list[_Fields]:
        values = self.take(name)
        if type(values) is not list:
            raise self.error(name, "not a list")
        return [_Fields(value, f"{self._path(name)}[{number}]") for number, value in enumerate(values)]

    def end(self) -> None:
        """Raises ConfigError if a field is left that was not taken."""
        for name in self._rest:
            raise self.error(name[:_LONGEST_NAME], "there is no such field")

    def _path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise ValueError("a field comes twice")
    return values


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is no number of JSON")
