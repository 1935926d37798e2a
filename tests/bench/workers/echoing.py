"""A worker process for `tests/bench/run workers`. It computes nothing, so only the way there and back takes time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.compute.child import serve_node
from llmnode.core.model import ModelInfo
from llmnode.core.placement.own_precision import Candidate
from llmnode.core.span import Span
from llmnode.ports import Loaded

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llmnode.compute.loading import Wanted
    from llmnode.core.model import Precision
    from llmnode.core.operations import Buffer, Control, Pass, Slice
    from llmnode.ports import Executor

HIDDEN_SIZE = 576
"""The size of SmolLM2-135M."""
KV_TOKENS = 1 << 30
ECHO = ModelInfo("echo", bytes(32), blocks=1, hidden_size=HIDDEN_SIZE, context_tokens=KV_TOKENS)


class EchoExecutor:
    """The `Executor` port without blocks and KV."""

    span = Span(0, ECHO.blocks)
    kv_page = 1
    passes_beside = False

    def kv_tokens_free(self) -> int:
        return KV_TOKENS

    def apply(self, operation: Control) -> bool:
        return True

    def forward(self, slices: Sequence[Slice]) -> Sequence[Buffer]:
        return [each.hidden for each in slices]

    def run(self, passes: Sequence[Pass]) -> Sequence[Buffer]:
        return [each.hidden for each in passes]


class EchoLoader:
    """The `Loader` port."""

    def __init__(self, _wanted: Wanted, _report: Callable[[str], None]) -> None:
        pass

    def open_model(self) -> ModelInfo:
        return ECHO

    def fitting_blocks(self) -> int:
        return ECHO.blocks

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return [Candidate(each, self.fitting_blocks(), 1.0) for each in precisions]

    def load(self, span: Span) -> Loaded:
        return Loaded(EchoExecutor(), tensor_bytes=0)

    def load_beside(self, span: Span, _held: Executor, _kv_tokens: int) -> Loaded:
        return self.load(span)


if __name__ == "__main__":
    serve_node(EchoLoader)
