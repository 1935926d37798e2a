"""The gain of `torch.compile` for a decode's step through blocks of SmolLM2 on a CPU, and the time of its start.

One token goes through ten blocks in fp32 on one thread: by torch as it is, compiled by Inductor, and in Rust, whose
weights have as few bits as they need. All take turns in one process. Each token attends to itself alone, so attention
is just its value. Inductor needs a C++ compiler.
"""

from __future__ import annotations

import statistics
import time
from typing import TYPE_CHECKING

import torch

from bench.kit.options import add_repeats
from bench.kit.report import Report, Row, ratios, spread
from llmnode.compute.executor import SpanExecutor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.operations import Open, Slice, Truncate
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.load import load_span
from llmnode.models.meta_model import ATTENTIONS
from llmnode.models.tensors import to_bytes

if TYPE_CHECKING:
    import argparse

    from bench.kit.options import Options

SPAN = Span(0, 10)
STEPS = 30
ITSELF = "itself"


def look_at_itself(
    _module: torch.nn.Module, query: torch.Tensor, _key: torch.Tensor, value: torch.Tensor, **_unused: object
) -> tuple[torch.Tensor, None]:
    return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2), None


def add(parser: argparse.ArgumentParser) -> None:
    add_repeats(parser, 15)


def run(options: Options) -> Report:
    folder = open_embedded()
    ATTENTIONS[ITSELF] = look_at_itself
    model = load_span(folder, SPAN, ITSELF)
    hidden, positions = torch.randn(1, folder.info.hidden_size), torch.zeros(1, dtype=torch.long)
    compiled = torch.compile(model.forward)
    began_s = time.perf_counter()
    with torch.inference_mode():
        first = compiled(SPAN, hidden, positions)
        started_s = time.perf_counter() - began_s
        assert torch.allclose(first, model(SPAN, hidden, positions), rtol=1e-3, atol=1e-3)
        began_s = time.perf_counter()
        compiled(SPAN, torch.randn(3, folder.info.hidden_size), torch.zeros(3, dtype=torch.long))
        again_s = time.perf_counter() - began_s
        rust = SpanExecutor(load_span(folder, SPAN, ITSELF, in_rust=True), folder.info.hidden_size, 8)
        session = SessionId(bytes(SESSION_ID_BYTES))
        assert rust.apply(Open(session, SPAN, 1))

        def in_rust() -> None:
            rust.forward([Slice(session, 0, 1, to_bytes(hidden))])
            rust.apply(Truncate(session, 0))

        ways = {
            "torch": lambda: model(SPAN, hidden, positions),
            "compiled": lambda: compiled(SPAN, hidden, positions),
            "Rust": in_rust,
        }
        took_ms: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(options.repeats):
            for name, step in ways.items():
                times_s = []
                for _ in range(STEPS):
                    began_s = time.perf_counter()
                    step()
                    times_s.append(time.perf_counter() - began_s)
                took_ms[name].append(1e3 * statistics.median(times_s))
    rows: list[Row] = [
        {"way": name, "ms": spread(each_ms), "of torch": spread(ratios(each_ms, took_ms["torch"]))}
        for name, each_ms in took_ms.items()
    ]
    return Report(rows, conditions={"compiled in, s": started_s, "for another number of tokens, s": again_s})
