"""The receipts of one inference session: checked with each step, and kept to be shown.

The session reports each chunk that arrived, was replayed or was rolled back. The book builds receipts out of what the
client asked for and saw itself, so that only signatures are left to check. It checks them in batches, in a thread. It
knows no connection.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from itertools import chain, pairwise, takewhile
from typing import TYPE_CHECKING, Any, TypeAlias

import trio

from llmnode.errors import IntegrityError, LocalProtocolError
from llmnode.receipts import transcript
from llmnode.receipts.transcript import Passage, Transcript
from llmnode.wire.receipt import Conviction, Receipt, is_proof, is_valid, profile_digest

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from llmnode.core.ids import PeerId, SessionId
    from llmnode.core.model import ModelInfo
    from llmnode.core.policy import TrustPolicy
    from llmnode.core.route import Hop
    from llmnode.wire.chunk import Chunk
    from llmnode.wire.payload import Codec
    from llmnode.wire.receipt import Sign, Verify

    Run: TypeAlias = Callable[..., Awaitable[Any]]
"""Calls a function with arguments, and returns its result, whose type the caller knows."""

_MOST_CONVICTIONS = 16
"""A session keeps this number of proofs. Each conviction is reported when it is found, also beyond it."""


class ReceiptBook:
    """The book knows nothing of the positions before `position`.

    `client` is our own id, as the hops know us. `run` runs slow calls off the event loop.
    One task at a time may use the book. Only `verify_pending` may run beside it.
    """

    def __init__(
        self,
        client: PeerId,
        model: ModelInfo,
        codec: Codec,
        policy: TrustPolicy,
        verify: Verify,
        run: Run = trio.to_thread.run_sync,
        position: int = 0,
    ) -> None:
        self.convictions: list[Conviction] = []
        self._client = client
        self._model = model
        self._codec = codec
        self._most = policy.receipts_kept
        self._verify = verify
        self._run = run
        self._profile = profile_digest(model.profile, codec)
        # In the order of time. So positions rise, but for replays.
        self._entries: deque[_Entry] = deque()
        self._inherited: list[_Entry] = []  # from the book of the session that was copied, until they are verified
        self._receipts = 0
        self._first_position = self._position = position

    @property
    def pending(self) -> int:
        """The number of passages whose signatures have not been checked."""
        return len(self._pending())

    @property
    def verified(self) -> int:
        """The first position without a verified signature of every hop that computed it."""
        entries = chain(self._inherited, self._entries)
        others = (each.passage.start for each in entries if not (each.verified or each.passage.replay))
        return next(others, self._position)

    def receipt(
        self,
        hop: Hop,
        session: SessionId,
        chunk: Chunk,
        input_digest: bytes,
        output_digest: bytes,
        signature: bytes,
        nonce: bytes = b"",
    ) -> Receipt:
        """The receipt of `hop` for a chunk, with the `signature` that it sent.

        `session` is the id at that hop, and `nonce` is the hop's own for it.

        Raises IntegrityError if the signature has a wrong form. Whether it is genuine is checked later.
        """
        try:
            return Receipt(
                hop.peer,
                self._client,
                session,
                chunk.epoch,
                chunk.step,
                chunk.start,
                chunk.length,
                hop.span,
                self._profile,
                input_digest,
                output_digest,
                signature,
                nonce,
            )
        except ValueError as error:
            raise IntegrityError(f"sent no receipt: {error}", peer=hop.peer, span=hop.span) from error

    async def check(self, receipts: Sequence[Receipt]) -> None:
        """Check signatures now. Raises IntegrityError for the first bad one."""
        for receipt in receipts:
            if not await self._run(is_valid, receipt, self._verify):
                raise _unsigned(receipt)

    def add(
        self, receipts: Sequence[Receipt], given: bytes, got: bytes, *, replay: bool = False, verified: bool = False
    ) -> None:
        """Add a chunk that has passed the hops that signed `receipts`, in their order.

        `given` and `got` are the digests of the first hop's input and of the last one's output. A `replay` went to the
        hop that takes a lost one's place, and the session has its positions already. If `verified`, `check` has passed
        the receipts. Raises IntegrityError if a hop has signed nothing, or if its input differs from the output of the
        hop before.
        """
        passage = Passage(tuple(receipts), given, got, receipts[0].length, replay)
        self._check(passage)
        if not replay:
            if passage.start != self._position:
                raise LocalProtocolError(f"receipts for position {passage.start}, the book is at {self._position}")
            self._position = passage.end
        self._entries.append(_Entry(passage, checked=verified, verified=verified))
        self._receipts += len(receipts)
        while self._receipts > self._most and self._entries[0].checked:
            self._drop_oldest()

    def truncate(self, position: int) -> None:
        """Positions from `position` on are void at every hop. All that follows has a higher epoch."""
        if position > self._position:
            raise LocalProtocolError(f"cannot go back to position {position} from {self._position}")
        self._inherited = [each for each in self._inherited if each.passage.start < position]
        kept: list[_Entry] = []
        while self._entries:
            entry = self._entries.pop()
            passage = entry.passage
            if passage.start >= position:
                self._receipts -= len(passage.receipts)
                continue
            kept.append(entry)
            if not passage.replay:  # every passage before it ends where it starts, or earlier
                entry.passage = replace(passage, kept=position - passage.start)
                break
        self._entries.extend(reversed(kept))
        self._position = position
        self._first_position = min(self._first_position, position)

    def become(self, source: ReceiptBook | None, position: int) -> None:
        """The session has become a copy of another one, up to `position`, and goes on from there.

        The receipts of these positions stay in `source`. Those that are not verified yet are verified here too.
        """
        self._entries.clear()
        self._receipts = 0
        self._first_position = self._position = position
        unverified = [*source._inherited, *source._entries] if source is not None else []
        self._inherited = [
            _Entry(each.passage) for each in unverified if not each.verified and each.passage.start < position
        ]

    def echo(
        self, told: Receipt, by: Hop, input_digest: bytes, output_digest: bytes, signature: bytes
    ) -> Conviction | None:
        """Compare two statements of one hop about one step: to us (`told`), and to the next hop (`by`).

        `by` echoes the input digest and the signature that came with its input. `output_digest` is the digest of that
        input. Returns the proof, and keeps it, if the hop before signed two different things. Raises IntegrityError if
        `by` cannot show that its input came from that hop, or if `told` is not signed: then nothing is proved.
        It is cheap unless the two differ. Do not call it for an input that came from that hop's log, or from us.
        """
        try:
            shown = replace(told, input_digest=input_digest, output_digest=output_digest, signature=signature)
        except ValueError:
            shown = None
        if shown == told:
            return None
        if shown is None or not is_valid(shown, self._verify):
            what = f"computed what it cannot show to be from {told.signer}"
            raise IntegrityError(what, peer=by.peer, span=by.span, suspects=(told.signer, by.peer))
        if not is_valid(told, self._verify):
            raise _unsigned(told)
        if not is_proof(told, shown, self._verify):
            return None  # it signed the same thing twice
        conviction = Conviction(told, shown, by.peer)
        if len(self.convictions) < _MOST_CONVICTIONS:
            self.convictions.append(conviction)
        return conviction

    def taken_in(self, session: SessionId) -> list[TakenIn]:
        """The inputs that a hop has signed for, without those rolled back. `session` is the id at that hop."""
        chunks: list[TakenIn] = []
        for entry in self._entries:
            giver: Receipt | None = None
            for receipt in entry.passage.receipts:
                if receipt.session == session:
                    while chunks and chunks[-1].start + chunks[-1].length > receipt.start:
                        chunks.pop()  # the whole chunk was rolled back, or a part of it
                    from_ = giver.session if giver else None
                    chunks.append(TakenIn(receipt.start, receipt.length, receipt.input_digest, from_))
                giver = receipt
        return chunks

    async def verify_pending(self) -> None:
        """Check the signatures of all passages that were added until now, in a thread: some 60 microseconds each.

        Raises IntegrityError for the first bad one, and only once. Then no peer can be held to the positions from
        `verified` on, until they are rolled back. A replay with a bad signature is forgotten, since its hop must go.
        """
        batch = self._pending()
        if not batch:
            return
        passages = [each.passage for each in batch]
        good, bad = await self._run(_verify_all, passages, self._verify)
        for entry in batch[:good]:
            entry.checked = entry.verified = True
        self._inherited = [each for each in self._inherited if not each.verified]
        if bad is not None:
            entry = batch[good]
            entry.checked = True
            if entry.passage.replay and entry in self._entries:
                self._entries.remove(entry)
                self._receipts -= len(entry.passage.receipts)
            raise _unsigned(bad)

    def export(self, sign: Sign) -> dict[str, Any]:  # Any: JSON
        """The whole book as a transcript, signed by us. `llmnode verify` reads it."""
        return transcript.as_json(
            transcript.signed(
                Transcript(
                    self._client,
                    self._model.name,
                    self._model.profile,
                    self._model.blocks,
                    self._codec,
                    self._first_position,
                    tuple(each.passage for each in self._entries),
                    tuple(self.convictions),
                ),
                sign,
            )
        )

    def _check(self, passage: Passage) -> None:
        for receipt in passage.receipts:
            if not receipt.signature:
                raise _unsigned(receipt)
        for before, after in pairwise(passage.receipts):
            if before.output_digest != after.input_digest:
                suspects = before.signer, after.signer
                what = f"took in something else than {before.signer} put out"
                raise IntegrityError(what, peer=after.signer, span=after.span, suspects=suspects)

    def _pending(self) -> list[_Entry]:
        """The inherited passages and those at the end. All before them have been checked."""
        own = list(takewhile(lambda each: not each.checked, reversed(self._entries)))[::-1]
        return [each for each in self._inherited if not each.checked] + own

    def _drop_oldest(self) -> None:
        passage = self._entries.popleft().passage
        self._receipts -= len(passage.receipts)
        if not passage.replay:
            self._first_position = passage.start + passage.kept


@dataclass(frozen=True, slots=True)
class TakenIn:
    """The input of one hop in one chunk. `giver` is the session id of the hop that has signed it as its output; None if
    the input came from us, or out of a log.
    """

    start: int
    length: int
    digest: bytes
    giver: SessionId | None


@dataclass(slots=True, eq=False)
class _Entry:
    """A passage in the book. It is `verified` if all its signatures are good. Once `checked`, it may be forgotten."""

    passage: Passage
    checked: bool = False
    verified: bool = False


def _verify_all(passages: Sequence[Passage], verify: Verify) -> tuple[int, Receipt | None]:
    """The number of passages before the first bad one, and its receipt whose signature is wrong."""
    for number, passage in enumerate(passages):
        for receipt in passage.receipts:
            if not is_valid(receipt, verify):
                return number, receipt
    return len(passages), None


def _unsigned(receipt: Receipt) -> IntegrityError:
    positions = f"[{receipt.start}, {receipt.start + receipt.length})"
    return IntegrityError(f"did not sign positions {positions}", peer=receipt.signer, span=receipt.span)
