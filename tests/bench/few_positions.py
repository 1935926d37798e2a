"""Up to how many positions of one sequence Rust is faster than torch: `MOST_POSITIONS` of `models/native.py`.

One executor has all blocks. It runs positions through all of them at once, and through one after the other as layered
prefill does, after a given number of earlier positions. Rust and torch take turns in every round.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING
from unittest.mock import patch

import torch

from bench.kit.options import add_model, add_repeats, add_threads
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, quartiles, ratios
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options
    from llmnode.compute.executor import SpanExecutor

SESSION = SessionId(b"s" * SESSION_ID_BYTES)
BEFORE, POSITIONS, CAPACITY = (0, 1000, 1800), (16, 64, 128, 256, 512), 2816


def forward_s(executor: SpanExecutor, before: int, states: torch.Tensor, blocks: int, *, in_rust: bool) -> float:
    """The time of a forward that takes `blocks` blocks at a time."""
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


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_repeats(parser, 4)
    add_threads(parser)


def run(options: Options) -> Report:
    torch.manual_seed(0)
    with opened(options.model) as folder:
        total, hidden_size = folder.info.blocks, folder.info.hidden_size
        executor = load_executor(folder, Span(0, total), CAPACITY)
    assert executor.apply(Open(SESSION, executor.span, CAPACITY))
    rows: list[Row] = []
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
                    for _ in range(options.repeats)
                ]
                ours, theirs = ([1e3 * seconds for seconds in column] for column in zip(*pairs, strict=True))
                row: Row = {"after": before, "positions": positions, "blocks at a time": blocks}
                row |= {"Rust, ms": quartiles(ours), "torch, ms": quartiles(theirs)}
                rows.append(row | {"of torch": quartiles(ratios(ours, theirs))})
    return Report(rows, legend="median (quartiles)")
