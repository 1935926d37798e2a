"""A slope and its interval, of samples whose trend is known."""

from __future__ import annotations

import numpy as np
import pytest

from bench.soak.trend import BLOCKS, slope_an_hour

TIMES_S = [5.0 * number for number in range(240)]  # 20 minutes


def noise(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=len(TIMES_S))


def test_a_line_has_its_slope_and_no_doubt() -> None:
    slope = slope_an_hour(TIMES_S, [7 + 3 * each / 3600 for each in TIMES_S])
    assert (slope.estimate, slope.low, slope.high) == pytest.approx((3, 3, 3))


def test_what_is_level_is_found_to_grow_in_one_of_forty_runs_and_to_shrink_as_often() -> None:
    slopes = [slope_an_hour(TIMES_S, noise(seed)) for seed in range(1000)]
    assert 10 <= sum(slope.low > 0 for slope in slopes) <= 45
    assert 10 <= sum(slope.high < 0 for slope in slopes) <= 45


def test_growth_by_twice_the_noise_is_found() -> None:
    slopes = [slope_an_hour(TIMES_S, noise(seed) + 2 * np.array(TIMES_S) / TIMES_S[-1]) for seed in range(200)]
    assert sum(slope.low > 0 for slope in slopes) > 195
    assert np.mean([slope.estimate for slope in slopes]) == pytest.approx(6.0, rel=0.05)


def test_a_moment_that_is_unlike_the_others_does_not_show() -> None:
    values = np.ones(len(TIMES_S))
    values[-3] = 1000
    assert slope_an_hour(TIMES_S, values).estimate == pytest.approx(0)


def test_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match=f"{BLOCKS - 1} samples"):
        slope_an_hour(TIMES_S[: BLOCKS - 1], TIMES_S[: BLOCKS - 1])
