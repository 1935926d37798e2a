"""Llama 3's scaling of rotary embeddings: from a GGUF file's factor for each frequency to the numbers in a config.

A config has four: the factor of low frequencies, how many turns within the original context are low and how many are
high, and that context. In between, the frequency is interpolated linearly by the number of turns.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

_ACCURACY = 2e-5
"""Relative: files have the factors in fp32, made from frequencies in fp32."""
_ORIGINAL_TOKENS = 8192
"""The original context of every Llama 3. The other numbers scale with it, so that it may be chosen where nothing else
says it."""


def llama3_scaling(
    factors: NDArray[np.float64], head_dim: int, base: float
) -> dict[str, Any] | None:  # Any: a config's
    """transformers' `rope_parameters` that give these factors. None if Llama 3's scaling does not."""
    if len(factors) != head_dim // 2 or not np.all(np.isfinite(factors)) or not np.all(factors > 0):
        return None
    turns = base ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * math.pi) * _ORIGINAL_TOKENS
    factor = _rounded(float(factors.max()))
    if factor <= 1:
        return None
    for low, high in _bounds(factors, turns, factor):
        if 0 < low < high and np.allclose(_factors(turns, factor, low, high), factors, rtol=_ACCURACY, atol=0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low,
                "high_freq_factor": high,
                "original_max_position_embeddings": _ORIGINAL_TOKENS,
            }
    return None


def _bounds(factors: NDArray[np.float64], turns: NDArray[np.float64], factor: float) -> Iterator[tuple[float, float]]:
    """The possible turns of the original context at which the factor begins to fall, and those at which it is 1."""
    yield 1.0, 4.0  # Llama 3's own
    smooth = (1 / factors - 1 / factor) / (1 - 1 / factor)  # 0 where low, 1 where high
    between = (smooth > 1e-3) & (smooth < 1 - 1e-3)
    if between.sum() >= 2:
        slope, begin = np.polyfit(turns[between], smooth[between], 1)
        yield _rounded(float(-begin / slope)), _rounded(float((1 - begin) / slope))
        return
    # Any line will do that is 0 at the low ones, 1 at the high ones, and goes through the one between, if there is one.
    low, high = float(turns[smooth <= 1e-3].max(initial=0)), float(turns[smooth >= 1 - 1e-3].min(initial=math.inf))
    for at, value in zip(turns[between], smooth[between], strict=True):
        yield low, float(low + (at - low) / value)
        yield float(high - (high - at) / (1 - value)), high
    yield low, high


def _factors(turns: NDArray[np.float64], factor: float, low: float, high: float) -> NDArray[np.float64]:
    smooth = np.clip((turns - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def _rounded(value: float) -> float:
    """The round number that a config's author has written, if `value` is that but for fp32."""
    return float(round(value, 2)) if math.isclose(value, round(value, 2), rel_tol=1e-3) else value
