"""Linear layers with what adapters add, in a forward whose rows have different adapters, or none.

Nothing is merged into the base weights, which may be of any form. The rows of an adapter lie together, so that each
layer multiplies them once: the cost grows with rows, and not with the number of adapters (S-LoRA, Sheng et al. 2023).
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from llmnode.errors import ModelError
from llmnode.models.fused import FusedSpan
from llmnode.models.lora import targets_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llmnode.compute.dropout import DroppedRows
    from llmnode.models.load import SpanModel
    from llmnode.models.lora import Lora, Part, Target


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """The rows [`start`, `end`) of a forward, and the parts of the adapter that they have, by block."""

    start: int
    end: int
    parts: Mapping[int, Part]
    dropout: DroppedRows | None = None

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
            if isinstance(module.forward, _Adapted):
                continue  # another executor has the block too
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
        here, masks = [], []
        for each in rows:
            for name, target in self._targets.items():
                if (lora := each.parts.get(self._block, {}).get(name)) is None:
                    continue
                scale = lora.scale * (1.0 if each.dropout is None else each.dropout.scale)
                here.append(_Update(each.start, each.end, target.first, target.outputs, lora, scale))
                layer = f"{self._block}.{name}"
                masks.append(None if each.dropout is None else each.dropout.kept(layer, x.shape[-1]))
        if not here:
            return y
        if here[-1].end > y.numel() // y.shape[-1]:
            raise ModelError("a layer that does not compute all rows of a forward cannot have an adapter")
        matrices = [matrix for each in here for matrix in (each.lora.a, each.lora.b)]
        outputs = y.float()
        if torch.is_grad_enabled() and outputs._is_view():  # autograd does not let some views be changed in place
            outputs = outputs.clone()
        updated: torch.Tensor = _Updated.apply(x.float(), outputs, here, masks, *matrices)
        return updated.to(y.dtype)


class _Update(NamedTuple):
    """An adapter adds this to `outputs` outputs from `first` on, for the rows [`start`, `end`)."""

    start: int
    end: int
    first: int
    outputs: int
    lora: Lora
    scale: float

    def of_rows(self, states: torch.Tensor, kept: torch.Tensor | None) -> torch.Tensor:
        """Its rows of `states` (..., size), as (rows, size), with 0 for what is not `kept`."""
        own = states.reshape(-1, states.shape[-1])[self.start : self.end]
        return own if kept is None else kept.to(own.dtype).mul_(own)

    def of_outputs(self, states: torch.Tensor) -> torch.Tensor:
        """Its rows and outputs of `states` (..., all outputs), over the same memory."""
        flat = states.view(-1, states.shape[-1])
        return flat[self.start : self.end, self.first : self.first + self.outputs]


class _Updated(torch.autograd.Function):
    """The outputs `y` of a layer with what `updates` add to them, for its inputs `x`, some of which are dropped.

    They are added in place. A layer's outputs are several times its inputs, and each copy of them takes a training pass
    a tenth of the time of the product itself.
    """

    @staticmethod
    def forward(
        ctx: Any,  # Any: torch's
        x: torch.Tensor,
        y: torch.Tensor,
        updates: Sequence[_Update],
        masks: Sequence[torch.Tensor | None],
        *matrices: torch.Tensor,
    ) -> torch.Tensor:
        ctx.mark_dirty(y)
        ctx.updates = updates
        lows = []
        for each, kept, (a, b) in zip(updates, masks, _pairs(matrices), strict=True):
            lows.append(low := each.of_rows(x, kept) @ a.t())
            each.of_outputs(y).addmm_(low, b.t(), alpha=each.scale)
        ctx.save_for_backward(x, *lows, *masks, *matrices)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *saved = ctx.saved_tensors
        count = len(ctx.updates)
        lows, masks, matrices = saved[:count], saved[count : 2 * count], saved[2 * count :]
        of_x, of_matrices = torch.zeros_like(x), []
        gradient = gradient.contiguous()
        for each, low, kept, (a, b) in zip(ctx.updates, lows, masks, _pairs(matrices), strict=True):
            own = each.of_outputs(gradient)
            of_low = (own @ b).mul_(each.scale)
            of_rows = of_x.view(-1, of_x.shape[-1])[each.start : each.end]
            if kept is None:
                of_rows.addmm_(of_low, a)
            else:
                of_rows.add_((of_low @ a).mul_(kept))
            of_matrices += [of_low.t() @ each.of_rows(x, kept), (own.t() @ low).mul_(each.scale)]
        return of_x, gradient, None, None, *of_matrices


def _pairs(matrices: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    return zip(matrices[::2], matrices[1::2], strict=True)
