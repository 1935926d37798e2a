"""The time of a few rows at once, in the forms of `models/weights/matmul_choice.py` and as torch's linear layers.

Two executors of 15 blocks of SmolLM2-135M, which differ only in that, decode on one thread. They take turns with some
sessions at position 32.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from bench.kit.options import add_repeats
from bench.kit.report import Report, Row, quartiles, ratios
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options
    from llmnode.compute.executor import SpanExecutor

ROWS = (1, 2, 4, 6, 8, 12, 15, 16, 32)
SPAN = Span(0, 15)
CONTEXT = 32
SESSIONS = [SessionId(bytes([number]) * SESSION_ID_BYTES) for number in range(max(ROWS))]


def executor_of(*, chooses: bool) -> SpanExecutor:
    without_rust = patch("llmnode.models.load.native_blocks", lambda *_: None)
    wide = patch("llmnode.models.load.takes_narrow", lambda *_: False)
    with without_rust, wide, nullcontext() if chooses else patch("llmnode.models.load.use_fastest"):
        executor = load_executor(open_embedded(), SPAN, (CONTEXT + 1) * len(SESSIONS))
    for session in SESSIONS:
        assert executor.apply(Open(session, SPAN, CONTEXT + 1))
        executor.forward([Slice(session, 0, CONTEXT, to_bytes(torch.randn(CONTEXT, 576)))])
    return executor


def decode_s(executor: SpanExecutor, rows: int) -> float:
    pieces = [Slice(session, CONTEXT, 1, to_bytes(torch.randn(1, 576))) for session in SESSIONS[:rows]]
    began_s = time.perf_counter()
    executor.forward(pieces)
    took_s = time.perf_counter() - began_s
    for piece in pieces:
        executor.apply(Truncate(piece.session, CONTEXT))
    return took_s


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 30)


def run(options: Options) -> Report:
    chosen, usual = executor_of(chooses=True), executor_of(chooses=False)
    rows: list[Row] = []
    for sessions in ROWS:
        pairs = [(decode_s(usual, sessions), decode_s(chosen, sessions)) for _ in range(options.repeats)]
        theirs, ours = ([1e3 * seconds for seconds in column] for column in zip(*pairs, strict=True))
        row: Row = {"sessions": sessions, "torch's linear, ms": quartiles(theirs), "chosen forms, ms": quartiles(ours)}
        rows.append(row | {"of torch": quartiles(ratios(ours, theirs))})
    return Report(rows, legend="median (quartiles)")
