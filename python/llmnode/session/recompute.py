"""Another peer computes a chunk of a session again: its inputs are collected, and two outputs are compared.

Inputs and output of a hop come out of the logs of the hop before and of the hop itself, unless they are here. They must
have the digests that were signed for them in the step. This file knows no verdict.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import trio

from llmnode import _native
from llmnode.core.ids import Epoch, Step
from llmnode.core.model import SAME
from llmnode.core.priority import Priority
from llmnode.errors import IntegrityError, NoRoute, PeerError, PeerRefused
from llmnode.session.chunk_run import run_chunk
from llmnode.session.hop import SessionHop
from llmnode.wire.chunk import Chunk
from llmnode.wire.log import PayloadLog
from llmnode.wire.payload import Codec, decode_hidden

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import PeerId
    from llmnode.core.model import Precision
    from llmnode.core.span import Span
    from llmnode.receipts.book import ReceiptBook, Run, TakenIn
    from llmnode.session.peer_finder import PeerFinder
    from llmnode.wire.chunk import Hidden
    from llmnode.wire.frame import Buffer
    from llmnode.wire.session_terms import SessionTerms

_TOLERANCE = {
    "float32": {Codec.RAW: 1e-4, Codec.FP16: 1e-3, Codec.BF16: 8.4e-3, Codec.INT8: 1.5e-2},
    "float16": {Codec.RAW: 0.018, Codec.FP16: 0.018, Codec.BF16: 0.03, Codec.INT8: 0.052},
    "bfloat16": {Codec.RAW: 0.15, Codec.FP16: 0.15, Codec.BF16: 0.15, Codec.INT8: 0.16},
}
"""Four times the largest deviation that was measured between two ways to compute SmolLM2 (`tests/bench/FIGURES.md`).

For float32 and raw that was 7e-6; it is 1e-4, for processors of other kinds. In other codecs it is one step of the
codec at least: a position may be nearly one large value, which goes to either of two steps by the last bit of a sum. A
mixture of experts was not measured: where its router is near a tie, honest peers may differ by more.
"""
_INT8_TOLERANCE = 0.5
"""The tolerance for weights of 8 bits, in any dtype and codec. Inputs are rounded to 8 bits too. One that is half-way
between two steps goes to either by the last bit of a sum. Most positions are then 0.03 to 0.06 apart, and some 0.2.
"""
_KV_TOLERANCE = {SAME: 0.0, "int8": 0.12}
"""The least tolerance for each format of KV, in any codec, for the same reason: four times the largest deviation."""
_LAST_STEP = 2**32 - 1
_MOST_ASKED = 4
"""Peers that are asked for one opinion. A peer that cannot or will not give it costs a timeout at most."""


@dataclass(frozen=True, slots=True)
class Sample:
    """The output of `hop` for one chunk. Its inputs are in the log of `origin`: the hop before, or the client's own."""

    chunk: Chunk
    origin: SessionHop | PayloadLog
    hop: SessionHop
    output: Hidden

    @property
    def end(self) -> int:
        return self.chunk.start + self.chunk.length


@dataclass(frozen=True, slots=True)
class Opinion:
    """A peer's output for a chunk: (length, hidden_size) in fp32."""

    peer: PeerId
    output: Buffer
    group: str
    """The address group of the peer."""


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A sample with all inputs of its hop, from position 0 on, and the hop's output."""

    sample: Sample
    given: PayloadLog
    own: Opinion
    is_proved: bool
    """The hop has signed that it computed just these inputs. Otherwise the hop before may show other ones than it gave,
    or it is a replacement, and its log is its own computation."""

    @property
    def span(self) -> Span:
        return self.sample.hop.hop.span


