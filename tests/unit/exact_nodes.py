"""Serving nodes on loopback as `llmnode serve` puts them together, whose blocks are in exact arithmetic: no torch."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from llmnode.core.model import AUTO, EXACT, Precision
from llmnode.core.placement.own_precision import Candidate
from llmnode.node.app import NodeConfig, open_node
from llmnode.ports import Loaded
from llmnode.testing import ExactExecutor
from llmnode.testing.exact_blocks import EXACT_MODEL

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from llmnode.compute.loading import Wanted
    from llmnode.core.model import ModelInfo
    from llmnode.core.span import Span
    from llmnode.node.running_node import RunningNode
    from llmnode.ports import Executor

KV_TOKENS = 400


class ExactLoader:
    """The `Loader` port over `ExactExecutor`s. On this device "auto" is exact."""

    def __init__(self, wanted: Wanted, _report: Callable[[str], None]) -> None:
        names = (wanted.dtype, wanted.quant, wanted.kv_dtype)
        exact = (EXACT.dtype, EXACT.quant, EXACT.kv_dtype)
        self._precision = Precision(*(of if name == AUTO else name for name, of in zip(names, exact, strict=True)))

    def open_model(self) -> ModelInfo:
        return replace(EXACT_MODEL, precision=self._precision)

    def fitting_blocks(self) -> int:
        return EXACT_MODEL.blocks

    def candidates(self, precisions: Sequence[Precision]) -> list[Candidate]:
        return [Candidate(each, self.fitting_blocks(), 1.0, each.dtype == "bfloat16") for each in precisions]

    def load(self, span: Span) -> Loaded:
        executor: Any = ExactExecutor(span, EXACT_MODEL.row_bytes, KV_TOKENS)
        return Loaded(executor, tensor_bytes=12)

    def load_beside(self, span: Span, _held: Executor, _kv_tokens: int) -> Loaded:
        return self.load(span)


def exact_node(**config: Any) -> AbstractAsyncContextManager[RunningNode]:  # Any: NodeConfig's own fields
    report = config.pop("report", lambda _line: None)
    return open_node(NodeConfig(worker="thread", make_loader=ExactLoader, **config), report)
