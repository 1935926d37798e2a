"""Weights in fewer bits than they are computed with, and of the same value: products take them as fp32 again.

Weights that files have in bf16 or fp16 stay so. Weights that were widened from GGUF's Q4_1, Q4_0 or Q8_0 are recognized
as 4 or 8 bits again. Products do not change, and memory is a half or a fifth. A decode, whose time is that of reading
its weights, takes less (in Rust, see `native.py`). Many rows take longer, by the widening. They are buffers, and no
parameters: such weights cannot be trained.
"""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from llmnode import _native

if TYPE_CHECKING:
    from collections.abc import Callable

    _Widened = Callable[[slice, torch.Tensor], torch.Tensor]
    """A function that widens a slice of the outputs into a tensor of their size."""

HALVES = {"BF16": torch.bfloat16, "F16": torch.float16}
"""By the names that safetensors has for them."""
_MOST_WIDENED = 1 << 22
"""Weights at a time. More do not stay in a cache until they are multiplied; with fewer, BLAS is slow."""
_GROUP = 32
"""The number of weights of 4 or 8 bits along the inputs that share their levels."""
_kept = threading.local()


class HalfLinear(torch.nn.Module):
    """Weights of 16 bits, all else of 32: products for many rows."""

    weight: torch.Tensor

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` is (outputs, inputs), of one of `HALVES`; `bias` (outputs) of fp32."""
        super().__init__()
        self.register_buffer("weight", weight.detach())
        self.bias = bias
        self.outputs, self.inputs = weight.shape

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _in_parts(x, self, lambda some, out: out.copy_(self.weight[some]))

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """Weights of the outputs `which`, of any shape: (*which.shape, inputs).

        Raises IndexError for an output that there is not, also below 0.
        """
        return torch.embedding(self.weight, which).float()


class Q4Linear(torch.nn.Module):
    """Weights of 4 bits, each one of 16 levels of its group, all else of fp32: products for many rows."""

    codes: torch.Tensor
    levels: torch.Tensor

    def __init__(self, codes: torch.Tensor, levels: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`codes` are (outputs, inputs / 2) of bytes, `levels` (outputs, inputs / 32, 2): `_native.pack_q4`'s."""
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("levels", levels)
        self.bias = bias
        self.outputs, self.inputs = len(codes), 2 * codes.shape[1]

    @classmethod
    def found(cls, plain: torch.nn.Linear) -> Q4Linear | None:
        """The same layer, if its weights are of no more than 4 bits."""
        outputs, inputs = plain.weight.shape
        if not _is_in_groups(plain.weight):
            return None
        codes = torch.empty(outputs, inputs // 2, dtype=torch.uint8)
        levels = torch.empty(outputs, inputs // _GROUP, 2, dtype=torch.float32)
        is_found = _native.pack_q4(plain.weight.detach().numpy(), codes.numpy(), levels.numpy())
        return cls(codes, levels, plain.bias) if is_found else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _in_parts(x, self, self._widened)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """The same as `HalfLinear.rows`."""
        codes, levels = torch.embedding(self.codes, which), torch.embedding(self.levels.flatten(1), which)
        weights = torch.empty(*which.shape, self.inputs, dtype=torch.float32)
        _native.widen(("q4", codes.numpy(), levels.numpy()), weights.numpy())
        return weights

    def _widened(self, some: slice, out: torch.Tensor) -> torch.Tensor:
        # By this thread: torch's, which wait for work, hold the other cores.
        _native.widen(("q4", self.codes[some].numpy(), self.levels[some].numpy()), out.numpy())
        return out


class Q8Linear(torch.nn.Module):
    """Weights of 8 bits, each a multiple of the step of its group, all else of fp32: products for many rows."""

    codes: torch.Tensor
    steps: torch.Tensor

    def __init__(self, codes: torch.Tensor, steps: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`codes` are (outputs, inputs) of int8, `steps` (outputs, inputs / 32): `_native.pack_q8`'s."""
        super().__init__()
        self.register_buffer("codes", codes)
        self.register_buffer("steps", steps)
        self.bias = bias
        self.outputs, self.inputs = codes.shape

    @classmethod
    def found(cls, plain: torch.nn.Linear) -> Q8Linear | None:
        """The same layer, if its weights are of no more than 8 bits."""
        outputs, inputs = plain.weight.shape
        if not _is_in_groups(plain.weight):
            return None
        codes = torch.empty(outputs, inputs, dtype=torch.int8)
        steps = torch.empty(outputs, inputs // _GROUP, dtype=torch.float32)
        is_found = _native.pack_q8(plain.weight.detach().numpy(), codes.numpy(), steps.numpy())
        return cls(codes, steps, plain.bias) if is_found else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _in_parts(x, self, self._widened)

    def rows(self, which: torch.Tensor) -> torch.Tensor:
        """The same as `HalfLinear.rows`."""
        codes, steps = torch.embedding(self.codes, which), torch.embedding(self.steps, which)
        weights = torch.empty(*which.shape, self.inputs, dtype=torch.float32)
        _native.widen(("q8", codes.numpy(), steps.numpy()), weights.numpy())
        return weights

    def _widened(self, some: slice, out: torch.Tensor) -> torch.Tensor:
        _native.widen(("q8", self.codes[some].numpy(), self.steps[some].numpy()), out.numpy())
        return out


Narrow: TypeAlias = HalfLinear | Q4Linear | Q8Linear


def keep_narrow(block: Any) -> None:  # Any: a module has the attributes of its block
    """Have the linear layers of `block`, whose weights may be of 16 bits, compute in 32 with as few as they need."""
    for parent in (block.self_attn, block.mlp):
        for name, module in list(parent.named_children()):
            if isinstance(module, torch.nn.Linear):
                is_half = module.weight.dtype in HALVES.values()
                found = HalfLinear(module.weight, module.bias) if is_half else found_narrow(module)
                setattr(parent, name, found or module)


def found_narrow(linear: torch.nn.Linear) -> Q4Linear | Q8Linear | None:
    """The same layer, whose weights are of 32 bits, with as few as they need."""
    return Q4Linear.found(linear) or Q8Linear.found(linear)


def _is_in_groups(weight: torch.Tensor) -> bool:
    return weight.dtype == torch.float32 and weight.shape[1] % _GROUP == 0


def _in_parts(x: torch.Tensor, layer: Narrow, widened: _Widened) -> torch.Tensor:
    """The product of `x` with the weights of `layer`. `widened` gives the weights of some outputs at a time."""
    if torch.is_grad_enabled() and x.requires_grad:
        through: torch.Tensor = _Product.apply(x, layer, widened)
        return through
    return _multiplied(x, layer, widened)


class _Product(torch.autograd.Function):
    """The same. Its graph keeps no wide weights: the gradient has them widened again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Narrow, widened: _Widened) -> torch.Tensor:  # Any: torch's
        ctx.layer, ctx.widened = layer, widened
        return _multiplied(x, layer, widened)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        outputs, inputs = ctx.layer.outputs, ctx.layer.inputs
        rows, sums = gradient.reshape(-1, outputs), None
        for some in reversed(_parts(outputs, inputs)):
            part = rows[:, some] @ ctx.widened(some, _scratch(some.stop - some.start, inputs))
            sums = part if sums is None else sums.add_(part)
        assert sums is not None
        return sums.view(*gradient.shape[:-1], inputs), None, None


def _multiplied(x: torch.Tensor, layer: Narrow, widened: _Widened) -> torch.Tensor:
    """The product, without a gradient."""
    outputs, inputs, bias = layer.outputs, layer.inputs, layer.bias
    parts = _parts(outputs, inputs)
    if len(parts) == 1:
        return linear(x, widened(slice(None), _scratch(outputs, inputs)), bias)
    product = x.new_empty(*x.shape[:-1], outputs)
    for some in parts:
        weight = widened(some, _scratch(some.stop - some.start, inputs))
        product[..., some] = linear(x, weight, None if bias is None else bias[some])
    return product


def _parts(outputs: int, inputs: int) -> list[slice]:
    """All outputs, some at a time."""
    size = max(1, _MOST_WIDENED // inputs)
    return [slice(first, min(first + size, outputs)) for first in range(0, outputs, size)]


def _scratch(*shape: int) -> torch.Tensor:
    """The same memory for whatever this thread widens next, which finds it in a cache."""
    floats: torch.Tensor | None = getattr(_kept, "floats", None)
    if floats is None or len(floats) < math.prod(shape):
        with torch.inference_mode(mode=False):  # or it could not be written to outside
            floats = _kept.floats = torch.empty(math.prod(shape), dtype=torch.float32)
    return floats[: math.prod(shape)].view(shape)
