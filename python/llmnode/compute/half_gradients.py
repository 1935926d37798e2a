"""Powers of two by which the gradients of passes are larger while blocks compute in fp16.

The gradients of a mean over thousands of positions lie near 1e-8, where fp16 has no numbers any more. A backward is
linear in the gradient, so each pass is computed with one whose largest number is 1/4 to 1/2, and the result is divided.
"""

from __future__ import annotations

from math import frexp
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

_LARGEST_EXPONENT = -1
"""That of the largest number. In fp16 one 2^22 times smaller is not zero, and one 130,000 times larger is finite."""
_MOST_EXPONENT = 126
"""2^126 and its inverse are normal numbers of fp32."""


def scales_for(dtype: torch.dtype, gradients: Sequence[torch.Tensor], positions: Sequence[int]) -> Sequence[float]:
    """A scale for each pass, which has this number of `positions` of the `gradients`, (tokens, hidden_size) each."""
    if dtype != torch.float16:
        return [1.0] * len(positions)
    parts = torch.cat([*gradients]).split([*positions])
    return [_scale(float(part.abs().max())) for part in parts]


def scaled(parts: Sequence[torch.Tensor], scales: Sequence[float]) -> list[torch.Tensor]:
    """Each part times its scale. Those that have none are the same tensors."""
    return [part if scale == 1.0 else part * scale for part, scale in zip(parts, scales, strict=True)]


def _scale(largest: float) -> float:
    """1 for a gradient of zeros, or of numbers that are not finite."""
    if not 0.0 < largest < float("inf"):
        return 1.0
    exponent = _LARGEST_EXPONENT - frexp(largest)[1]
    return 2.0 ** max(-_MOST_EXPONENT, min(exponent, _MOST_EXPONENT))
