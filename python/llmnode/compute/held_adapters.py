"""The adapters that an executor holds: the parts that belong to its blocks. Others decide when they come and go."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from llmnode.compute.adapted import AdaptedRows, adapt
from llmnode.errors import AdapterError, LocalProtocolError
from llmnode.models.lora import read_part, values_of
from llmnode.models.native import native_adapter

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import torch

    from llmnode._native import LlamaAdapter
    from llmnode.compute.dropout import DroppedRows
    from llmnode.core.ids import AdapterId
    from llmnode.core.operations import Adopt
    from llmnode.models.fused import FusedSpan
    from llmnode.models.load import SpanModel
    from llmnode.models.lora import Part, Target


class HeldAdapters:
    """By their digests. The blocks of `model` are prepared when the first one comes: others pay nothing for it."""

    def __init__(self, model: SpanModel | FusedSpan, device: torch.device) -> None:
        self._model = model
        self._device = device
        self._targets: Mapping[int, Mapping[str, Target]] | None = None
        self._held: dict[AdapterId, dict[int, Part]] = {}
        self._in_rust: dict[AdapterId, LlamaAdapter] = {}
        """Those that were used there, over the same memory."""

    def adopt(self, operation: Adopt) -> None:
        """Raises AdapterError if the part does not fit the block, or has another size than it says."""
        if self._targets is None:
            self._targets = adapt(self._model)
        if (targets := self._targets.get(operation.block)) is None:
            raise LocalProtocolError(f"block {operation.block} is not here")
        part = read_part(operation.weights, targets, self._device)
        if (values := values_of(part)) != operation.values:
            raise AdapterError(f"a part of {values} numbers that was said to have {operation.values}")
        self._held.setdefault(operation.adapter, {})[operation.block] = part
        self._in_rust.pop(operation.adapter, None)

    def forget(self, adapter: AdapterId) -> None:
        self._held.pop(adapter, None)
        self._in_rust.pop(adapter, None)

    def in_rust(self, adapter: AdapterId | None) -> LlamaAdapter | None:
        """The adapter for the model's blocks in Rust, if there is one."""
        if adapter is None:
            return None
        if (found := self._in_rust.get(adapter)) is None:
            found = self._in_rust[adapter] = native_adapter(self._of(adapter), self._targets or {})
        return found

    def rows(
        self, lengths: Iterable[tuple[AdapterId | None, int, DroppedRows | None]], *, together: bool
    ) -> Sequence[AdaptedRows]:
        """The rows that have an adapter, where the rows of each length, one after another, have those beside it.

        Neighbours of one adapter without dropout are taken `together`, or each by itself.
        """
        found: list[AdaptedRows] = []
        start = 0
        before: AdapterId | None = None
        for adapter, length, dropout in lengths:
            if adapter is not None:
                if together and adapter == before and dropout is found[-1].dropout is None:
                    found[-1] = replace(found[-1], end=start + length)
                else:
                    found.append(AdaptedRows(start, start + length, self._of(adapter), dropout))
            start, before = start + length, adapter
        return found

    def _of(self, adapter: AdapterId) -> Mapping[int, Part]:
        if (parts := self._held.get(adapter)) is None:
            raise LocalProtocolError(f"the adapter {adapter.hex()} is not here")
        return parts
