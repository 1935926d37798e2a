"""LoRA (Hu et al. 2021): low-rank updates of a block's linear layers, as safetensors and back, by the names of PEFT.

An adapter has a part for each of its blocks. A part is a safetensors file with three tensors for each of its targets:
`NAME.lora_A.weight` (rank, inputs), `NAME.lora_B.weight` (outputs, rank), and `NAME.scale` (). A name is that of the
layer within the block, such as `self_attn.q_proj`. Parts come from strangers, so everything is checked.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import linear

from llmnode.core.adapters import MOST_RANK
from llmnode.errors import AdapterError
from llmnode.models.weights.packed_linear import HalfLinear, Q4Linear, Q8Linear
from llmnode.models.weights.quantized import Int8Linear, NF4Linear

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llmnode.core.operations import Buffer

_MOST_HEADER_BYTES = 1 << 16
"""A part has some dozens of tensors, and a header takes about 100 bytes for each."""
_LENGTH_BYTES = 8
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_A, _B, _SCALE = "lora_A.weight", "lora_B.weight", "scale"


@dataclass(frozen=True, slots=True)
class Target:
    """A linear layer of a block: the `outputs` of the module `module`, from the output `first` on."""

    module: str
    inputs: int
    first: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Lora:
    """The update of one linear layer: y = W x becomes y = W x + scale * b (a x)."""

    a: torch.Tensor  # (rank, inputs)
    b: torch.Tensor  # (outputs, rank)
    scale: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The addition to the outputs, (rows, outputs), for inputs (rows, inputs), in the dtype of its matrices."""
        return linear(linear(x.to(self.a.dtype), self.a), self.b) * self.scale

    @property
    def values(self) -> int:
        return self.a.numel() + self.b.numel()

    def leaf(self) -> Lora:
        """The same numbers, for gradients of their own."""
        return Lora(self.a.detach().requires_grad_(), self.b.detach().requires_grad_(), self.scale)


if TYPE_CHECKING:
    Part = Mapping[str, Lora]
    """The updates of one block, by the names of its layers."""


def matrices(part: Part) -> list[torch.Tensor]:
    """All matrices of a part: `a` and then `b` of each layer, by their names. Their gradients have the same order."""
    return [each for name in sorted(part) for each in (part[name].a, part[name].b)]


def values_of(part: Part) -> int:
    """How many numbers the matrices of a part have."""
    return sum(each.values for each in part.values())


def pack_part(part: Part) -> bytes:
    """The same part always gives the same bytes."""
    from safetensors.torch import save

    tensors = {}
    for name, lora in part.items():
        tensors[f"{name}.{_A}"] = lora.a.detach().contiguous()
        tensors[f"{name}.{_B}"] = lora.b.detach().contiguous()
        tensors[f"{name}.{_SCALE}"] = torch.tensor(lora.scale, dtype=torch.float32)
    return save(tensors)


def read_part(packed: Buffer, targets: Mapping[str, Target], device: torch.device) -> Part:
    """The part that a stranger sent for a block with these `targets`, in fp32 on `device`. Raises AdapterError."""
    tensors = _tensors(packed)
    part = {}
    for name, target in targets.items():
        found = [tensors.pop(f"{name}.{each}", None) for each in (_A, _B, _SCALE)]
        a, b, scale = found
        if a is not None and b is not None and scale is not None:
            _check(name, target, a, b, scale)
            by_rank = b.float().t().contiguous().t()  # as blocks in Rust read it, and to torch it is the same
            part[name] = Lora(a.float().to(device), by_rank.to(device), scale.item())
        elif any(each is not None for each in found):
            raise AdapterError(f"{name}: it needs {_A}, {_B} and {_SCALE}")
    if tensors:
        raise AdapterError(f"tensors that this block has no layer for: {reprlib.repr(sorted(tensors))}")
    if not part:
        raise AdapterError("a part without tensors")
    return part


def targets_of(block: torch.nn.Module) -> dict[str, Target]:
    """The linear layers of a block, without those of experts, by the names that transformers gives them.

    The block may be without storage. Its layers may be joined or in fewer bits.
    """
    found: dict[str, Target] = {}
    for path, module in block.named_modules():
        size = linear_size(module)
        if size is None or "experts" in path.split("."):
            continue
        inputs, outputs = size
        parent, _, own_name = path.rpartition(".")
        joined = getattr(block.get_submodule(parent), "joined", {}).get(own_name, {own_name: outputs})
        first = 0
        for name, each in joined.items():
            found[f"{parent}.{name}" if parent else name] = Target(path, inputs, first, each)
            first += each
    return found


def linear_size(module: Any) -> tuple[int, int] | None:  # Any: of one of many kinds
    """The inputs and outputs of a linear layer, whatever its weights are kept as; None for any other module."""
    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if isinstance(module, (HalfLinear, Q4Linear, Q8Linear, Int8Linear, NF4Linear)):
        return module.inputs, module.outputs
    if type(module).__name__ == "Conv1D":  # of transformers, for GPT-2
        inputs, outputs = module.weight.shape
        return inputs, outputs
    return None


def split_values(values: torch.Tensor, shapes: Sequence[torch.Size]) -> Iterator[torch.Tensor]:
    """Numbers that lie end to end, as tensors of these `shapes`."""
    sizes = [shape.numel() for shape in shapes]
    return (each.view(shape) for each, shape in zip(values.split(sizes), shapes, strict=True))


def _tensors(packed: Buffer) -> dict[str, torch.Tensor]:
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = bytes(packed)
    header_bytes = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < _LENGTH_BYTES or header_bytes > min(_MOST_HEADER_BYTES, len(data) - _LENGTH_BYTES):
        raise AdapterError(f"no safetensors: a header of {header_bytes} bytes in {len(data)}")
    try:
        return load(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, OverflowError) as error:
        raise AdapterError(f"no safetensors: {reprlib.repr(str(error))}") from error


def _check(name: str, target: Target, a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> None:
    rank = a.shape[0] if a.ndim else 0
    if not 1 <= rank <= MOST_RANK:
        raise AdapterError(f"{name}: a rank of {rank}, and 1 to {MOST_RANK} are allowed")
    shapes = tuple(a.shape), tuple(b.shape), tuple(scale.shape)
    if shapes != (expected := ((rank, target.inputs), (target.outputs, rank), ())):
        raise AdapterError(f"{name}: shapes {shapes}, expected {expected}")
    if a.dtype not in _DTYPES or b.dtype not in _DTYPES or scale.dtype != torch.float32:
        raise AdapterError(f"{name}: numbers of {a.dtype}, {b.dtype} and {scale.dtype}")
    if not all(bool(each.isfinite().all()) for each in (a, b, scale)):
        raise AdapterError(f"{name}: numbers that are not finite")
