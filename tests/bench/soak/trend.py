"""Whether a quantity that was sampled over time grows. No clock."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from bench.kit.report import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

BLOCKS = 10
T_95 = 2.306
"""Student's t for 95 % both ways, with the 8 degrees of freedom that a line through ten points leaves."""


def slope_an_hour(times_s: Sequence[float], values: Sequence[float]) -> Interval:
    """The slope of a line through the medians of ten blocks of samples, and its interval of 95 %.

    Samples follow each other too closely to count as independent, and some are taken at a busy moment: medians of
    blocks are not, or less so. Raises ValueError if there are fewer than ten samples.
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
