"""The power of two by which a gradient is multiplied."""

from __future__ import annotations

from math import inf, nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmnode.core.gradient_size import LARGEST_EXPONENT, MOST_EXPONENT, exponent_for

LEAST = 2.0 ** (LARGEST_EXPONENT - 1)


@given(st.floats(2.0**-120, 2.0**120))
def test_the_largest_number_becomes_a_quarter_to_a_half(largest: float) -> None:
    assert LEAST <= largest * 2.0 ** exponent_for(largest) < 2 * LEAST


@pytest.mark.parametrize("largest", [0.0, -0.0, inf, nan])
def test_zeros_and_what_is_not_finite_stay_as_they_are(largest: float) -> None:
    assert exponent_for(largest) == 0


@given(st.floats(float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)), st.integers(0, 99))
def test_the_power_and_its_inverse_are_normal_numbers_of_fp32(largest: float, less: int) -> None:
    exponent = exponent_for(largest, less)
    assert abs(exponent) <= MOST_EXPONENT
    for power in (exponent, -exponent):
        assert np.float32(2.0**power) >= np.finfo(np.float32).tiny
