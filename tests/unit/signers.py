"""Peers with real keys, and a session whose receipts are signed as servers do it. Nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.id import ID

from llmnode import _native
from llmnode.core.ids import Epoch, PeerId, SessionId, Step
from llmnode.core.model import ModelInfo
from llmnode.core.policy import TrustPolicy
from llmnode.core.route import Hop
from llmnode.core.span import Span, split_evenly
from llmnode.net.identity import is_signed
from llmnode.receipts.book import ReceiptBook
from llmnode.wire.chunk import Chunk
from llmnode.wire.payload import Codec
from llmnode.wire.receipt import signature_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.wire.receipt import Receipt, Sign

MODEL = ModelInfo("org/model", b"m" * 32, blocks=6, hidden_size=4, context_tokens=64)


@dataclass(frozen=True)
class Signer:
    peer: PeerId
    sign: Sign


@lru_cache
def signer(number: int) -> Signer:
    key_pair = create_new_key_pair(bytes([1 + number]) * 32)
    return Signer(PeerId(ID.from_pubkey(key_pair.public_key).to_base58()), key_pair.private_key.sign)


CLIENT, LIAR, OTHER = signer(100), signer(101), signer(102)


def signed(receipt: Receipt, sign: Sign) -> Receipt:
    return replace(receipt, signature=signature_of(receipt, sign))


def digest(*parts: object) -> bytes:
    return _native.blake3_digest(repr(parts).encode())


@dataclass
class Stage:
    """One hop's part of a session, at an honest server."""

    signer: Signer
    hop: Hop
    session: SessionId
    nonce: bytes

    def receipt(self, book: ReceiptBook, chunk: Chunk, given: bytes, put_out: bytes) -> Receipt:
        """The receipt in the form in which the client gets it."""
        unsigned = book.receipt(self.hop, self.session, chunk, given, put_out, b"", self.nonce)
        signature = signature_of(unsigned, self.signer.sign)
        return book.receipt(self.hop, self.session, chunk, given, put_out, signature, self.nonce)


@dataclass
class Session:
    """The steps of a client and its hops, recorded in `book`. All session ids and all digests are different."""

    parts: int = 3
    policy: TrustPolicy = TrustPolicy()
    epoch: int = 0
    step_number: int = 0
    position: int = 0
    made: int = 0
    has_nonces: bool = True
    book: ReceiptBook = field(init=False)
    stages: list[Stage] = field(init=False)

    def __post_init__(self) -> None:
        self.book = self.new_book()
        self.stages = [self.stage(signer(n), span) for n, span in enumerate(split_evenly(MODEL.blocks, self.parts))]

    def new_book(self) -> ReceiptBook:
        return ReceiptBook(CLIENT.peer, MODEL, Codec.RAW, self.policy, is_signed)

    def stage(self, at: Signer, span: Span) -> Stage:
        nonce = self.fresh()[:16] if self.has_nonces else b""
        return Stage(at, Hop(at.peer, span), SessionId(self.fresh()[:16]), nonce)

    def step(self, length: int = 1) -> list[Receipt]:
        receipts = self.pass_through(self.stages, self.chunk(length))
        self.book.add(receipts, receipts[0].input_digest, receipts[-1].output_digest)
        self.step_number += 1
        self.position += length
        return receipts

    def chunk(self, length: int) -> Chunk:
        return Chunk(Epoch(self.epoch), Step(self.step_number), self.position, length)

    def pass_through(self, stages: Sequence[Stage], chunk: Chunk) -> list[Receipt]:
        values = [self.fresh() for _ in range(len(stages) + 1)]
        return [
            stage.receipt(self.book, chunk, values[number], values[number + 1]) for number, stage in enumerate(stages)
        ]

    def truncate(self, position: int) -> None:
        self.epoch += 1
        self.position = position
        self.book.truncate(position)

    def fork(self) -> None:
        """Go on as a copy: at the same hops, with new session ids."""
        source, self.book = self.book, self.new_book()
        self.epoch += 1
        self.stages = [self.stage(each.signer, each.hop.span) for each in self.stages]
        self.book.become(source, self.position)

    def replace(self, index: int, *others: Signer, most: int = 8) -> None:
        """`others` replace a lost hop: they get its inputs again, and the epoch rises."""
        span = self.stages[index].hop.span
        stages = [
            self.stage(other, Span(span.start + each.start, span.start + each.end))
            for other, each in zip(others, split_evenly(len(span), len(others)), strict=True)
        ]
        self.epoch += 1
        for number, start in enumerate(range(0, self.position, most)):
            chunk = Chunk(Epoch(self.epoch), Step(number), start, min(most, self.position - start))
            receipts = self.pass_through(stages, chunk)
            self.book.add(receipts, receipts[0].input_digest, receipts[-1].output_digest, replay=True)
        self.stages[index : index + 1] = stages
        self.truncate(self.position)

    def export(self) -> dict[str, Any]:  # Any: JSON
        return self.book.export(CLIENT.sign)

    def fresh(self) -> bytes:
        self.made += 1
        return digest("made", self.made)


def forged(receipt: Receipt) -> Receipt:
    """A receipt of the right form, signed by somebody else."""
    return signed(receipt, LIAR.sign)
