"""Decodes in several precisions against fp32. They take turns in one process, so that noise hits all of them."""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from bench.kit.report import Spread, spread
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.kv import KVForm
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.model import PRECISIONS
from llmnode.core.operations import Close, Open, Slice
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llmnode.core.span import Span
    from llmnode.models.sources.folder import ModelFolder

PREFILL = 32
STEPS = 8
FP32 = "float32"


def decode_ratios(folder: ModelFolder, span: Span, precisions: Sequence[str], *, rounds: int) -> dict[str, Spread]:
    """The decode speed of the blocks of `span` in each precision, as a multiple of fp32's; one sequence at a time.

    A round takes the median step of each. A first round warms up. The caller has set torch's threads.
    """
    executors = {name: load_in(name, folder, span, PREFILL + STEPS) for name in dict.fromkeys((FP32, *precisions))}
    hidden = torch.randn(PREFILL + STEPS, folder.info.hidden_size, generator=torch.Generator().manual_seed(0))
    seconds = [{name: _step_s(executor, hidden) for name, executor in executors.items()} for _ in range(rounds + 1)]
    return {name: spread([each[FP32] / each[name] for each in seconds[1:]]) for name in executors}


def load_in(name: str, folder: ModelFolder, span: Span, kv_tokens: int) -> SpanExecutor:
    """`name` is one of `PRECISIONS`."""
    each = PRECISIONS[name]
    dtype: torch.dtype = getattr(torch, each.dtype)
    return load_executor(folder, span, kv_tokens, dtype, quant=each.quant, kv=KVForm(each.kv_dtype))


def _step_s(executor: SpanExecutor, hidden: torch.Tensor) -> float:
    session = SessionId(bytes(SESSION_ID_BYTES))
    assert executor.apply(Open(session, executor.span, len(hidden)))
    executor.forward([Slice(session, 0, PREFILL, to_bytes(hidden[:PREFILL]))])
    seconds = []
    for at in range(PREFILL, len(hidden)):
        started = time.perf_counter()
        executor.forward([Slice(session, at, 1, to_bytes(hidden[at : at + 1]))])
        seconds.append(time.perf_counter() - started)
    executor.apply(Close(session))
    return statistics.median(seconds)
