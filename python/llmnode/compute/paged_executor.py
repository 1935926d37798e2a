"""The executor of a span on a GPU whose KV is in pages there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.compute.executor import SpanExecutor
from llmnode.compute.recording import PagedForwards, use_what_works
from llmnode.compute.tensors import from_bytes, to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.pages import PagedKV, PagePool
    from llmnode.compute.recording import Record
    from llmnode.core.ids import SessionId
    from llmnode.core.span import Span
    from llmnode.models.fused import FusedSpan
    from llmnode.models.parts import SpanModel
    from llmnode.ports import Piece
    from llmnode.wire.frame import Buffer


class PagedExecutor(SpanExecutor):
    """The `Executor` port; its KV is that of `pool`, taken as a whole when it is made."""

    def __init__(
        self,
        model: SpanModel | FusedSpan,
        hidden_size: int,
        pool: PagePool,
        record: Record | None,
        report: Callable[[str], None],
    ) -> None:
        """What steps are recorded with is `record`. `report` is told in a line what cannot be used on this device."""
        super().__init__(model, hidden_size, pool.tokens, str(pool.device))
        self._pool = pool
        self._paged: dict[SessionId, PagedKV] = {}
        self._forwards = PagedForwards(model, pool, record, report)
        with torch.inference_mode():
            use_what_works(self._forwards, pool, model.span, hidden_size, report)

    def _take_kv(self, session: SessionId, tokens: int) -> PagedKV:
        self._paged[session] = self._pool.take(tokens)
        return self._paged[session]

    def _give_kv_back(self, session: SessionId) -> None:
        self._pool.give_back(self._paged.pop(session))

    def _run(self, span: Span, pieces: Sequence[Piece]) -> Sequence[Buffer]:
        parts = [(self._paged[each.session], each.start, each.length) for each in pieces]
        row = torch.cat([from_bytes(each.hidden, self._hidden_size) for each in pieces])
        hidden = self._forwards.run(span, parts, row)
        return [to_bytes(part) for part in hidden.split([each.length for each in pieces])]
