"""The difference that honest peers may have for the embedded model: one computes in Rust, its spot check in torch."""

from __future__ import annotations

import pytest
import torch

from llmnode.compute.kv import KVForm
from llmnode.compute.load_executor import load_executor
from llmnode.core.model import PRECISIONS
from llmnode.core.operations import Open, Slice
from llmnode.core.span import Span
from llmnode.models.embedded import open_embedded
from llmnode.models.load import load_ends
from llmnode.models.native import MOST_POSITIONS
from llmnode.models.tensors import to_bytes
from llmnode.models.text.tokenizer import load_tokenizer
from llmnode.session.recompute import deviations, tolerance
from llmnode.wire.payload import Codec, HiddenForm, decode_hidden
from reference.small import session

pytestmark = pytest.mark.reference

POSITIONS = MOST_POSITIONS + 1
PREFILL = 112
SHIFTED = slice(None, -1), slice(1, None)
"""Slices of rows that put each row beside the next."""
TEXT = "A position may be nearly one large value, which goes to either of two steps by the last bit of a sum. "


@pytest.mark.parametrize("kv_dtype", ["same", "int8"])
@torch.inference_mode()
def test_who_computes_in_rust_is_within_the_tolerance_of_who_computes_by_torch(kv_dtype: str) -> None:
    folder, span = open_embedded(), Span(0, 30)
    executor = load_executor(folder, span, 2 * POSITIONS, kv=KVForm(kv_dtype))
    hidden = load_ends(folder).embed(load_tokenizer(folder).encode(TEXT * 9)[:POSITIONS], 0)
    for name in (session(0), session(1)):
        assert executor.apply(Open(name, span, POSITIONS))
    lengths = [PREFILL, *[1] * (POSITIONS - PREFILL)]
    parts = zip(lengths, hidden.split(lengths), strict=True)
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    in_rust = [
        executor.forward([Slice(session(0), start, length, to_bytes(part))])[0]
        for start, (length, part) in zip(starts, parts, strict=True)
    ]
    (by_torch,) = executor.forward([Slice(session(1), 0, POSITIONS, to_bytes(hidden))])
    dtype = "float32" if kv_dtype == "same" else "float32+kv-int8"
    for codec in Codec:
        form = HiddenForm(folder.info.hidden_size, codec)
        sent = [form.encode(b"".join(in_rust)), form.encode(by_torch)]
        decoded = [decode_hidden(each, codec, POSITIONS * folder.info.hidden_size) for each in sent]
        assert 0 < max(deviations(*decoded, folder.info.hidden_size)) < tolerance(PRECISIONS[dtype], codec), codec


@pytest.mark.parametrize("codec", [Codec.FP16, Codec.BF16, Codec.INT8])
def test_one_large_value_at_either_of_two_steps_is_within_the_tolerance(codec: Codec) -> None:
    """The last bit of a sum can decide the step. The value is nearly all of its position, or second to a larger one."""
    form, width = HiddenForm(64, codec), 64
    for larger in (0.0, 2.0):
        rows = torch.zeros(20_000, width)
        rows[:, 0], rows[:, 1] = torch.linspace(0.25, 2.0, len(rows)), larger
        decoded = decode_hidden(form.encode(to_bytes(rows)), codec, rows.numel())
        one, other = (torch.frombuffer(bytearray(decoded), dtype=torch.float32).view_as(rows)[at] for at in SHIFTED)
        assert 0 < max(deviations(to_bytes(one), to_bytes(other), width)) < tolerance(PRECISIONS["float32"], codec)
