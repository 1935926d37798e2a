"""Hidden states between torch and the wire, without a copy where the bytes are ours to keep; and changes of tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

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


class _Steps:
    """How many steps all optimizers of this process have taken, since the first tensor was asked for."""

    taken = 0
    is_counting = False

    @classmethod
    def now(cls) -> int:
        if not cls.is_counting:
            cls.is_counting = True
            register_optimizer_step_post_hook(cls._count)
        return cls.taken

    @classmethod
    def _count(cls, *_step: object) -> None:
        cls.taken += 1


def version_of(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Another value when the tensor has been changed in place, has got other data, or is another tensor.

    torch does not count what fused optimizers change, which trainers use: a tensor that is trained has another value
    after each step of any optimizer. It does not see other changes in place through `tensor.data`, nor those of
    inference tensors.
    """
    steps = _Steps.now() if tensor.requires_grad else 0
    return id(tensor), tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version + steps
