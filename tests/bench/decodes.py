"""The time of decodes with all blocks of a model: by Rust, by torch, by transformers' own forward, and at the least.

Executors that differ only in that take turns. After 100 positions each decodes for one session and for eight in every
round. The least is the time of the linear layers' products alone, for one row, by torch.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from bench.kit.options import add_model, add_repeats, add_threads
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, quartiles, ratios
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.kit.options import Options
    from llmnode.models.sources.folder import ModelFolder

POSITIONS = 100
SESSIONS = [SessionId(bytes([number]) * SESSION_ID_BYTES) for number in range(8)]
BASELINE = "transformers' forward"
FP32 = "in Rust, in 32 bits"


def executor_of(folder: ModelFolder, quant: str = "none", spare_tokens: int = 0) -> SpanExecutor:
    span = Span(0, folder.info.blocks)
    executor = load_executor(folder, span, len(SESSIONS) * 2 * POSITIONS + spare_tokens, quant=quant)
    for session in SESSIONS:
        assert executor.apply(Open(session, span, 2 * POSITIONS))
        executor.forward([Slice(session, 0, POSITIONS, to_bytes(torch.randn(POSITIONS, folder.info.hidden_size)))])
    return executor


def executors_of(folder: ModelFolder) -> dict[str, SpanExecutor]:
    with patch("llmnode.models.load.blueprint_of", lambda _folder: None):
        executors = {BASELINE: executor_of(folder)}
    with patch("llmnode.models.load.takes_narrow", lambda *_: False):
        with patch("llmnode.models.load.native_blocks", lambda *_: None):
            executors["by torch, fused"] = executor_of(folder)
            executors["by torch, fused, int8"] = executor_of(folder, "int8")
        executors[FP32] = executor_of(folder)
    executors["in Rust, in as few bits as it needs"] = executor_of(folder)
    executors["in Rust, int8"] = executor_of(folder, "int8")
    return executors


def decode_of(executor: SpanExecutor, sessions: int, hidden: bytes) -> Callable[[], None]:
    def compute() -> None:
        executor.forward([Slice(session, POSITIONS, 1, hidden) for session in SESSIONS[:sessions]])
        for session in SESSIONS[:sessions]:
            executor.apply(Truncate(session, POSITIONS))

    return compute


def products_of(executor: SpanExecutor) -> Callable[[], None]:
    weights = [each.weight for each in executor.model.modules() if isinstance(each, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}

    def compute() -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return compute


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_repeats(parser, 40)
    add_threads(parser)


@torch.inference_mode()
def run(options: Options) -> Report:
    torch.manual_seed(0)
    with opened(options.model) as folder:
        executors = executors_of(folder)
        hidden = bytes(to_bytes(torch.randn(1, folder.info.hidden_size)))
    variants = {
        (name, sessions): decode_of(executor, sessions, hidden)
        for sessions in (1, len(SESSIONS))
        for name, executor in executors.items()
    }
    variants["products alone", 1] = products_of(executors[FP32])
    times_ms: dict[tuple[str, int], list[float]] = {each: [] for each in variants}
    for _ in range(options.repeats):
        for each, compute in variants.items():
            began_s = time.perf_counter()
            compute()
            times_ms[each].append(1e3 * (time.perf_counter() - began_s))
    rows: list[Row] = [
        {
            "sessions": sessions,
            "variant": name,
            "ms": quartiles(taken),
            "of transformers' forward": quartiles(ratios(taken, times_ms[BASELINE, sessions])),
        }
        for (name, sessions), taken in times_ms.items()
    ]
    return Report(rows, legend="median (quartiles)")
