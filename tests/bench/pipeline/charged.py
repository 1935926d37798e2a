"""`llmnode serve` for the benchmark `pipeline`: a block computes nothing, and takes the time of a real one.

So a machine can run more servers than it has cores. All else, from links to scheduling, is real.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from llmnode.compute.loading import SpanLoader
from llmnode.core.operations import Close, Open
from llmnode.node.cli import main, run
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.ids import SessionId
    from llmnode.core.operations import Buffer, Control, Pass, Slice
    from llmnode.core.span import Span
    from llmnode.ports import Executor

BLOCK_S = 52e-3 / 30
"""The time of one text's step through a block of SmolLM2-135M on one core, for a token or a short prompt."""
COMPANION = 0.14
"""Each other text of the same forward adds this share of the time. Torch was measured with 2 to 8 decodes."""


class ChargedExecutor:
    """The `Executor` port. It returns the hidden states that it gets. `real` has the weights, and reserves KV."""

    def __init__(self, real: Executor, block_s: float = BLOCK_S) -> None:
        """One text's step through a block takes `block_s`."""
        self.span, self.kv_page, self.passes_beside = real.span, real.kv_page, real.passes_beside
        self._block_s = block_s
        self.real = real
        self._spans: dict[SessionId, Span] = {}
        self._half_way: dict[SessionId, Buffer] = {}

    def kv_tokens_free(self) -> int:
        return self.real.kv_tokens_free()

    def apply(self, operation: Control) -> bool:
        match operation:
            case Open(session, span):
                self._spans[session] = span
                return self.real.apply(operation)
            case Close(session):
                self._spans.pop(session, None)
                self._half_way.pop(session, None)
                return self.real.apply(operation)
        return True  # there are no keys and values to change

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        together = Counter(len(each.blocks(self._spans[each.session])) for each in slices)
        time.sleep(sum(self._block_s * blocks * (1 + COMPANION * (texts - 1)) for blocks, texts in together.items()))
        return [self._passed(each) for each in slices]

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        return self.real.run(passes)

    def _passed(self, each: Slice) -> Buffer:
        hidden = self._half_way.pop(each.session) if each.first else each.hidden
        if each.end is None or each.end == len(self._spans[each.session]):
            return hidden
        self._half_way[each.session] = hidden
        return b""


class ChargedLoader(SpanLoader):
    def load(self, span: Span) -> Loaded:
        loaded = super().load(span)
        return Loaded(ChargedExecutor(loaded.executor), loaded.tensor_bytes)

    def load_beside(self, span: Span, held: Executor, kv_tokens: int) -> Loaded | None:
        assert isinstance(held, ChargedExecutor)
        loaded = super().load_beside(span, held.real, kv_tokens)
        return loaded and Loaded(ChargedExecutor(loaded.executor), loaded.tensor_bytes)


if __name__ == "__main__":
    run(lambda: main(make_loader=ChargedLoader))
