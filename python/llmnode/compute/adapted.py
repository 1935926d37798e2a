"""Linear layers with what adapters add, in a forward whose rows have different adapters, or none.

Nothing is merged into the base weights, which may be of any form. The rows of an adapter lie together, so that each
layer multiplies them once: the cost grows with rows, and not with the number of adapters (S-LoRA, Sheng et al. 2023).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from llmnode.errors import ModelError
from llmnode.models.fused import FusedSpan
from llmnode.models.lora import targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llmnode.models.load import SpanModel
    from llmnode.models.lora import Part, Target


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows [`start`, `end`) of a forward, and the parts of the adapter that they have, by block."""

    start: int
    end: int
    parts: Mapping[int, Part]

    def leaves(self, block: int) -> AdaptedRows:
        """The same in one block, with matrices that gradients are computed for."""
        return replace(self, parts={block: {name: lora.leaf() for name, lora in self.parts.get(block, {}).items()}})


_rows_of_forward: ContextVar[Sequence[AdaptedRows]] = ContextVar("_rows_of_forward", default=())


@contextmanager
def adapted(rows: Sequence[AdaptedRows]) -> Iterator[None]:
    """In this context forwards of this thread have adapters in these `rows`, which are in order and do not overlap."""
    token = _rows_of_forward.set(rows)
    try:
        yield
    finally:
        _rows_of_forward.reset(token)


def has_adapters() -> bool:
    """Whether some rows of the present forward have one."""
    return bool(_rows_of_forward.get())


def adapt(model: SpanModel | FusedSpan) -> Mapping[int, Mapping[str, Target]]:
    """Have the linear layers of all blocks add what adapters give. Returns the layers of each block by name."""
    targets: dict[int, Mapping[str, Target]] = {}
    for index, block in zip(range(model.span.start, model.span.end), model.blocks, strict=True):
        targets[index] = of_block = targets_of(block)
        for path in {target.module for target in of_block.values()}:
            module = block.get_submodule(path)
            own = {name: target for name, target in of_block.items() if target.module == path}
            module.forward = _Adapted(module.forward, index, own)
    if isinstance(model, FusedSpan):
        model.read_layers()
    return targets


class _Adapted:
    """A linear layer's product in the block `block`, with what adapters add to it."""

    __slots__ = ("_block", "_product", "_targets")

    def __init__(
        self, product: Callable[[torch.Tensor], torch.Tensor], block: int, targets: Mapping[str, Target]
    ) -> None:
        """The `targets` are in the order of their outputs."""
        self._product, self._block, self._targets = product, block, targets

    def __call__(self, input: torch.Tensor) -> torch.Tensor:  # as torch names it
        output = self._product(input)
        rows = _rows_of_forward.get()
        return self._updated(input, output, rows) if rows else output

    def _updated(self, x: torch.Tensor, y: torch.Tensor, rows: Sequence[AdaptedRows]) -> torch.Tensor:
        here = [(each.start, each.end, part) for each in rows if (part := each.parts.get(self._block))]
        here = [each for each in here if not self._targets.keys().isdisjoint(each[2])]
        if not here:
            return y
        x, flat = x.reshape(-1, x.shape[-1]), y.reshape(-1, y.shape[-1])
        if here[-1][1] > len(flat):
            raise ModelError("a layer that does not compute all rows of a forward cannot have an adapter")
        if torch.is_grad_enabled():
            return (flat + self._whole(x, flat.shape[1], here)).to(y.dtype).view(y.shape)
        for start, end, part in here:
            for name, target in self._targets.items():
                if (lora := part.get(name)) is not None:
                    flat[start:end, target.first : target.first + target.outputs] += lora(x[start:end])
        return flat.view(y.shape)

    def _whole(self, x: torch.Tensor, outputs: int, here: Sequence[tuple[int, int, Part]]) -> torch.Tensor:
        """The same in one tensor (rows, outputs). To write into a part of one costs a gradient a copy of all of it."""
        pieces, at = [], 0
        for start, end, part in here:
            pieces.append(x.new_zeros(start - at, outputs, dtype=torch.float32))
            columns = [
                part[name](x[start:end])
                if name in part
                else x.new_zeros(end - start, target.outputs, dtype=torch.float32)
                for name, target in self._targets.items()
            ]
            pieces.append(torch.cat(columns, dim=1))
            at = end
        pieces.append(x.new_zeros(len(x) - at, outputs, dtype=torch.float32))
        return torch.cat(pieces)
