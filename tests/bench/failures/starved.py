"""`llmnode serve` for the benchmark `failures`: at a SIGUSR2 its blocks run out of memory, until the next SIGUSR2."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from llmnode.compute.loading import SpanLoader
from llmnode.node.cli import main, run
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.operations import Buffer, Control, Pass, Slice
    from llmnode.core.span import Span
    from llmnode.ports import Executor

SIGNAL = signal.SIGUSR2
TOO_MANY_BYTES = 1 << 60


class Shortage:
    """Whether memory is short. Each signal switches it."""

    def __init__(self) -> None:
        self.is_here = False

    def toggle(self, *_signal: object) -> None:
        self.is_here = not self.is_here


class StarvedExecutor:
    """The `Executor` port over a `real` one. During a shortage it has no memory for a forward."""

    def __init__(self, real: Executor, shortage: Shortage) -> None:
        self.span, self.kv_page, self.passes_beside = real.span, real.kv_page, real.passes_beside
        self._real = real
        self._shortage = shortage

    def kv_tokens_free(self) -> int:
        return self._real.kv_tokens_free()

    def apply(self, operation: Control) -> bool:
        return self._real.apply(operation)

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        self._run_short()
        return self._real.forward(slices)

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        self._run_short()
        return self._real.run(passes)

    def _run_short(self) -> None:
        if self._shortage.is_here:
            import torch

            torch.empty(TOO_MANY_BYTES, dtype=torch.uint8)  # so the error is torch's own


class StarvedLoader(SpanLoader):
    shortage = Shortage()

    def load(self, span: Span) -> Loaded:
        loaded = super().load(span)
        return Loaded(StarvedExecutor(loaded.executor, self.shortage), loaded.tensor_bytes)

    def load_beside(self, _span: Span, _held: Executor, _kv_tokens: int) -> None:
        """There is never memory for two."""


if __name__ == "__main__":
    signal.signal(SIGNAL, StarvedLoader.shortage.toggle)
    run(lambda: main(make_loader=StarvedLoader))
