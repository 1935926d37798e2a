"""The receipts of one inference session: who computed what, checked off the way of a step, and kept to be shown.

The session tells what landed, what was replayed and what was rolled back; it builds receipts out of what it asked for
and saw itself, so that only signatures are left to check. These take a thread, a batch at a time. Knows no connection.
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
    """Calls a function with arguments, and gives what it returns: what that is, the caller knows."""

_MOST_CONVICTIONS = 16
"""A session that has met more liars keeps these proofs; each was reported when it was found."""


class ReceiptBook:
    """`client` is our own id, as the hops know us; `run` runs what takes long, off the event loop. Of
    the positions before `position` it knows nothing.

    Not for several tasks at once, but for `verify_pending`.
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
        # In the order of time, so the positions of those that are no replays go up.
        self._entries: deque[_Entry] = deque()
        self._inherited: list[_Entry] = []  # from another session's book, until they are verified
        self._receipts = 0
        self._first_position = self._position = position

    @property
    def pending(self) -> int:
        """Passages whose signatures have not been checked."""
        return len(self._pending())

    @property
    def verified(self) -> int:
        """The positions before this one were computed by whoever says so: all of their receipts are signed."""
        entries = chain(self._inherited, self._entries)
        others = (each.passage.start for each in entries if not (each.verified or each.passage.replay))
        return next(others, self._position)

    def receipt(
        self, hop: Hop, session: SessionId, chunk: Chunk, input_digest: bytes, output_digest: bytes, signature: bytes
    ) -> Receipt:
        """What `hop`, whose own name of the session is `session`, must have signed to have sent `signature`.

        Raises IntegrityError for what is no signature.
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
            )
        except ValueError as error:
            raise IntegrityError(f"sent no receipt: {error}", peer=hop.peer, span=hop.span) from error

    async def check(self, receipts: Sequence[Receipt]) -> None:
        """Check signatures at once. Raises IntegrityError for the first bad one."""
        for receipt in receipts:
            if not await self._run(is_valid, receipt, self._verify):
                raise _unsigned(receipt)

    def add(
        self, receipts: Sequence[Receipt], given: bytes, got: bytes, *, replay: bool = False, verified: bool = False
    ) -> None:
        """A chunk has passed the hops that signed `receipts`, in their order.

        `given` and `got` are the digests of what the first was given and the last put out. A `replay` went to who takes
        a lost hop's place, and its positions stand already; if `verified`, `check` has passed the receipts. Raises
        IntegrityError if a hop has signed nothing, or took in something else than the one before put out.
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
        """Positions from `position` on are void, at every hop; what follows is of a higher epoch."""
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
            if not passage.replay:  # all before it ends where it starts, or earlier
                entry.passage = replace(passage, kept=position - passage.start)
                break
        self._entries.extend(reversed(kept))
        self._position = position
        self._first_position = min(self._first_position, position)

    def become(self, source: ReceiptBook | None, position: int) -> None:
        """The session has become a copy of another one, up to `position`, and goes on from there.

        Who computed these positions is in `source`. What was not verified there is verified here too.
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
        """What `by` was given by the hop before it, against what that hop `told` us about the same step.

        `by` echoes the input digest and signature that came with its input, and `output_digest` is that of its input.
        Returns the proof, which is kept, if the hop before told the two different things. Raises IntegrityError if `by`
        cannot show that it has its input from there, or if what we were told is not signed: then nothing is proved.
        Costs nothing unless the two differ. Not for input that `by` had out of that hop's log, or from us.
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
            return None  # the same, signed twice
        conviction = Conviction(told, shown, by.peer)
        if len(self.convictions) < _MOST_CONVICTIONS:
            self.convictions.append(conviction)
        return conviction

    def taken_in(self, session: SessionId) -> list[TakenIn]:
        """What a hop, by its own name of the session, has signed to have computed, of what still stands whole."""
        chunks: list[TakenIn] = []
        for entry in self._entries:
            giver: Receipt | None = None
            for receipt in entry.passage.receipts:
                if receipt.session == session:
                    while chunks and chunks[-1].start + chunks[-1].length > receipt.start:
                        chunks.pop()  # rolled back, all or in part
                    from_ = giver.session if giver else None
                    chunks.append(TakenIn(receipt.start, receipt.length, receipt.input_digest, from_))
                giver = receipt
        return chunks

    async def verify_pending(self) -> None:
        """Check the signatures of all that was added until now, in a thread: some 60 microseconds each.

        Raises IntegrityError for the first bad one, once: nobody can be held to the positions from `verified` on, until
        they are rolled back. A replay with a bad one is forgotten: its hop must go.
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
        """All that is kept as a transcript, signed by us: what `llmnode verify` reads."""
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
        """Those at the end, and what is inherited: what came before has been checked."""
        own = list(takewhile(lambda each: not each.checked, reversed(self._entries)))[::-1]
        return [each for each in self._inherited if not each.checked] + own

    def _drop_oldest(self) -> None:
        passage = self._entries.popleft().passage
        self._receipts -= len(passage.receipts)
        if not passage.replay:
            self._first_position = passage.start + passage.kept


@dataclass(frozen=True, slots=True)
class TakenIn:
    """The input of one hop in one chunk. `giver` is the hop that has signed to have put it out, by its own name of the
    session; None if it came from us, or out of a log.
    """

    start: int
    length: int
    digest: bytes
    giver: SessionId | None


@dataclass(slots=True, eq=False)
class _Entry:
    """A passage in the book. What is `checked` may be forgotten; it is `verified` if all its signatures are good."""

    passage: Passage
    checked: bool = False
    verified: bool = False


def _verify_all(passages: Sequence[Passage], verify: Verify) -> tuple[int, Receipt | None]:
    """How many passages are good before the first bad one, and its receipt that is not signed."""
    for number, passage in enumerate(passages):
        for receipt in passage.receipts:
            if not is_valid(receipt, verify):
                return number, receipt
    return len(passages), None


def _unsigned(receipt: Receipt) -> IntegrityError:
    positions = f"[{receipt.start}, {receipt.start + receipt.length})"
    return IntegrityError(f"did not sign positions {positions}", peer=receipt.signer, span=receipt.span)
