"""The `Worker` port in exact arithmetic, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.ports import Computed

if TYPE_CHECKING:
    from llmnode.core.ids import SessionId
    from llmnode.core.span import Span
    from llmnode.ports import Piece


class ExactWorker:
    """The `Worker` port in exact arithmetic: bytes in, bytes out, bit for bit the same through any cut into spans.

    Each byte that a block puts out is the sum (modulo 256) of all bytes that came in, up to it, and the block's number;
    so an answer is right only if the KV holds exactly what came before, and every block was passed once. `gate`, when
    set, holds every forward back until it is opened, and like a torch call a forward that runs cannot be cancelled;
    `forwards` counts them.
    """

    def __init__(self, span: Span, row_bytes: int, kv_tokens: int) -> None:
        self.span = span
        self.gate: trio.Event | None = None
        self.forwards = 0
        self.forward_began = trio.Event()
        self._row_bytes = row_bytes
        self._kv_tokens = kv_tokens
        self._reserved: dict[SessionId, int] = {}
        self._spans: dict[SessionId, Span] = {}
        self._kept: dict[SessionId, bytes] = {}
        self._closed_one = trio.Event()

    @property
    def kv_tokens_free(self) -> int:
        return self._kv_tokens - sum(self._reserved.values())

    async def open(self, session: SessionId, span: Span, max_length: int) -> bool:
        assert self.span.covers(span)
        assert session not in self._reserved
        await trio.lowlevel.checkpoint()
        if max_length > self.kv_tokens_free:
            return False
        self._reserved[session] = max_length
        self._spans[session] = span
        self._kept[session] = b""
        return True

    async def forward(self, piece: Piece) -> Computed:
        self.forwards += 1
        self.forward_began.set()
        with trio.CancelScope(shield=True):
            if self.gate is None:
                await trio.lowlevel.checkpoint()
            else:
                await self.gate.wait()
        kept = self._kept[piece.session]
        assert len(kept) == piece.start * self._row_bytes
        assert len(piece.hidden) == piece.length * self._row_bytes
        self._kept[piece.session] = kept + bytes(piece.hidden)
        output = exact_output(self._kept[piece.session], self._spans[piece.session])
        return Computed(output[len(kept) :], queue_us=0, compute_us=0)

    async def truncate(self, session: SessionId, length: int) -> None:
        await trio.lowlevel.checkpoint()
        self._kept[session] = self._kept[session][: length * self._row_bytes]

    async def close(self, session: SessionId) -> None:
        await trio.lowlevel.checkpoint()
        self._reserved.pop(session, None)
        self._kept.pop(session, None)
        self._closed_one.set()
        self._closed_one = trio.Event()

    async def until_empty(self) -> None:
        while self._reserved:
            await self._closed_one.wait()


def exact_output(hidden: bytes, span: Span) -> bytes:
    """What the blocks of `span`, each an `ExactWorker`'s, make of the hidden states of a whole session."""
    values = np.frombuffer(hidden, np.uint8)
    for block in range(span.start, span.end):
        values = np.cumsum(values, dtype=np.uint8) + np.uint8(block % 256)
    return values.tobytes()