class Recomputer:
    """Serves one session, and reads its `book`. `run` runs long computations off the event loop."""

    def __init__(self, terms: SessionTerms, others: PeerFinder, book: ReceiptBook, run: Run) -> None:
        self._model = terms.model
        self._form = terms.form
        self._policy = terms.policy
        # The hop has no neighbours, and no user waits for it.
        alone = replace(
            terms.policy,
            push=replace(terms.policy.push, enabled=False),
            recovery=replace(terms.policy.recovery, upstream_logs=False),
            priority=Priority.BATCH,
        )
        self._alone = replace(terms, policy=alone)
        self._others = others
        self._book = book
        self._run = run
        self._asked = 0

    @property
    def can_cut(self) -> bool:
        """Whether positions can be cut out of a log without a change of their bytes."""
        return self._form.codec is not Codec.INT8 or not self._form.rows_share_blocks

    async def collect(self, sample: Sample) -> Exhibit:
        """Raises the PeerError of a hop that does not show its log, or shows another one. It is the hop's failure."""
        chunk, output = sample.chunk, sample.output
        payload = output.payload
        if payload is None:
            again = await self._logged(sample.hop, chunk, chunk.start, chunk.length)
            if (payload := again.payload) is None or again.digest != output.digest:
                raise sample.hop.blame(IntegrityError("has logged something else than it signed"))
        group = sample.hop.connection.source.group
        own = Opinion(sample.hop.hop.peer, self._decoded(payload, chunk.length), group)
        if isinstance(before := sample.origin, PayloadLog):
            return Exhibit(sample, before, own, is_proved=True)
        given = PayloadLog(self._form)
        for start, length in self._pieces(sample.end):
            again = await self._logged(before, chunk, start, length)
            if again.payload is None:
                raise before.blame(IntegrityError("does not show what it has logged"))
            given.append(again.payload, length)
        signed = [each for each in self._book.taken_in(sample.hop.session) if each.start < sample.end]
        others = await self._run(_others_than_signed, given, signed)
        if any(each.giver == before.session for each in others):
            raise before.blame(IntegrityError("has logged something else than it signed"))
        return Exhibit(sample, given, own, is_proved=not others and _reach(signed) == sample.end)

    async def ask(self, exhibit: Exhibit, asked: set[PeerId], others: Sequence[Opinion]) -> Opinion | None:
        """The opinion of a peer that is not in `asked`; all that were asked are put there. None if there is none.

        If possible it comes from another address group than those of the `others`.
        A peer that refuses, fails or is slow is passed over: no peer is obliged to answer.
        """
        groups = {each.group for each in others}
        for _ in range(_MOST_ASKED):
            with trio.move_on_after(self._policy.spot_checks.timeout_s):
                try:
                    found, connection = await self._others.find_twin(exhibit.span, asked, groups)
                    asked.add(found.peer)
                    hop = SessionHop(found, connection, replace(self._alone, max_length=exhibit.sample.end))
                    return Opinion(found.peer, await self._compute(exhibit, hop), connection.source.group)
                except NoRoute:
                    return None
                except PeerError as error:
                    if error.peer is not None:
                        asked.add(error.peer)
        return None

    async def deviation(self, one: Opinion, other: Opinion) -> float:
        """The largest of `deviations`."""
        found: list[float] = await self._run(deviations, one.output, other.output, self._model.hidden_size)
        return max(found)

    async def _compute(self, exhibit: Exhibit, hop: SessionHop) -> Buffer:
        """From position 0 on, as it has no KV of this session."""
        sample, made = exhibit.sample, PayloadLog(self._form)
        try:
            await hop.carry_out(hop.open(Epoch(0), sample.end))
            for step, (start, length) in enumerate(self._pieces(sample.end)):
                chunk = Chunk(Epoch(0), Step(step), start, length)
                result = await run_chunk([hop], chunk, exhibit.given.read(start, length), self._alone.policy)
                assert result.output.payload is not None, "it was told to keep no outputs"
                made.append(result.output.payload, length)
        finally:
            with trio.move_on_after(self._policy.open_timeout_s, shield=True):
                await hop.close()
        return self._decoded(made.read(sample.chunk.start, sample.chunk.length), sample.chunk.length)

    async def _logged(self, hop: SessionHop, chunk: Chunk, start: int, length: int) -> Hidden:
        """Asked for under a number that no step of the session has, so that no answers are mixed up."""
        question = Chunk(chunk.epoch, Step(_LAST_STEP - self._asked), start, length)
        self._asked += 1
        with hop.blamed():
            try:
                return await hop.fetch(question)
            except PeerRefused as refusal:  # it has to have it: for a recovery too
                raise IntegrityError(f"does not show what it has logged: {refusal.reason}") from refusal

    def _pieces(self, end: int) -> Sequence[tuple[int, int]]:
        most = self._policy.chunk_tokens
        return [(start, min(most, end - start)) for start in range(0, end, most)]

    def _decoded(self, payload: Buffer, length: int) -> Buffer:
        return decode_hidden(payload, self._form.codec, length * self._model.hidden_size)


def tolerance(precision: Precision, codec: Codec) -> float:
    """The largest of `deviations` between honest peers that compute in `precision` and send in `codec`."""
    if precision.quant == "int8":
        return _INT8_TOLERANCE
    return max(_KV_TOLERANCE[precision.kv_dtype], _TOLERANCE[precision.dtype][codec])


def deviations(one: Buffer, other: Buffer, hidden_size: int) -> list[float]:
    """The relative L2 error at each position of two fp32 outputs. Infinite where it is no number."""
    import numpy as np

    rows = [np.frombuffer(each, "<f4").reshape(-1, hidden_size) for each in (one, other)]
    same = (rows[0] == rows[1]).all(axis=1) | (rows[0].view("<u4") == rows[1].view("<u4")).all(axis=1)
    with np.errstate(all="ignore"):
        wide = [each.astype(np.float64) for each in rows]
        size = np.maximum(*(np.linalg.norm(each, axis=1) for each in wide))
        error = np.linalg.norm(wide[0] - wide[1], axis=1) / size
    found: list[float] = np.where(same, 0.0, np.nan_to_num(error, nan=np.inf, posinf=np.inf)).tolist()
    return found


def _others_than_signed(given: PayloadLog, signed: Sequence[TakenIn]) -> list[TakenIn]:
    """The chunks for which other bytes were signed than `given` has."""
    return [each for each in signed if _native.blake3_digest(given.read(each.start, each.length)) != each.digest]


def _reach(signed: Sequence[TakenIn]) -> int:
    """Up to where they leave no gap."""
    reach = 0
    for each in signed:
        reach += each.length if each.start == reach else 0
    return reach
