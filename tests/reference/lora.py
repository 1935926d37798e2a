"""Adapters for executors in tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llmnode.core.ids import AdapterId
from llmnode.core.operations import Adopt
from llmnode.models.lora import pack_part, values_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from llmnode.compute.executor import SpanExecutor
    from llmnode.models.lora import Part

FURTHEST = 1e-5
"""The norm-relative error of a tensor in fp32."""


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


def adopt(executor: SpanExecutor, adapter: AdapterId, parts: Mapping[int, Part]) -> None:
    for block, part in parts.items():
        if executor.span.start <= block < executor.span.end:
            assert executor.apply(Adopt(adapter, block, values_of(part), pack_part(part)))


def digest(name: str) -> AdapterId:
    return AdapterId(name.encode().ljust(32))
