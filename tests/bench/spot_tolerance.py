"""The distance between honest peers of one profile, and of a cheap fake: for the tolerance of `session/recompute.py`.

The checked peer computes SmolLM2-135M as in a session: a prefill, then position by position beside three other
sessions, in float32 all of it in Rust. The checker computes the same positions alone, in one prefill, by torch. Both
have the same input to the bit. Every figure is a relative L2 error of one position, in the bytes that both would send
in the session's codec.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from bench.kit.decoding import load_in
from bench.kit.report import Report, Row
from llmnode.compute.executor import SpanExecutor
from llmnode.compute.kv import KVForm
from llmnode.compute.load_executor import load_executor
from llmnode.core.ids import SESSION_ID_BYTES, SessionId
from llmnode.core.model import DTYPES, PRECISIONS
from llmnode.core.operations import Close, Open, Slice
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.load import load_ends
from llmnode.models.tensors import to_bytes
from llmnode.models.text.tokenizer import load_tokenizer
from llmnode.session.recompute import deviations
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Sequence

    from bench.kit.options import Options
    from llmnode.wire.frame import Buffer

POSITIONS = 160
PREFILL = 96
COMPANY = 3
SPANS = [Span(0, 10), Span(10, 20), Span(20, 30), Span(0, 30)]
LEGEND = "relative L2 errors: honest median and largest, fakes least and median"
TOPICS = ["specialnames", "typesseq", "formatstrings", "dynamic-features"]


def as_session(executor: SpanExecutor, span: Span, rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """Run `rows`, one tensor a session, side by side, and return the outputs of the first."""
    names = [SessionId(bytes([index + 1]) * SESSION_ID_BYTES) for index in range(len(rows))]
    outputs: list[Buffer] = []
    for name in names:
        assert executor.apply(Open(name, span, POSITIONS))
    for name, hidden in zip(names, rows, strict=True):
        made = executor.forward([Slice(name, 0, PREFILL, to_bytes(hidden[:PREFILL]))])
        outputs += made if name == names[0] else []
    for at in range(PREFILL, POSITIONS):
        pieces = [Slice(name, at, 1, to_bytes(hidden[at : at + 1])) for name, hidden in zip(names, rows, strict=True)]
        outputs.append(executor.forward(pieces)[0])
    for name in names:
        executor.apply(Close(name))
    return torch.cat([torch.frombuffer(bytearray(each), dtype=torch.float32) for each in outputs])


def as_check(executor: SpanExecutor, span: Span, hidden: torch.Tensor) -> torch.Tensor:
    name = SessionId(b"c" * SESSION_ID_BYTES)
    assert executor.apply(Open(name, span, POSITIONS))
    (made,) = executor.forward([Slice(name, 0, POSITIONS, to_bytes(hidden))])
    executor.apply(Close(name))
    return torch.frombuffer(bytearray(made), dtype=torch.float32)


def apart(one: torch.Tensor, other: torch.Tensor, form: HiddenForm) -> torch.Tensor:
    ours, theirs = (decode_hidden(form.encode(to_bytes(each)), form.codec, each.numel()) for each in (one, other))
    return torch.tensor(deviations(ours, theirs, form.hidden_size))


def quantized(bits: int) -> Callable[[torch.nn.Module], None]:
    """Round linear weights to `bits`, in groups of 64 with one scale each."""

    def spoil(model: torch.nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, torch.nn.Linear):
                groups = module.weight.data.view(-1, 64)
                scale = groups.abs().amax(1, keepdim=True) / (2 ** (bits - 1) - 1) + 1e-12
                module.weight.data = ((groups / scale).round() * scale).view_as(module.weight)

    return spoil


def row_of(who: str, what: str, codec: str, span: Span, low: float, high: float) -> Row:
    """For honest peers `low` and `high` are the median and the largest error; for a fake the least and the median."""
    return {"who": who, "what": what, "codec": codec, "blocks": str(span), "low": f"{low:.1e}", "high": f"{high:.1e}"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=PRECISIONS,
        metavar="PRECISION",
        help="as float32+int8: measure honest peers alone (default: each dtype, and fakes)",
    )


@torch.inference_mode()
def run(options: Options) -> Report:
    import pydoc_data.topics

    folder = open_embedded()
    ends, tokenizer = load_ends(folder), load_tokenizer(folder)
    texts = [tokenizer.encode(pydoc_data.topics.topics[topic])[:POSITIONS] for topic in TOPICS]
    whole = load_executor(folder, Span(0, 30), 4 * 4 * POSITIONS)
    rows = {0: [ends.embed(text, 0) for text in texts]}
    for until in (10, 20):
        rows[until] = [as_check(whole, Span(0, until), hidden).view(POSITIONS, -1) for hidden in rows[0]]
    size = folder.info.hidden_size

    def turns(span: Span) -> list[list[torch.Tensor]]:
        of = rows[span.start]
        return [of[index:] + of[:index] for index in range(len(of))]

    found: list[Row] = []
    for name in options.precision or DTYPES:
        executor = load_in(name, folder, Span(0, 30), 4 * 4 * POSITIONS)
        for span in SPANS:
            pairs = [(as_session(executor, span, of), as_check(executor, span, of[0])) for of in turns(span)]
            for codec in Codec:
                errors = torch.cat([apart(one, other, HiddenForm(size, codec)) for one, other in pairs])
                found.append(row_of("honest", name, codec, span, errors.median().item(), errors.max().item()))
    if options.precision:
        return Report(found, legend=LEGEND)
    fakes: dict[str, Callable[[Span], SpanExecutor]] = {
        "bfloat16 for float32": lambda _span: load_executor(folder, Span(0, 30), 16 * POSITIONS, torch.bfloat16),
        "weights of 8 bits": lambda _span: spoiled(quantized(8)),
        "weights of 4 bits": lambda _span: spoiled(quantized(4)),
    }

    def spoiled(spoil: Callable[[torch.nn.Module], None]) -> SpanExecutor:
        beside = KVForm(device=torch.device("cpu"))  # so that weights are not packed into fewer bits
        executor = load_executor(folder, Span(0, 30), 16 * POSITIONS, kv=beside)
        spoil(executor.model)
        return executor

    for what, make in fakes.items():
        executor = make(SPANS[0])
        for span in SPANS:
            pairs = [(as_check(executor, span, of[0]), as_check(whole, span, of[0])) for of in turns(span)]
            errors = torch.cat([apart(one, other, HiddenForm(size, Codec.RAW)) for one, other in pairs])
            found.append(row_of("fake", what, "raw", span, errors.min().item(), errors.median().item()))
    for span in SPANS:
        for what, less in [("last block left out", Span(span.start, span.end - 1))]:
            pairs = [(as_check(whole, less, of[0]), as_check(whole, span, of[0])) for of in turns(span)]
            errors = torch.cat([apart(one, other, HiddenForm(size, Codec.RAW)) for one, other in pairs])
            found.append(row_of("fake", what, "raw", span, errors.min().item(), errors.median().item()))
        pairs = [(of[0].reshape(-1), as_check(whole, span, of[0])) for of in turns(span)]
        errors = torch.cat([apart(one, other, HiddenForm(size, Codec.RAW)) for one, other in pairs])
        found.append(row_of("fake", "the input handed on", "raw", span, errors.min().item(), errors.median().item()))
    return Report(found, legend=LEGEND)
