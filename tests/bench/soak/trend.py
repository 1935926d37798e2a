"""Whether a quantity that was sampled over time grows. It knows no clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bench.kit.report import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 10
T_95 = 2.306
"""Student's t for 95 % on both sides, with 8 degrees of freedom: those of a line through ten points."""


def slope_an_hour(times_s: Sequence[float], values: Sequence[float]) -> Interval:
    """The slope of a line through the medians of ten blocks of samples, and its interval of 95 %.

    Samples follow each other too closely to be independent, and some are taken at a busy moment. Medians of blocks
    suffer less from both. Raises ValueError if there are fewer than ten samples.
    """
    if len(values) < BLOCKS:
        raise ValueError(f"{len(values)} samples: {BLOCKS} are needed at least")
    hours = np.array([np.median(block) for block in np.array_split(np.asarray(times_s) / 3600, BLOCKS)])
    levels = np.array([np.median(block) for block in np.array_split(np.asarray(values, dtype=np.float64), BLOCKS)])
    from_mean = hours - hours.mean()
    slope = float(from_mean @ levels / (from_mean @ from_mean))
    rest = levels - levels.mean() - slope * from_mean
    error = math.sqrt(float(rest @ rest) / (BLOCKS - 2) / float(from_mean @ from_mean))
    return Interval(slope, slope - T_95 * error, slope + T_95 * error)
