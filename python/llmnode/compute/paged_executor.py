"""The executor of a span on a GPU whose KV is in pages there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.compute.cuda_graphs import RecordedForwards
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.gpu_self_test import use_what_works

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.compute.cuda_graphs import Record
    from llmnode.compute.pages import PagedKV, PagePool
    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Slice
    from llmnode.core.span import Span
    from llmnode.models.fused import FusedSpan
    from llmnode.models.load import SpanModel


class PagedExecutor(SpanExecutor):
    """The `Executor` port; its KV is that of `pool`, taken as a whole when it is made."""

    def __init__(
        self, model: SpanModel | FusedSpan, hidden_size: int, pool: PagePool, record: Record | None = None
    ) -> None:
        """`record` records steps. A way that does not work on this device is left out, and logged."""
        super().__init__(model, hidden_size, pool.tokens, str(pool.device))
        self._pool = pool
        self.kv_page = pool.page
        self._paged: dict[SessionId, PagedKV] = {}
        self._forwards = RecordedForwards(model, pool, record)
        with torch.inference_mode():
            use_what_works(self._forwards, pool, model.span, hidden_size)

    def _take_kv(self, session: SessionId, tokens: int, _most: int) -> PagedKV:
        self._paged[session] = self._pool.take(tokens)
        return self._paged[session]

    def _give_kv_back(self, session: SessionId) -> None:
        self._pool.give_back(self._paged.pop(session))

    def _compute(self, span: Span, slices: Sequence[Slice], row: torch.Tensor) -> torch.Tensor:
        segments = [(self._paged[each.session], each.start, each.length) for each in slices]
        return self._forwards.run(span, segments, row)
