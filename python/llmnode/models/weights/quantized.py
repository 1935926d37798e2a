"""Linear layers with weights of 8 or 4 bits, in the place of those of a block. Norms and biases stay as they are.

A row's result does not depend on the rows beside it: each is scaled by itself, and products of integers are exact.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from llmnode.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

INT8_MAX = 127
OUTLIER = 6.0
"""LLM.int8 (Dettmers et al. 2022, section 3.2): larger inputs are not rounded to 8 bits, nor do they widen the steps of
the others."""
NF4_BLOCK = 64
"""The number of weights that share a scale (QLoRA, Dettmers et al. 2023)."""
_NF4_CODES = 16


class Int8Linear(torch.nn.Module):
    """Weights of 8 bits with a scale for each output; inputs are rounded to 8 bits too, with a scale for each row."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` is (outputs, inputs), of floating point. If it has no storage, the result has none either."""
        super().__init__()
        self.outputs, self.inputs = weight.shape
        self.weight, self.scale = map(_fixed, _int8(weight))
        self.bias = None if bias is None else _fixed(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            through: torch.Tensor = _StraightThrough.apply(x, self)
            return through
        return self.multiply(x)

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """The product, without a gradient."""
        rows = x.reshape(-1, x.shape[-1]).float()
        largest = rows.abs().amax(1, keepdim=True)
        # any(), not max(): a row that is no number must not decide for the others.
        outliers = _outliers(rows) if bool((largest >= OUTLIER).any()) else None
        if outliers is not None:
            rows = rows - outliers
            largest = rows.abs().amax(1, keepdim=True)
        scale = _scale(largest)
        product = _product((rows / scale).round_().to(torch.int8), self.weight)
        output = product.float().mul_(scale).mul_(self.scale)
        if outliers is not None:
            columns = outliers.any(0).nonzero()[:, 0]
            output += outliers[:, columns] @ (self.weight[:, columns].float() * self.scale[:, None]).T
        output = output.to(x.dtype)
        if self.bias is not None:
            output += self.bias
        return output.reshape(*x.shape[:-1], -1)


class _StraightThrough(torch.autograd.Function):
    """The product of an `Int8Linear`. Its gradient ignores the rounding of inputs, as bitsandbytes' `MatMul8bitLt`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: Int8Linear) -> torch.Tensor:  # Any: torch's, and not typed
        ctx.layer = layer
        return layer.multiply(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,), layer = gradients, ctx.layer
        return ((gradient.float() * layer.scale) @ layer.weight.float()).to(gradient.dtype), None


class NF4Linear(torch.nn.Module):
    """Weights of 4 bits, by bitsandbytes: which of 16 quantiles of a normal distribution, with a scale for each 64."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """`weight` is (outputs, inputs), of floating point. If it has no storage, the result has none either."""
        super().__init__()
        self.outputs, self.inputs = weight.shape
        self.packed, self.absmax, self.code = map(_fixed, _nf4(weight))
        self.bias = None if bias is None else _fixed(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        library = _bitsandbytes()
        shape = torch.Size((self.outputs, self.inputs))
        state = library.functional.QuantState(
            self.absmax, shape=shape, code=self.code, blocksize=NF4_BLOCK, quant_type="nf4", dtype=x.dtype
        )
        output: torch.Tensor = library.matmul_4bit(x, self.packed, quant_state=state, bias=self.bias)
        return output


_KINDS: dict[str, type[Int8Linear] | type[NF4Linear]] = {"int8": Int8Linear, "nf4": NF4Linear}


def quantize_block(block: torch.nn.Module, quant: str, device: str = "cpu") -> None:
    """Replace the linear layers of `block`, one by one, by others on `device`. Raises as `check_quantizable`."""
    check_quantizable(block)
    for name, linear in list(_linears(block)):
        _replace(block, name, _KINDS[quant](_weight(linear).to(device), linear.bias))


def quantized_state(block: torch.nn.Module, quant: str) -> dict[str, torch.Tensor]:
    """The state of `block` after `quantize_block`, without storage. `block` may be without storage too.

    Raises as `check_quantizable`.
    """
    check_quantizable(block)
    state = {name: each.to("meta") for name, each in block.state_dict().items()}
    for name, linear in _linears(block):
        del state[f"{name}.weight"]
        made = _KINDS[quant](_weight(linear).to("meta"), None)
        state |= {f"{name}.{own}": each for own, each in made.state_dict().items()}
    return state


def fill_block(block: torch.nn.Module, quant: str, state: Mapping[str, torch.Tensor]) -> None:
    """Like `quantize_block`, for a `block` without storage, with the `state` of a quantized one."""
    if quant == "nf4":
        _bitsandbytes()  # else the first forward would wait for it
    for name, linear in list(_linears(block)):
        _replace(block, name, _KINDS[quant](_weight(linear), linear.bias))
    block.load_state_dict(state, assign=True)


def quantized_bytes(block: torch.nn.Module, quant: str) -> int:
    """The bytes of `block` with quantized linear layers. It may be without storage. Raises as `quantized_state`."""
    return sum(each.nbytes for each in quantized_state(block, quant).values())


def check_quantizable(block: torch.nn.Module) -> None:
    """Raises ModelError for experts."""
    if has_experts(block):
        raise ModelError("the weights of a mixture of experts cannot be quantized: serve it without --quant")


def has_experts(block: torch.nn.Module) -> bool:
    """They are one tensor of three dimensions, and no linear layers."""
    return any(parameter.ndim > 2 for parameter in block.parameters())


def fast_quant(device: str) -> str:
    """The format of `--quant auto` on torch's `device`: the smallest that is no slower than none."""
    if torch.device(device).type == "cuda":
        return "nf4"
    return "int8" if _has_fast_int8() else "none"


def _linears(block: torch.nn.Module) -> Iterator[tuple[str, Any]]:  # Any: Linear, or GPT-2's Conv1D
    for name, module in block.named_modules():
        if isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D":  # of transformers
            yield name, module


def _replace(block: torch.nn.Module, name: str, layer: torch.nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(block.get_submodule(parent), child, layer)


def _weight(linear: Any) -> torch.Tensor:  # Any: likewise
    """(outputs, inputs); Conv1D has it the other way round."""
    weight: torch.Tensor = linear.weight.detach()
    return weight if isinstance(linear, torch.nn.Linear) else weight.T


def _int8(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, and the scales of outputs."""
    if weight.is_meta:  # torch takes the same time for an empty tensor as for a small layer
        outputs, inputs = weight.shape
        scales = torch.empty(outputs, dtype=torch.float32, device="meta")
        return torch.empty(outputs, inputs, dtype=torch.int8, device="meta"), scales
    weight = weight.float()
    scale = _scale(weight.abs().amax(1))
    codes = (weight / scale[:, None]).round_().to(torch.int8)
    return codes.contiguous(), scale  # GPT-2's lie the other way round


def _nf4(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The codes, two in a byte; the scales; the values of the codes."""
    if weight.is_meta:
        count = weight.numel()
        packed = torch.empty((count + 1) // 2, 1, dtype=torch.uint8, device="meta")
        sizes = -(-count // NF4_BLOCK), _NF4_CODES
        scales, values = (torch.empty(size, dtype=torch.float32, device="meta") for size in sizes)
        return packed, scales, values
    codes, state = _bitsandbytes().functional.quantize_4bit(weight.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    return codes, state.absmax, state.code


def _fixed(tensor: torch.Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(tensor.detach(), requires_grad=False)


def _scale(largest: torch.Tensor) -> torch.Tensor:
    return largest.clamp(min=torch.finfo(torch.float32).tiny) / INT8_MAX


def _outliers(rows: torch.Tensor) -> torch.Tensor:
    """The outliers of each row, and 0 elsewhere. The paper has whole columns; by row, none depends on the others."""
    return rows.masked_fill(rows.abs() < OUTLIER, 0)


def _product(rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """(rows, inputs) times (outputs, inputs), both int8: exact, in int32. Without fast integers, as exact as fp32."""
    if not rows.is_cuda and _has_fast_int8():
        return torch._int_mm(rows, weight.t())  # bitsandbytes uses it too, but its import takes seconds
    product: torch.Tensor = _bitsandbytes().functional.int8_linear_matmul(rows, weight)
    return product


def _has_fast_int8() -> bool:
    """Elsewhere torch multiplies integers one by one (bitsandbytes/backends/cpu/ops.py)."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def _bitsandbytes() -> Any:  # Any: it publishes no types
    """Takes seconds the first time."""
    # It warns that it has no kernel from the hub, for a layout of weights that we do not use.
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
    import bitsandbytes

    return bitsandbytes
