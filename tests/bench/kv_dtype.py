"""The time of a decode with KV in 8 bits, against KV as it is: many positions of SmolLM2-135M on one thread.

Two executors that differ in their KV compute the same position again and again. They take turns, and turns at being
first.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from bench.kit.decoding import load_in
from bench.kit.options import add_repeats
from bench.kit.report import Report, Row, quartiles, ratios
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options
    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.sources.folder import ModelFolder

POSITIONS = (100, 1000, 4000)
PREFILL = 500
SPAN = Span(0, 10)
SESSION = SessionId(b"k" * SESSION_ID_BYTES)


def filled(precision: str, folder: ModelFolder, positions: int) -> SpanExecutor:
    executor = load_in(precision, folder, SPAN, positions + 1)
    assert executor.apply(Open(SESSION, SPAN, positions + 1))
    rows = torch.randn(positions, folder.info.hidden_size, generator=torch.Generator().manual_seed(0))
    for start in range(0, positions, PREFILL):
        part = rows[start : start + PREFILL]
        executor.forward([Slice(SESSION, start, len(part), to_bytes(part))])
    return executor


def decode_ms(executor: SpanExecutor, position: int, hidden: bytes) -> float:
    began_s = time.perf_counter()
    executor.forward([Slice(SESSION, position, 1, hidden)])
    took_s = time.perf_counter() - began_s
    executor.apply(Truncate(SESSION, position))
    return 1e3 * took_s


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 40)


@torch.inference_mode()
def run(options: Options) -> Report:
    folder = open_embedded()
    hidden = bytes(to_bytes(torch.randn(1, folder.info.hidden_size, generator=torch.Generator().manual_seed(1))))
    rows: list[Row] = []
    for positions in POSITIONS:
        executors = [filled(name, folder, positions) for name in ("float32", "float32+kv-int8")]
        pairs: list[list[float]] = []
        for number in range(options.repeats + 2):  # the first two warm up
            order = (0, 1) if number % 2 else (1, 0)
            taken = {index: decode_ms(executors[index], positions, hidden) for index in order}
            pairs.append([taken[0], taken[1]])
        plain, rounded = (list(column) for column in zip(*pairs[2:], strict=True))
        row: Row = {"positions": positions, "as they are, ms": quartiles(plain), "8 bits, ms": quartiles(rounded)}
        rows.append(row | {"of as they are": quartiles(ratios(rounded, plain))})
    return Report(rows, legend="median (quartiles)")
