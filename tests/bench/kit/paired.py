"""Compares two variants on the same material: where they agree, and how sure a difference is. No torch, no clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from bench.kit.report import Interval

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Agreement:
    """Choices of two variants, position by position. `near_ties` of the `differing` ones hardly matter."""

    positions: int
    differing: int
    near_ties: int

    @property
    def share(self) -> float:
        return 1 - self.differing / self.positions


def compare_choices(
    expected: Sequence[int], chosen: Sequence[int], gaps: Sequence[float], near_tie: float
) -> Agreement:
    """`gaps` are the leads of the expected choices over the next best. A lead below `near_tie` is a near tie."""
    differing = [gap for wanted, got, gap in zip(expected, chosen, gaps, strict=True) if wanted != got]
    return Agreement(len(expected), len(differing), sum(gap < near_tie for gap in differing))


def equal_prefix(expected: Sequence[int], chosen: Sequence[int]) -> int:
    """The number of equal tokens before the first difference."""
    pairs = enumerate(zip(expected, chosen, strict=True))
    return next((index for index, (wanted, got) in pairs if wanted != got), len(expected))


def change_percent(baseline: Sequence[float], variant: Sequence[float], seed: int = 0) -> Interval:
    """The change of a sum over chunks, in percent of the baseline's sum, by the paired bootstrap.

    Whole chunks are drawn again, each with both of its values, so it does not matter that some chunks are harder. The
    interval holds 95 % of the resamples. With one chunk it is a point, and says nothing.
    """
    both = np.array([baseline, variant], dtype=np.float64)  # (2, chunks)
    drawn = np.random.default_rng(seed).integers(both.shape[1], size=(RESAMPLES, both.shape[1]))
    sums = both[:, drawn].sum(axis=2)  # (2, resamples)
    low, high = np.percentile(_percent(sums[0], sums[1]), (2.5, 97.5))
    return Interval(float(_percent(*both.sum(axis=1))), float(low), float(high))


def _percent(baseline: NDArray[np.float64], variant: NDArray[np.float64]) -> NDArray[np.float64]:
    return 100 * (variant - baseline) / baseline
