"""How long a decode takes with the blocks of `models/fused.py`, with transformers' own forward, and at the least.

    python tests/bench/fused_blocks.py [MODEL] [ROUNDS]      (embedded; llama-34m, llama-222m, or a folder; 60)

Two executors of all blocks, alike but for that, on one thread: one decode of each in every round, one after the other,
after 100 positions. The least is the products of the linear layers alone, joined and not, each on an input of its size.
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from llmnode.compute.executor import SpanExecutor, load_executor
from llmnode.compute.tensors import to_bytes
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.span import Span
from llmnode.models.families import FAMILIES
from llmnode.node.bench.random_llama import opened
from llmnode.ports import Piece

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.models.folder import ModelFolder

POSITIONS = 100
ROUNDS = 60
SESSION = SessionId(b"s" * SESSION_ID_BYTES)


def executor_of(folder: ModelFolder, *, fused: bool, rounds: int) -> SpanExecutor:
    name = folder.config.model_type
    family = FAMILIES[name]
    FAMILIES[name] = replace(family, fused=fused)
    try:
        capacity, span = POSITIONS + rounds, Span(0, folder.info.blocks)
        executor = load_executor(folder, span, capacity)
    finally:
        FAMILIES[name] = family
    assert executor.open(SESSION, span, capacity)
    executor.forward([Piece(SESSION, 0, POSITIONS, to_bytes(torch.randn(POSITIONS, folder.info.hidden_size)))])
    return executor


def products_of(executor: SpanExecutor) -> Callable[[int, bytes], None]:
    weights = [each.weight for each in executor.model.modules() if isinstance(each, torch.nn.Linear)]
    inputs = {weight.shape[1]: torch.randn(1, weight.shape[1]) for weight in weights}

    def compute(_position: int, _hidden: bytes) -> None:
        for weight in weights:
            torch.nn.functional.linear(inputs[weight.shape[1]], weight)

    return compute


def decode_of(executor: SpanExecutor) -> Callable[[int, bytes], None]:
    def compute(position: int, hidden: bytes) -> None:
        executor.forward([Piece(SESSION, position, 1, hidden)])

    return compute


@torch.inference_mode()
def main(model: str | None = None, rounds: str = str(ROUNDS)) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    with opened(model if model != "embedded" else None) as folder:
        fused, own = (executor_of(folder, fused=each, rounds=int(rounds)) for each in (True, False))
        hidden = bytes(to_bytes(torch.randn(1, folder.info.hidden_size)))
    variants = {
        "transformers' forward": decode_of(own),
        "fused": decode_of(fused),
        "products alone": products_of(own),
        "joined products alone": products_of(fused),
    }
    times_ms: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(int(rounds)):
        for name, compute in variants.items():
            began_s = time.perf_counter()
            compute(POSITIONS + number, hidden)
            times_ms[name].append(1e3 * (time.perf_counter() - began_s))
    print("| variant | ms | of transformers' forward |\n|---|---|---|")
    for name, taken in times_ms.items():
        ratios = [each / other for each, other in zip(taken, times_ms["transformers' forward"], strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4)
        print(f"| {name} | {statistics.median(taken):.1f} | {median:.2f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    main(*sys.argv[1:])
