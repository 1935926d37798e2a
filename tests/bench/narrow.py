"""The cost and the gain of weights in as few bits as they need, beside the same weights in 32 bits.

Decodes of one session and of eight after 100 positions, prefills, and the scores of one token by the client's head. All
blocks of the model run, and both kinds of weights take turns in every round.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from bench.decodes import SESSIONS, decode_of, executor_of
from bench.kit.options import add_model, add_repeats, add_threads
from bench.kit.random_llama import opened
from bench.kit.report import Report, Row, quartiles, ratios
from llmnode.client.connect import load_parts
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.models.load import tensor_bytes
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from bench.kit.options import Options
    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.sources.folder import ModelFolder

PREFILLS = (33, 64, 128, 512)
PREFILLED = SessionId(b"p" * SESSION_ID_BYTES)


def prefill_of(executor: SpanExecutor, positions: int, hidden_size: int) -> Callable[[], None]:
    piece = Slice(PREFILLED, 0, positions, to_bytes(torch.randn(positions, hidden_size)))

    def compute() -> None:
        executor.forward([piece])
        executor.apply(Truncate(PREFILLED, 0))

    return compute


def head_of(folder: ModelFolder) -> tuple[Callable[[], None], int]:
    head: Any = load_parts(folder).ends.scoring.lm_head  # Any: transformers types it so
    hidden = torch.randn(1, folder.info.hidden_size)

    def compute() -> None:
        head(hidden)

    return compute, tensor_bytes(head)


def variants_of(folder: ModelFolder) -> tuple[dict[str, Callable[[], None]], dict[str, int]]:
    """The calls to time, and the sizes of weights in bytes, by name."""
    executor, hidden_size = executor_of(folder, spare_tokens=max(PREFILLS)), folder.info.hidden_size
    hidden = bytes(to_bytes(torch.randn(1, hidden_size)))
    assert executor.apply(Open(PREFILLED, executor.span, max(PREFILLS)))
    head, head_bytes = head_of(folder)
    timed = {f"decode, {count} at once": decode_of(executor, count, hidden) for count in (1, len(SESSIONS))}
    timed |= {f"prefill of {positions}": prefill_of(executor, positions, hidden_size) for positions in PREFILLS}
    return timed | {"head": head}, {"blocks": tensor_bytes(executor.model), "head": head_bytes}


def add(parser: argparse.ArgumentParser) -> None:
    add_model(parser)
    add_repeats(parser, 20)
    add_threads(parser)


@torch.inference_mode()
def run(options: Options) -> Report:
    torch.manual_seed(0)
    with opened(options.model) as folder:
        narrow, narrow_bytes = variants_of(folder)
        with (
            patch("llmnode.models.load.takes_narrow", lambda *_: False),
            patch("llmnode.models.load.keep_ends_narrow", lambda *_: None),
        ):
            wide, wide_bytes = variants_of(folder)
    pairs: dict[str, list[tuple[float, float]]] = {name: [] for name in narrow}
    for _ in range(options.repeats):
        for name, compute in narrow.items():
            began_s = time.perf_counter()
            wide[name]()
            between_s = time.perf_counter()
            compute()
            pairs[name].append((between_s - began_s, time.perf_counter() - between_s))
    rows: list[Row] = []
    for name, taken in pairs.items():
        wide_ms, narrow_ms = ([1e3 * seconds for seconds in column] for column in zip(*taken, strict=True))
        row: Row = {"what": name, "in 32 bits, ms": quartiles(wide_ms), "in as few as needed, ms": quartiles(narrow_ms)}
        rows.append(row | {"of 32": quartiles(ratios(narrow_ms, wide_ms))})
    sizes = {
        f"{name}, MiB": f"{wide_bytes[name] / 2**20:.1f} in 32 bits, {size / 2**20:.1f} in as few as needed"
        for name, size in narrow_bytes.items()
    }
    return Report(rows, conditions=sizes, legend="median (quartiles)")
