"""Hidden states between torch and the wire, without a copy where the bytes are ours to keep; and changes of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from llmnode.wire.frame import Buffer


FLOAT_BYTES = 4
"""The bytes of one number in hidden states, in fp32."""


def from_bytes(data: Buffer, hidden_size: int) -> torch.Tensor:
    """fp32 hidden states (tokens, hidden_size) over bytes that nobody will change. Read-only bytes are copied."""
    if memoryview(data).readonly:  # torch has no read-only tensors
        data = bytearray(data)
    return torch.frombuffer(data, dtype=torch.float32).view(-1, hidden_size)


def to_bytes(hidden: torch.Tensor) -> Buffer:
    """The bytes of an fp32 tensor; it must not be changed afterwards."""
    return hidden.detach().contiguous().numpy().data.cast("B")


def version_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Another value when the tensor has been changed in place, has got other data, or is another tensor.

    It does not see changes in place through `tensor.data`, nor those of inference tensors: torch does not count them.
    """
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
