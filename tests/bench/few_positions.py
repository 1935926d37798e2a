"""Up to how many positions of one sequence Rust is faster than torch: `MOST_POSITIONS` of `models/native.py`.

    python tests/bench/few_positions.py [MODEL] [ROUNDS] [THREADS]      (embedded; llama-34m-bf16, or a folder; 4; 1)

One executor with all blocks, through all of them at once and through one after the other as in layered prefill, after
as many positions as are said; both ways in turn in every round.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from bench.kit.random_llama import opened
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    from llmnode.compute.executor import SpanExecutor

SESSION = SessionId(b"s" * SESSION_ID_BYTES)
BEFORE, POSITIONS, CAPACITY = (0, 1000, 1800), (16, 64, 128, 256, 512), 2816


def forward_s(executor: SpanExecutor, before: int, states: torch.Tensor, blocks: int, *, in_rust: bool) -> float:
    """Through so many blocks at a time."""
    hidden, total = to_bytes(states), len(executor.span)
    firsts = range(0, total, blocks)
    pieces = [Slice(SESSION, before, len(states), b"" if at else hidden, at, at + blocks) for at in firsts]
    with patch("llmnode.compute.executor.are_few", lambda _lengths: in_rust):
        began_s = time.perf_counter()
        for piece in pieces:
            executor.forward([piece])
        took_s = time.perf_counter() - began_s
    executor.apply(Truncate(SESSION, before))
    return took_s


def main(model: str = "embedded", rounds: str = "4", threads: str = "1") -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    with opened(model if model != "embedded" else None) as folder:
        total, hidden_size = folder.info.blocks, folder.info.hidden_size
        executor = load_executor(folder, Span(0, total), CAPACITY)
    assert executor.apply(Open(SESSION, executor.span, CAPACITY))
    print("| after | positions | blocks at a time | Rust, ms | torch, ms | of torch's |\n|---|---|---|---|---|---|")
    known = 0
    for before in BEFORE:
        if before > known:
            executor.forward(
                [Slice(SESSION, known, before - known, to_bytes(torch.randn(before - known, hidden_size)))]
            )
            known = before
        for positions in POSITIONS:
            states = torch.randn(positions, hidden_size)
            for blocks in (total, 1):
                pairs = [
                    [forward_s(executor, before, states, blocks, in_rust=in_rust) for in_rust in (True, False)]
                    for _ in range(int(rounds))
                ]
                ours_ms, theirs_ms = (1e3 * statistics.median(column) for column in zip(*pairs, strict=True))
                low, median, high = statistics.quantiles([ours / theirs for ours, theirs in pairs], n=4)
                ratio = f"{median:.2f} ({low:.2f}-{high:.2f})"
                print(f"| {before} | {positions} | {blocks} | {ours_ms:.1f} | {theirs_ms:.1f} | {ratio} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
