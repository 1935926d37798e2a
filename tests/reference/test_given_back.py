"""An executor gives the memory that its process has freed back to the system, after what a client does in training."""

from __future__ import annotations

import ctypes
import sys
from typing import TYPE_CHECKING

import psutil
import pytest
import torch

from llmnode.compute.executor import _LARGE_TOKENS, _OF_BACKWARD
from llmnode.compute.load_executor import load_executor
from llmnode.core.operations import Backward, Evaluate, Forget
from llmnode.core.span import Span
from llmnode.models.tensors import to_bytes
from reference.lora import digest
from reference.small import HIDDEN_SIZE, KV_TOKENS, open_saved, save_model

if TYPE_CHECKING:
    from pathlib import Path

    from llmnode.compute.executor import SpanExecutor

pytestmark = [
    pytest.mark.reference,
    pytest.mark.skipif(
        sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="libc cannot give memory back"
    ),
]

FREED_BYTES = 64 << 20
PIECE_BYTES = 64 << 10
"""The allocator takes pieces of this size from its heap, and keeps them there after they are freed."""
SPAN = Span(0, 2)


@pytest.fixture
def executor(tmp_path: Path) -> SpanExecutor:
    save_model(tmp_path, "llama", tied=True)
    return load_executor(open_saved(tmp_path), SPAN, KV_TOKENS)


def own_bytes() -> int:
    """Memory of this process alone."""
    return int(psutil.Process().memory_full_info().uss)


def freed_and_kept() -> torch.Tensor:
    """Free FREED_BYTES, which the allocator keeps while the result lives, since that lies behind them."""
    pieces = [torch.ones(PIECE_BYTES // 4) for _ in range(FREED_BYTES // PIECE_BYTES)]
    return pieces[-1]


def share_given_back(executor: SpanExecutor, operation: Backward | Evaluate | Forget) -> float:
    """The share of the freed memory that the system has back after the operation."""
    behind, before = freed_and_kept(), own_bytes()
    executor.apply(operation) if isinstance(operation, Forget) else executor.run([operation])
    given_back = before - own_bytes()
    del behind
    return given_back / FREED_BYTES


def test_after_a_version_of_an_adapter_is_forgotten(executor: SpanExecutor) -> None:
    assert share_given_back(executor, Forget(digest("a version"))) > 0.8


def test_after_a_backward_of_a_quarter_of_the_positions_of_a_forward(executor: SpanExecutor) -> None:
    length = _LARGE_TOKENS // _OF_BACKWARD
    rows = to_bytes(torch.ones(length, HIDDEN_SIZE))
    for operation in (Backward(SPAN, (length,), rows, rows), Evaluate(SPAN, (length,), rows)):
        executor.run([operation])  # what a first one needs for itself
    assert share_given_back(executor, Backward(SPAN, (length,), rows, rows)) > 0.8
    assert share_given_back(executor, Evaluate(SPAN, (length,), rows)) < 0.2, "it costs time, and here little is freed"
