"""What it takes to keep weights in as few bits as they need, and what it saves, beside the same weights in 32 bits.

    python tests/bench/narrow.py [MODEL] [ROUNDS] [THREADS]
                                    (embedded; llama-34m-bf16, llama-222m-bf16, or a folder; 20; 1)

Decodes of one session and of eight after 100 positions, prefills, and the scores of one token by the client's head: all
blocks of the model, both kinds in turn in every round.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from bench.decodes import SESSIONS, decode_of, executor_of
from bench.kit.random_llama import opened
from llmnode.client.connect import load_parts
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.models.load import tensor_bytes
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    from collections.abc import Callable

    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.sources.folder import ModelFolder

PREFILLS = (33, 64, 128, 512)
PREFILLED = SessionId(b"p" * SESSION_ID_BYTES)
ROUNDS = 20


def prefill_of(executor: SpanExecutor, positions: int, hidden_size: int) -> Callable[[], None]:
    piece = Slice(PREFILLED, 0, positions, to_bytes(torch.randn(positions, hidden_size)))

    def compute() -> None:
        executor.forward([piece])
        executor.apply(Truncate(PREFILLED, 0))

    return compute


def head_of(folder: ModelFolder) -> tuple[Callable[[], None], int]:
    head: Any = load_parts(folder).ends.scoring.lm_head  # Any: as transformers types it
    hidden = torch.randn(1, folder.info.hidden_size)

    def compute() -> None:
        head(hidden)

    return compute, tensor_bytes(head)


def variants_of(folder: ModelFolder) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """What is timed, and how many bytes weights take."""
    executor, hidden_size = executor_of(folder, spare_tokens=max(PREFILLS)), folder.info.hidden_size
    hidden = bytes(to_bytes(torch.randn(1, hidden_size)))
    assert executor.apply(Open(PREFILLED, executor.span, max(PREFILLS)))
    head, head_bytes = head_of(folder)
    timed = {f"decode, {count} at once": decode_of(executor, count, hidden) for count in (1, len(SESSIONS))}
    timed |= {f"prefill of {positions}": prefill_of(executor, positions, hidden_size) for positions in PREFILLS}
    return timed | {"head": head}, {"blocks": tensor_bytes(executor.model), "head": head_bytes}


@torch.inference_mode()
def main(model: str = "embedded", rounds: str = str(ROUNDS), threads: str = "1") -> None:
    torch.set_num_threads(int(threads))
    torch.manual_seed(0)
    with opened(model if model != "embedded" else None) as folder:
        narrow, narrow_bytes = variants_of(folder)
        with (
            patch("llmnode.models.load.takes_narrow", lambda *_: False),
            patch("llmnode.models.load.keep_ends_narrow", lambda *_: None),
        ):
            wide, wide_bytes = variants_of(folder)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in narrow}
    for _ in range(int(rounds)):
        for name, compute in narrow.items():
            began_s = time.perf_counter()
            wide[name]()
            between_s = time.perf_counter()
            compute()
            pairs[name].append((between_s - began_s, time.perf_counter() - between_s))
    for name, size in narrow_bytes.items():
        print(
            f"weights of {name}: {wide_bytes[name] / 2**20:.1f} MiB in 32 bits, {size / 2**20:.1f} in as few as needed"
        )
    print("\n| what | in 32 bits, ms | in as few as needed, ms | of 32 |\n|---|---|---|---|")
    for name, taken in pairs.items():
        low, median, high = statistics.quantiles((few_s / all_s for all_s, few_s in taken), n=4)
        all_ms, few_ms = (1e3 * statistics.median(column) for column in zip(*taken, strict=True))
        print(f"| {name} | {all_ms:.1f} | {few_ms:.1f} | {median:.2f} ({low:.2f}-{high:.2f}) |")


if __name__ == "__main__":
    main(*sys.argv[1:])
