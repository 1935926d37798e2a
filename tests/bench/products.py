"""What a few rows at once take in the forms of `models/weights/matmul_choice.py`, and as torch's linear layers.

    python tests/bench/products.py [ROUNDS]

Two executors of 15 blocks of SmolLM2-135M that are alike but for that, on one thread: decodes of so many sessions at
position 32, in turn.
"""

from __future__ import annotations

import statistics
import sys
import time
from contextlib import nullcontext
from unittest.mock import patch

import torch

from llmnode.compute.executor import SpanExecutor
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.sources.embedded import open_embedded
from llmnode.models.tensors import to_bytes

ROWS = (1, 2, 4, 6, 8, 12, 15, 16, 32)
ROUNDS = 30
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


def main(rounds: int) -> None:
    torch.set_num_threads(1)
    chosen, usual = executor_of(chooses=True), executor_of(chooses=False)
    print("| sessions | torch's linear, ms | chosen forms, ms | of torch's |\n|---|---|---|---|")
    for rows in ROWS:
        pairs = [(decode_s(usual, rows), decode_s(chosen, rows)) for _ in range(rounds)]
        ratios = sorted(mine / theirs for theirs, mine in pairs)
        theirs_ms, mine_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
        low, middle, high = (ratios[len(ratios) * quarter // 4] for quarter in (1, 2, 3))
        print(f"| {rows} | {theirs_ms:.1f} | {mine_ms:.1f} | {middle:.2f} ({low:.2f}-{high:.2f}) |", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else ROUNDS)
