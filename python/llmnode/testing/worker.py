"""The `Worker` port in exact arithmetic, without torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import trio

from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.model import ModelInfo
from llmnode.ports import Computed

if TYPE_CHECKING:
    from llmnode.core.span import Span
    from llmnode.ports import Piece

EXACT_MODEL = ModelInfo("exact", b"d" * 32, blocks=6, hidden_size=2, context_tokens=200, dtype="float32")
"""Small, and right to the bit."""

_STRANGER = SessionId(b"s" * SESSION_ID_BYTES)


class ExactWorker:
    """The `Worker` port in exact arithmetic: bytes in, bytes out, bit for bit the same through any cut into spans.

    Each byte that a block puts out is the sum (modulo 256) of all bytes that came in, up to it, and the block's number;
    so an answer is right only if the KV holds exactly what came before, and every block was passed once. A forward
    takes `forward_s`, and `slower_by_s` more; `gate`, when set, holds every forward back until it is opened, and like
    a torch call a forward that runs cannot be cancelled; `forwards` counts them. The next `fails` of them, or of forks,
    end as if memory had run out. `forks` has the positions that each fork copied, from and to.
    """

    def __init__(self, span: Span, row_bytes: int, kv_tokens: int, *, forward_s: float = 0.0) -> None:
        self.span = span
        self.forward_s = forward_s
        self.slower_by_s = 0.0
        self.gate: trio.Event | None = None
        self.fails = 0
        self.forwards = 0
        self.forks: list[tuple[int, int]] = []
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

    @property
    def reserved(self) -> int:
        """KV positions that sessions hold."""
        return sum(self._reserved.values()) - self._reserved.get(_STRANGER, 0)

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
        began_s = trio.current_time()
        with trio.CancelScope(shield=True):
            await trio.sleep(self.forward_s + self.slower_by_s)
            if self.gate is not None:
                await self.gate.wait()
        self._fail_if_told()
        kept = self._kept[piece.session]
        assert len(kept) == piece.start * self._row_bytes
        assert len(piece.hidden) == piece.length * self._row_bytes
        self._kept[piece.session] = kept + bytes(piece.hidden)
        output = exact_output(self._kept[piece.session], self._spans[piece.session])
        took_us = round(1e6 * (trio.current_time() - began_s))
        return Computed(output[len(kept) :], queue_us=0, compute_us=took_us)

    async def truncate(self, session: SessionId, length: int) -> None:
        await trio.lowlevel.checkpoint()
        self._kept[session] = self._kept[session][: length * self._row_bytes]

    async def fork(self, session: SessionId, source: SessionId, shared: int, length: int) -> None:
        self._fail_if_told()
        self.forks.append((shared, length))
        own, other = self._kept[session], self._kept[source]  # as they are when it is called
        assert self._spans[session] == self._spans[source]
        edge, end = shared * self._row_bytes, length * self._row_bytes
        assert edge <= len(own)
        assert end <= len(other)
        self._kept[session] = own[:edge] + other[edge:end]
        await trio.lowlevel.checkpoint()

    async def close(self, session: SessionId) -> None:
        await trio.lowlevel.checkpoint()
        self._reserved.pop(session, None)
        self._spans.pop(session, None)
        self._kept.pop(session, None)
        self._closed_one.set()
        self._closed_one = trio.Event()

    def occupy(self, kv_tokens: int) -> None:
        """As another client's session would, until it is called with 0."""
        self._reserved.pop(_STRANGER, None)
        if kv_tokens:
            self._reserved[_STRANGER] = kv_tokens

    def _fail_if_told(self) -> None:
        if self.fails > 0:
            self.fails -= 1
            raise RuntimeError("out of memory, as told")

    async def until_empty(self) -> None:
        while self._reserved:
            await self._closed_one.wait()


def exact_output(hidden: bytes, span: Span) -> bytes:
    """What the blocks of `span`, each an `ExactWorker`'s, make of the hidden states of a whole session."""
    values = np.frombuffer(hidden, np.uint8)
    for block in range(span.start, span.end):
        values = np.cumsum(values, dtype=np.uint8) + np.uint8(block % 256)
    return values.tobytes()
