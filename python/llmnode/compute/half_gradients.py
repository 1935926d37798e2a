"""Powers of two by which the gradients of passes are larger while blocks compute in fp16.

`core/gradient_size.py` has the reason. The gradient of each pass is multiplied before, and its result divided after.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from llmnode.core.gradient_size import exponent_for

if TYPE_CHECKING:
    from collections.abc import Sequence


def scales_for(dtype: torch.dtype, gradients: Sequence[torch.Tensor], positions: Sequence[int]) -> Sequence[float]:
    """A scale for each pass, which has this number of `positions` of the `gradients`, (tokens, hidden_size) each."""
    if dtype != torch.float16:
        return [1.0] * len(positions)
    parts = torch.cat([*gradients]).split([*positions])
    return [2.0 ** exponent_for(float(part.abs().max())) for part in parts]


def scaled(parts: Sequence[torch.Tensor], scales: Sequence[float]) -> list[torch.Tensor]:
    """Each part times its scale. Those that have none are the same tensors."""
    return [part if scale == 1.0 else part * scale for part, scale in zip(parts, scales, strict=True)]
