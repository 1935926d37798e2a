"""Checks a transcript: every receipt is signed, and all of them join to chains without a gap.

An audit shows which peer is bound to which bytes, and that these went from hop to hop unchanged. It does not show that
a result is right, nor what anybody did with it. Some things no hop signs, and they are the client's word alone: the
model's name, its number of blocks and where its positions begin; in sessions without a nonce of the server, also that
no session id was used twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, TypeAlias

from llmnode.receipts.transcript import statement as transcript_statement
from llmnode.wire.receipt import is_proof, is_public, is_valid, statement, step_key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from llmnode.core.ids import Epoch, PeerId, SessionId, Step
    from llmnode.core.span import Span
    from llmnode.receipts.transcript import Passage, Transcript
    from llmnode.wire.receipt import Conviction, Receipt, StepKey, Verify

    Positions: TypeAlias = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Problem:
    """A fault of a transcript. `peer` is set if it concerns one peer alone. `positions` are [first, one beyond).

    It `convicts` the peer if nobody but that peer can have brought it about. Else it may be the client's doing: the
    client alone says which receipts are in the file, and in which order.
    """

    what: str
    positions: Positions | None = None
    peer: PeerId | None = None
    span: Span | None = None
    convicts: bool = False

    def __str__(self) -> str:
        subject = f"peer {self.peer} (blocks {self.span}): " if self.peer else ""
        where = f"positions {_range(self.positions)}: " if self.positions else ""
        return subject + where + self.what


@dataclass(slots=True)
class Part:
    """The share of one hop, by its receipts. `replayed` are the positions that it was given in place of a lost hop."""

    peer: PeerId
    span: Span
    receipts: int = 0
    positions: list[Positions] = field(default_factory=list)
    replayed: list[Positions] = field(default_factory=list)

    def __str__(self) -> str:
        said = [f"positions {', '.join(map(_range, self.positions))}"] if self.positions else []
        said += [f"replayed {', '.join(map(_range, self.replayed))}"] if self.replayed else []
        return (
            f"blocks {self.span}  {self.peer}  {'; '.join(said)}  ({self.receipts} receipt{'s' * (self.receipts > 1)})"
        )


@dataclass(frozen=True, slots=True)
class Audit:
    """The result of an audit. `positions` are those of the transcript, from the first that it knows."""

    positions: Positions
    parts: list[Part]
    problems: list[Problem]

    @property
    def receipts(self) -> int:
        return sum(part.receipts for part in self.parts)


def audit(transcript: Transcript, verify: Verify) -> Audit:
    """Check the whole transcript. It takes some 60 microseconds a receipt."""
    problems = [
        *_check_client(transcript, verify),
        *_check_receipts(transcript.passages, verify),
        *(problem for passage in transcript.passages for problem in _check_chain(passage, transcript.blocks)),
        *_check_positions(transcript),
        *_check_kv(transcript),
        *(problem for each in transcript.convictions for problem in _check_conviction(each, transcript, verify)),
    ]
    end = max((each.start + each.kept for each in transcript.passages if not each.replay), default=0)
    positions = transcript.first_position, max(end, transcript.first_position)
    return Audit(positions, _parts(transcript.passages), problems)


def _check_client(transcript: Transcript, verify: Verify) -> Iterator[Problem]:
    if not verify(transcript.client, transcript_statement(transcript), transcript.signature):
        yield Problem(f"the file is not as its client {transcript.client} signed it")
    if all(passage.replay for passage in transcript.passages):
        yield Problem("the file has no receipts, so it shows nothing")


def _check_receipts(passages: Iterable[Passage], verify: Verify) -> Iterator[Problem]:
    """Check the signatures, and that no hop signed two different things for one step."""
    signed: dict[StepKey, bytes] = {}
    for passage in passages:
        for receipt in passage.receipts:
            if not is_valid(receipt, verify):
                yield _about(receipt, "the signature of its receipt is not its own")
            elif signed.setdefault(step_key(receipt), statement(receipt)) != statement(receipt):
                yield _contradiction(receipt)


def _check_chain(passage: Passage, blocks: int) -> Iterator[Problem]:
    """Check that a passage went through all blocks, or a replay through its own, without a gap and unchanged."""
    positions = passage.start, passage.end
    first, last = passage.receipts[0], passage.receipts[-1]
    if first.input_digest != passage.given:
        yield _about(first, "took in something else than the client says that it was given")
    if last.output_digest != passage.got:
        yield _about(last, "signed something else than the client says that it put out")
    for before, after in pairwise(passage.receipts):
        if before.span.end != after.span.start:
            yield Problem(f"nothing joins blocks {before.span} to {after.span}", positions)
        elif before.output_digest != after.input_digest:
            what = f"what came out of blocks {before.span} at {before.signer} is not what went into {after.span} at "
            yield Problem(f"{what}{after.signer}: one of the two, or the client, does not tell the truth", positions)
    if not passage.replay and (first.span.start, last.span.end) != (0, blocks):
        yield Problem(f"went through blocks [{first.span.start}, {last.span.end}) of {blocks} alone", positions)


def _check_positions(transcript: Transcript) -> Iterator[Problem]:
    """Check that each position in force is there once."""
    reached = transcript.first_position
    for passage in transcript.passages:
        if passage.replay:
            continue
        if passage.start > reached:
            yield Problem("no receipts", (reached, passage.start))
        elif passage.start < reached:
            yield Problem("came before, and were not rolled back", (passage.start, min(reached, passage.end)))
        reached = max(reached, passage.start + passage.kept)


def _check_kv(transcript: Transcript) -> Iterator[Problem]:
    """Check that every hop went on from positions that it had computed, and went back only in a higher epoch."""
    reached: dict[SessionId, int] = {}
    latest: dict[SessionId, tuple[Epoch, Step]] = {}
    for passage in transcript.passages:
        for receipt in passage.receipts:
            name, here = receipt.session, (receipt.epoch, receipt.step)
            cached = reached.get(name, transcript.first_position)
            if receipt.start > cached:
                yield _about(receipt, f"never computed positions {_range((cached, receipt.start))} before these")
            if name in latest and (here <= latest[name] or (receipt.start < cached and here[0] == latest[name][0])):
                yield _about(receipt, "computed these out of turn: no rollback came before")
            reached[name], latest[name] = passage.end, here


def _check_conviction(conviction: Conviction, transcript: Transcript, verify: Verify) -> Iterator[Problem]:
    told = conviction.told
    if told.client == transcript.client and is_proof(told, conviction.shown, verify):
        yield _contradiction(told, f"; {conviction.by} was given the other")
    else:
        yield Problem(f"the file says without proof that {told.signer} signed two different receipts")


def _contradiction(receipt: Receipt, more: str = "") -> Problem:
    """Blames the signer only if no client can have brought an honest one to it."""
    what = f"two different receipts for step {receipt.step}"
    if is_public(receipt):
        return replace(_about(receipt, f"signed {what}{more}"), convicts=True)
    where = receipt.start, receipt.start + receipt.length
    why = "its sessions have no nonce, so the client may have used a name twice: no proof against it"
    return Problem(f"{receipt.signer} (blocks {receipt.span}) signed {what}{more}; {why}", where)


def _parts(passages: Iterable[Passage]) -> list[Part]:
    """The hops in the order in which they came; those of one route stay together."""
    parts: dict[SessionId, Part] = {}
    for passage in passages:
        for receipt in passage.receipts:
            part = parts.setdefault(receipt.session, Part(receipt.signer, receipt.span))
            part.receipts += 1
            if passage.replay:
                _extend(part.replayed, passage.start, passage.end)
            else:
                _extend(part.positions, passage.start, passage.start + passage.kept)
    return list(parts.values())


def _extend(ranges: list[Positions], start: int, end: int) -> None:
    if ranges and ranges[-1][1] == start:
        ranges[-1] = ranges[-1][0], end
    else:
        ranges.append((start, end))


def _about(receipt: Receipt, what: str) -> Problem:
    return Problem(what, (receipt.start, receipt.start + receipt.length), receipt.signer, receipt.span)


def _range(positions: Positions) -> str:
    return f"[{positions[0]}, {positions[1]})"
